"""Measure DFlash against plain mlx-lm on this machine.

`texts` and `prompts` say what is decoded, `dataset` reads public sets, `heavy` makes a target cost more, `runs`
measures, `figures` and `lossless` sum up, `report` and `plots` show. The terminal is `cli.benchmark`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .figures import Row, by_kind, rows
from .heavy import widen
from .lossless import Lossless, verdict
from .prompts import Task
from .report import Report, environment
from .runs import PLAIN, Arm, Pair, Run, Settings, measure

__all__ = [
    "PLAIN", "Arm", "Lossless", "Pair", "Report", "Row", "Run", "Settings", "Task", "environment", "run", "widen",
]  # fmt: skip


def run(
    pair: Pair,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    settings: Settings,
    about: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Measure every task with plain mlx-lm and with each of `arms`, and sum up.

    Args:
        about: goes into the report as it is.

    Raises `DFlashError` when the texts end too early to time.
    """
    arms = [PLAIN, *arms]
    runs = measure(pair, tasks, arms, settings, progress)
    found = rows(runs, {arm.label: arm.block_size for arm in arms})
    verdicts = [_verdict(pair, tasks, runs, settings, row) for row in found]
    return Report(found, verdicts, by_kind(runs, [arm.label for arm in arms]), runs, settings, about or {})


def _verdict(pair: Pair, tasks: Sequence[Task], runs: Sequence[Run], settings: Settings, row: Row) -> Lossless:
    here = [task for task in tasks if task.context == row.context]
    both = [r for r in runs if r.context == row.context and r.arm in (row.arm, PLAIN.label)]
    return verdict(pair, here, both, settings)
