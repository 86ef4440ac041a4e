"""What is known of a pair of models before a request begins, from earlier ones: costs of rounds, acceptance, losses.

One table a process, for all threads; a file beside it where a command asks for one. Knows models by their size only.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from ..target.structure import named_modules
from .costs import RANGES, STANDS_FOR, RoundCosts
from .rates import SlotRates

PAIRS = 64  # kept in the file, the latest used
KEEP_EVERY = 10.0  # seconds between two writes of a process
OLD = 200.0  # rounds that a figure is taken to be old whose file does not say


def to_dict(costs: RoundCosts) -> dict[str, Any]:
    """As plain JSON values, without what rests on a round or two."""
    ranges = {}
    for i, of_range in costs.ranges.items():
        trusted = [width for width, samples in sorted(of_range.samples.items()) if len(samples) >= STANDS_FOR]
        known = of_range.known()
        ranges[str(i)] = {str(width): [round(known[width], 7), int(of_range.age(width))] for width in trusted}
    return {
        "costs": {i: widths for i, widths in ranges.items() if widths},
        "rates": {temp: rates.to_list() for temp, rates in costs.rates.items()},
    }


def from_dict(stored: Any, dearer: RoundCosts | None = None) -> RoundCosts:
    """What can be read of it; the rest is nothing that could not be measured again."""
    ranges: dict[int, dict[int, tuple[float, float]]] = {}
    for i, widths in _items(_get(stored, "costs") or stored):
        if _is_number(i) and int(i) < RANGES:
            found = {int(width): _figure(value) for width, value in _items(widths) if _is_number(width)}
            ranges[int(i)] = {width: value for width, value in found.items() if value and 0 < width < 1 << 16}
    costs = RoundCosts({i: known for i, known in ranges.items() if known}, dearer)
    for temp, value in _items(_get(stored, "rates")):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            costs.rates[f"{float(temp):.1f}"] = SlotRates.from_list(value)
    return costs


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10


def _figure(value: Any) -> tuple[float, float] | None:
    """(seconds, rounds since it was measured)."""
    try:
        seconds, age = value if isinstance(value, list) else (value, OLD)
        seconds, age = float(seconds), float(age)
    except (ValueError, TypeError, OverflowError):
        return None
    return (seconds, age) if 0 < seconds < 3600 and 0 <= age < 1e9 else None


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
    """Where it is kept: `$DFLASH_MLX_CACHE` or `$XDG_CACHE_HOME/dflash-mlx` or `~/.cache/dflash-mlx`."""
    home = os.environ.get("DFLASH_MLX_CACHE")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dflash-mlx"
    return base.expanduser() / "costs.json"


class _Table:
    """The pairs that this process met."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pairs: dict[str, RoundCosts] = {}
        self.written = -KEEP_EVERY  # when

    def get(self, pair: str, dearer: RoundCosts | None, kept: bool) -> RoundCosts:
        key = f"{machine()}; {pair}"
        with self.lock:
            if key not in self.pairs:
                with dearer.lock if dearer else contextlib.nullcontext():
                    self.pairs[key] = from_dict(_read().get(key) if kept else None, dearer)
            return self.pairs[key]

    def keep(self) -> None:
        with self.lock:
            now = time.monotonic()
            if now - self.written < KEEP_EVERY:
                return
            self.written = now
            stored = _read()
            for key, memory in self.pairs.items():
                with memory.lock:
                    new = to_dict(memory)
                if new["costs"]:
                    stored.pop(key, None)
                    stored[key] = new
            _write(dict(list(stored.items())[-PAIRS:]))


_table = _Table()


def round_costs(pair: str, dearer: RoundCosts | None = None, kept: bool = False) -> RoundCosts:
    """What this process knows of a pair.

    Args:
        dearer: of rounds with more work in them, which stand in for what was not measured (see `WidthCosts`).
        kept: whether a pair that is new to this process starts from the file.
    """
    return _table.get(pair, dearer, kept)


def keep_memory() -> None:
    """Write what is known to the file, now and then. One that can't be written is said once, and costs nothing else."""
    _table.keep()


def _write(stored: dict[str, Any]) -> None:
    file, temporary = costs_file(), None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".costs.", delete=False) as stream:
            temporary = Path(stream.name)
            json.dump(stored, stream)
        temporary.replace(file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        warnings.warn(f"measured round costs can't be kept ({error}); they are measured again next time", stacklevel=2)


def _read() -> dict[str, Any]:
    """The file, or nothing where it is missing or damaged: it holds only what can be measured again."""
    try:
        stored = json.loads(costs_file().read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}
