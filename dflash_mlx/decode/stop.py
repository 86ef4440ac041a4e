"""Stop strings: text ends before the first of them, and no part of one is ever shown. Knows text only."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may turn out to be the beginning of a stop string.

    Args:
        stops: non-empty strings; none means that everything passes at once.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str] = ()):
        if isinstance(stops, str):
            stops = [stops]
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop is {stops!r}, expected texts that are not empty")
        self.stops = list(stops)
        self.found: str | None = None
        self._held = ""

    def add(self, text: str) -> str:
        """What may be shown after this text; nothing more once a stop string was found."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._possible_beginning()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self.stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self.stops):
                return size
        return 0
