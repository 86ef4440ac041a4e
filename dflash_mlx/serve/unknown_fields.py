"""Fields of requests that no table knows: refused, or passed over and told in the log."""

from __future__ import annotations

import logging

from .errors import ApiError

log = logging.getLogger(__name__)

TOLD = 256  # that the log names; their names are the clients' to choose


class UnknownFields:
    """What becomes of a field that no table knows.

    Args:
        ignored: leave it out and say so once in the log (`--ignore-unknown-fields`), instead of refusing the request.
    """

    def __init__(self, ignored: bool = False):
        self.ignored = ignored
        self._told: set[str] = set()

    def meet(self, name: str) -> None:
        """Raise `ApiError` 400, or note it."""
        if not self.ignored:
            raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_field")
        if name not in self._told and len(self._told) < TOLD:
            self._told.add(name)
            log.warning("requests carry the field %.100r, which this server does not know and ignores", name)
