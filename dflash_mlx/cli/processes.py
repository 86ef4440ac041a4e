"""A benchmark's runs in processes of their own, with and without settings of MLX, which reads them when it starts.

Knows the command line and its JSON, no model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DFlashError
from ..settings import SWITCH

if TYPE_CHECKING:
    from rich.table import Table

MARK = "DFLASH_MLX_SETTINGS_RUN"  # in the environment of a process that measures one side
SIDES = ("without", "with")


@dataclass(frozen=True)
class Comparison:
    """Reports (`benchmark --json`) of each side, pair by pair.

    Attributes:
        same_text: whether both sides must give the same text.
        faults: whether some run's text was not plain decoding's own.
    """

    settings: dict[str, str]
    reports: dict[str, list[dict[str, Any]]]
    same_text: bool
    faults: bool

    @property
    def good(self) -> bool:
        return not self.faults and all(row["same_text"] is not False for row in self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """For each arm and context: tokens a second of each side, and the median and range of the pairs' ratios."""
        found = []
        for i, first in enumerate(self.reports["with"][0]["rows"]):
            sides = {side: [report["rows"][i] for report in self.reports[side]] for side in SIDES}
            ratios = [b["tps"] / a["tps"] for a, b in zip(*(sides[side] for side in SIDES), strict=True)]
            texts = {side: [_texts(report, first) for report in self.reports[side]] for side in SIDES}
            found.append({
                "arm": first["arm"],
                "context": first["context"],
                **{f"tps_{side}": statistics.median(row["tps"] for row in sides[side]) for side in SIDES},
                "ratio": statistics.median(ratios),
                "ratio_range": (min(ratios), max(ratios)),
                "first_token_ratio": statistics.median(
                    b["first_token_seconds"] / a["first_token_seconds"]
                    for a, b in zip(*(sides[side] for side in SIDES), strict=True)
                ),
                "peak_memory_ratio": max(row["peak_memory"] for row in sides["with"])
                / max(row["peak_memory"] for row in sides["without"]),
                "same_text": texts["with"] == texts["without"] if self.same_text else None,
            })  # fmt: skip
        return found

    def table(self) -> Table:
        from rich.table import Table

        title = f"with and without {', '.join(f'{name}={value}' for name, value in self.settings.items())}"
        table = Table(title=title, caption=f"medians of {len(self.reports['with'])} pairs of processes")
        names = ("block", "without", "with", "ratio", "of pairs", "first token", "memory", "same text")
        contexts = any(row["context"] for row in self.rows())
        for name in (["context"] if contexts else []) + list(names):
            table.add_column(name, justify="right")
        for row in self.rows():
            table.add_row(
                *([str(row["context"])] if contexts else []),
                row["arm"], f"{row['tps_without']:.1f} tokens/s", f"{row['tps_with']:.1f} tokens/s",
                f"{row['ratio']:.3f}", "{:.3f} to {:.3f}".format(*row["ratio_range"]),
                f"x {row['first_token_ratio']:.2f}", f"x {row['peak_memory_ratio']:.2f}",
                {None: "n/a", True: "yes", False: "NO"}[row["same_text"]],
            )  # fmt: skip
        return table

    def to_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "rows": self.rows(), **self.reports}


def compare(argv: Sequence[str], settings: dict[str, str], pairs: int, same_text: bool) -> Comparison:
    """Run a benchmark command `pairs` times with and without settings, in alternating order.

    Args:
        argv: the command and its flags, as they were given.
    """
    reports: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    faults = False
    for i in range(pairs):
        for side in SIDES if i % 2 == 0 else SIDES[::-1]:
            print(f"pair {i + 1} of {pairs}: {side}", file=sys.stderr)
            environ = {name: value for name, value in os.environ.items() if name not in settings}
            environ |= {SWITCH: "none", MARK: side, **(settings if side == "with" else {})}
            report, code = _run(argv, environ)
            reports[side].append(report)
            faults = faults or code != 0
    return Comparison(settings, reports, same_text, faults)


def _run(argv: Sequence[str], environ: dict[str, str]) -> tuple[dict[str, Any], int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "dflash_mlx", *argv, "--repeat", "1", "--json", str(file)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if not file.is_file():
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise DFlashError(f"--settings: a run ended with exit code {done.returncode}: {said[-1]}")
        return json.loads(file.read_text()), done.returncode


def _texts(report: dict[str, Any], row: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens by task of a row's timed runs."""
    runs = (run for run in report["runs"] if (run["arm"], run["context"]) == (row["arm"], row["context"]))
    limit = report["settings"]["max_tokens"]  # behind it a round with a draft may end anywhere
    return {run["task"]: run["tokens"][:limit] for run in runs if run["turn"] >= 0}
