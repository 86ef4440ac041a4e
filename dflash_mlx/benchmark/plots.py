"""Plots of a measurement as PNG files, with matplotlib (an extra). Knows rows, no model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DFlashError
from .figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require() -> None:
    """Raise `DFlashError` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise DFlashError("--plots needs matplotlib: pip install 'dflash-mlx[plot]'")


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG a plot; returns the files. Nothing is drawn without rows that had a draft."""
    require()
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    drafted = [row for row in rows if row.block_size != 1]
    files = []
    for name, draw in PLOTS.items() if drafted else ():
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw(figure.subplots(), drafted)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def _speedup_by_block(axes: Axes, rows: Sequence[Row]) -> None:
    for context in _contexts(rows):
        here = [row for row in rows if row.context == context]
        low = [row.speedup - row.speedup_range[0] for row in here]
        high = [row.speedup_range[1] - row.speedup for row in here]
        axes.errorbar(
            [row.arm for row in here], [row.speedup for row in here], [low, high], fmt="o", capsize=4,
            label=_label(context),
        )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        title="Speed-up over plain mlx-lm", xlabel="block size", ylabel="speed-up (bars: all repeats)", ylim=(0, None)
    )
    axes.legend()


def _acceptance_by_position(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        slots = range(1, 1 + len(row.acceptance))
        axes.plot(slots, row.acceptance, marker="o", markersize=3, label=f"block {row.arm}, {_label(row.context)}")
    axes.set(title="Acceptance by position", xlabel="slot of the block", ylabel="share of rounds", ylim=(0, 1))
    axes.legend(fontsize="small")


def _rho_by_context(axes: Axes, rows: Sequence[Row]) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        here = [row for row in rows if row.arm == arm]
        axes.plot([row.prompt_tokens for row in here], [row.rho for row in here], marker="o", label=f"block {arm}")
    axes.set(title="Time of a round in plain steps", xlabel="prompt tokens", ylabel="rho", ylim=(0, None))
    axes.legend()


PLOTS = {
    "speedup-by-block": _speedup_by_block,
    "acceptance-by-position": _acceptance_by_position,
    "rho-by-context": _rho_by_context,
}


def _contexts(rows: Iterable[Row]) -> list[int | None]:
    return list(dict.fromkeys(row.context for row in rows))


def _label(context: int | None) -> str:
    return "prompts as they are" if context is None else f"context {context}"
