"""What a round costs on this machine, by width: learned from the rounds themselves, kept between runs.

The figures belong to one pair, machine and way of decoding (the key) and to a range of context lengths. Knows
widths and seconds, and models by their size only; knows no acceptance.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import warnings
from collections import deque
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from ..target.structure import named_modules

SAMPLES = 12  # latest rounds of a width that its cost is taken from
TRUSTED = 3  # samples from which a cost is worth keeping on disk, and as many it then stands for
BUCKET = 2048  # tokens of the first range of context lengths; each further one is twice as long
STALE_PLAIN = 100  # rounds with a block after which a plain step is measured again
STALE_BLOCK = 500  # plain rounds after which a block is
RANGES = 32  # of them, more than any context needs
KEYS = 64  # pairs kept on disk, the latest used


class WidthCosts:
    """Seconds of a round by width for one range of context lengths.

    A cost is the lower quartile of the latest rounds, since whatever else runs on a machine only adds to it.

    Args:
        known: what to start from. dearer: costs of rounds with more work in them, which stand in for widths that were
            measured less than `TRUSTED` times.
    """

    def __init__(self, known: dict[int, float] | None = None, dearer: WidthCosts | None = None):
        self.dearer = dearer
        self.samples = {width: deque([seconds] * TRUSTED, SAMPLES) for width, seconds in sorted((known or {}).items())}
        self._quartiles = {width: samples[0] for width, samples in self.samples.items()}
        self._known: dict[int, float] | None = None

    def count(self, width: int) -> int:
        """Rounds of this width that were measured."""
        own = len(self.samples.get(width, ()))
        return own if self.dearer is None else max(own, self.dearer.count(width))

    def add(self, width: int, seconds: float) -> None:
        samples = self.samples.setdefault(width, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._quartiles[width] = sorted(samples)[len(samples) // 4]
        self._known = None

    def measured(self) -> dict[int, float]:
        """Widths that were measured here, ascending, with their seconds.

        A wider round can't cost more than a narrower one and a plain step for each further row: a figure above that
        was taken while the machine was busy.
        """
        if self._known is None:
            known: dict[int, float] = {}
            narrower = 1
            for width, seconds in sorted(self._quartiles.items()):
                if narrower > 1 and 1 in known:
                    seconds = min(seconds, known[narrower] + (width - narrower) * known[1])
                known[width] = seconds
                narrower = width
            self._known = known
        return self._known

    def known(self) -> dict[int, float]:
        """The same, with what dearer rounds say of other widths."""
        if self.dearer is None:
            return self.measured()
        own = self.measured()
        trusted = {width: seconds for width, seconds in own.items() if len(self.samples[width]) >= TRUSTED}
        known = dict(sorted({**own, **self.dearer.known(), **trusted}.items()))
        least = float("inf")
        for width in reversed(known):  # fewer rows cost no more than what was measured of more
            least = known[width] = min(least, known[width])
        return known

    def curve(self, widest: int) -> list[float]:
        """Seconds of rounds of width 1, 2, ...: between two measured widths on the line between them, beyond the last
        on its line. Some width must have been measured."""
        known = self.known()
        return [_on_line(known, width) for width in range(1, widest + 1)]


def _on_line(known: dict[int, float], width: int) -> float:
    if width in known:
        return known[width]
    below, above = [w for w in known if w < width], [w for w in known if w > width]
    if not below:
        return known[above[0]]
    if not above and len(below) == 1:
        return known[below[0]]
    left, right = (below[-1], above[0]) if above else below[-2:]
    slope = max(0.0, (known[right] - known[left]) / (right - left))
    return known[right] - slope * (right - width)


class RoundCosts:
    """Costs of one pair on this machine, by range of context lengths; see `WidthCosts` for `dearer`."""

    def __init__(self, ranges: dict[int, dict[int, float]] | None = None, dearer: RoundCosts | None = None):
        self.dearer = dearer
        self.ranges: dict[int, WidthCosts] = {}
        for i, known in (ranges or {}).items():
            self.ranges[i] = self._range(i, known)
        self.warm: set[tuple[int, int]] = set()  # the first round of a width in a process compiles kernels
        # Rounds of the other kind since a plain one, and since a block, was measured: what is not chosen is not
        # corrected. What another process measured is looked at again sooner.
        self.since_plain = STALE_PLAIN - 20 if ranges else 0
        self.since_block = STALE_BLOCK - 100 if ranges else 0

    def at(self, context: int) -> WidthCosts:
        """The costs at a context of so many tokens; a new range starts from the nearest, by preference shorter.

        Costs of a shorter context are too low, and a width that looks too cheap is tried and found out.
        """
        i = (context // BUCKET).bit_length()
        if i not in self.ranges:
            others = sorted(self.ranges, key=lambda j: (j > i, abs(j - i)))
            self.ranges[i] = self._range(i, self.ranges[others[0]].known() if others else None)
        return self.ranges[i]

    def _range(self, i: int, known: dict[int, float] | None) -> WidthCosts:
        return WidthCosts(known, self.dearer.at((BUCKET << i) // 2) if self.dearer else None)

    def add(self, context: int, width: int, seconds: float) -> None:
        """Take one round into account, unless it is the first of its width here."""
        i = (context // BUCKET).bit_length()
        measured = (i, width) in self.warm
        if measured:
            self.at(context).add(width, seconds)
        self.warm.add((i, width))
        if width == 1:
            self.since_block += 1
            self.since_plain = 0 if measured else self.since_plain
        else:
            self.since_plain += 1
            self.since_block = 0 if measured else self.since_block

    def worth_keeping(self) -> dict[str, dict[str, float]]:
        """As plain JSON values, without what rests on a round or two."""
        kept = {
            str(i): {str(w): round(s, 7) for w, s in costs.measured().items() if len(costs.samples[w]) >= TRUSTED}
            for i, costs in self.ranges.items()
        }
        return {i: widths for i, widths in kept.items() if widths}


def describe_pair(target: Any, draft: Any, way: Sequence[str]) -> str:
    """What the cost of a round depends on besides the machine: size and form of both models, how tokens are picked."""

    def form(model: Any) -> str:
        while not isinstance(model, nn.Module) and getattr(model, "draft", None) is not None:
            model = model.draft  # a drafter around it
        if not isinstance(model, nn.Module):
            return type(model).__name__
        layers = list(getattr(model, "layers", ()))
        # The first and the last layer stand for all: a walk through each of them takes milliseconds at every call.
        held = (item for _, part in named_modules(model, closed=layers[1:-1]) for item in part.items())
        arrays = [value for key, value in held if isinstance(value, mx.array) and not key.startswith("_")]
        dtypes = sorted({str(array.dtype).removeprefix("mlx.core.") for array in arrays})
        name, window = type(model).__module__.rpartition(".")[2], getattr(model, "context_window", None)
        size = f"{name} {len(layers)} layers {sum(a.nbytes for a in arrays)} bytes {'+'.join(dtypes)}"
        return f"{size} window {window}" if window else size

    return ", ".join([f"target {form(target)}", f"draft {form(draft)}", *way])


@cache
def machine() -> str:
    """What a figure depends on besides the models: device, MLX, and on Linux a preloaded BLAS."""
    device = mx.device_info() if mx.metal.is_available() else {}
    parts = [str(device.get("device_name") or f"{platform.machine()} cpu"), f"mlx {version('mlx')}"]
    if preloaded := os.environ.get("LD_PRELOAD"):
        parts.append(Path(preloaded).name)
    return ", ".join(parts)


def costs_file() -> Path:
    """Where costs are kept: `$DFLASH_MLX_CACHE` or `$XDG_CACHE_HOME/dflash-mlx` or `~/.cache/dflash-mlx`."""
    home = os.environ.get("DFLASH_MLX_CACHE")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dflash-mlx"
    return base.expanduser() / "costs.json"


_known: dict[str, RoundCosts] = {}  # of this process


def round_costs(pair: str, dearer: RoundCosts | None = None) -> RoundCosts:
    """The costs of a pair on this machine, from this process or from the file, empty at first."""
    key = f"{machine()}; {pair}"
    if key not in _known:
        stored = _read().get(key, {})
        known = {int(i): {int(w): s for w, s in widths.items()} for i, widths in stored.items()}
        _known[key] = RoundCosts(known, dearer)
    return _known[key]


def keep_costs(pair: str) -> None:
    """Write the costs of a pair to the file. A file that can't be written is said once, and costs nothing else."""
    key = f"{machine()}; {pair}"
    new = _known[key].worth_keeping() if key in _known else {}
    stored = _read()
    if not new or _close(stored.get(key, {}), new):
        return
    stored.pop(key, None)
    stored[key] = new
    file = costs_file()
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".costs.", delete=False) as stream:
            temporary = Path(stream.name)
            json.dump(dict(list(stored.items())[-KEYS:]), stream)
        temporary.replace(file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        warnings.warn(f"measured round costs can't be kept ({error}); they are measured again next time", stacklevel=2)


def _close(old: dict[str, dict[str, float]], new: dict[str, dict[str, float]]) -> bool:
    """Whether the same widths are known and none has moved by a tenth: then writing is not worth it."""
    if {i: set(widths) for i, widths in old.items()} != {i: set(widths) for i, widths in new.items()}:
        return False
    return all(abs(new[i][w] - s) <= 0.1 * s for i, widths in old.items() for w, s in widths.items())


def _read() -> dict[str, dict[str, dict[str, float]]]:
    """The file, or nothing where it is missing or damaged: it holds only what can be measured again."""
    try:
        stored = json.loads(costs_file().read_text())
        return {
            str(key): {
                str(int(i)): {str(int(w)): float(s) for w, s in widths.items() if 0 < float(s) < 3600 and int(w) > 0}
                for i, widths in ranges.items()
                if 0 <= int(i) < RANGES
            }
            for key, ranges in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
