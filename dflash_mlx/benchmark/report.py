"""What is said about a measurement: a table for the terminal, JSON for a file, and where the figures belong."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from .figures import Row
from .lossless import Lossless
from .runs import Run, Settings

VERSIONS = ("dflash-mlx", "mlx", "mlx-lm", "transformers", "numpy")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
COLUMNS = (
    "block", "tokens/s", "spread", "speed-up", "tau", "rho", "round", "draft", "verify", "host",
    "first token", "prefill/s", "memory", "lossless",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A whole measurement. `verdicts` belong to `rows`, one each; `about` names models and flags."""

    rows: list[Row]
    verdicts: list[Lossless]
    kinds: list[dict[str, Any]]
    runs: list[Run]
    settings: Settings
    about: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {
            "environment": environment(),
            "about": self.about,
            "settings": asdict(self.settings),
            "rows": [
                {**row.to_dict(), "lossless": found.exact, "near_tie": found.near_tie, "difference": found.detail}
                for row, found in zip(self.rows, self.verdicts, strict=True)
            ],
            "by_kind": self.kinds,
            "runs": [run.to_dict() for run in self.runs],
        }

    def tables(self, title: str) -> list[Table]:
        """The rows, and the kinds of prompt where there are several."""
        several = len({entry["kind"] for entry in self.kinds}) > 1
        return [_table(self.rows, self.verdicts, title), *([_kinds(self.kinds)] if several else [])]

    def notes(self) -> list[str]:
        """What the table has no room for: drafts that were off, differences in full."""
        lines = {f"block {row.arm}: draft off: {row.draft_off}": None for row in self.rows if row.draft_off}
        for row in self.rows:
            everything = len({run.task for run in self.runs if run.context == row.context})
            if row.prompts < everything:
                lines[f"{everything - row.prompts} of {everything} prompts ended too soon to be timed"] = None
        for row, found in zip(self.rows, self.verdicts, strict=True):
            if found.detail:
                lines[f"block {row.arm}: {found.detail}"] = None
        return list(lines)


def environment() -> dict[str, Any]:
    """Machine and versions that figures belong to."""
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "chip": mx.device_info().get("device_name", "unknown"),
        "device": str(mx.default_device()),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
        "preload": os.environ.get("LD_PRELOAD") or os.environ.get("DYLD_INSERT_LIBRARIES"),
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the checkout this runs from, "+" behind it for changes; None outside one, or without git."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def _table(rows: Sequence[Row], verdicts: Sequence[Lossless], title: str) -> Table:
    contexts = any(row.context for row in rows)
    table = Table(title=title, caption="draft, verify, host: parts of rho, in plain steps, from a profiled run")
    for name in (["context"] if contexts else []) + list(COLUMNS):
        table.add_column(name, justify="right")
    before = rows[0].context
    for row, found in zip(rows, verdicts, strict=True):
        if row.context != before:
            table.add_section()
            before = row.context
        cells = [
            row.arm, f"{row.tps:.1f}", f"{row.spread:.0%}", f"{row.speedup:.2f}", f"{row.tau:.2f}", f"{row.rho:.2f}",
            f"{row.round_ms:.1f} ms",
            *("" if part is None else f"{part:.2f}" for part in (row.draft, row.verify, row.host)),
            f"{row.first_token_seconds * 1000:.0f} ms", f"{row.prefill_tps:.0f}", f"{row.peak_memory:.2f} GB",
            found.text,
        ]  # fmt: skip
        table.add_row(*([str(row.context)] if contexts else []), *cells)
    return table


def _kinds(kinds: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="speed-up (tau) by kind of prompt")
    arms = list(dict.fromkeys(entry["arm"] for entry in kinds if entry["arm"] != "plain"))
    contexts = any(entry["context"] for entry in kinds)
    for name in [*(["context"] if contexts else []), "kind", *arms]:
        table.add_column(name, justify="right")
    for context, kind in dict.fromkeys((entry["context"], entry["kind"]) for entry in kinds):
        cells = [
            "" if entry["speedup"] is None else f"{entry['speedup']:.2f} ({entry['tau']:.2f})"
            for entry in kinds
            if (entry["context"], entry["kind"]) == (context, kind) and entry["arm"] != "plain"
        ]
        table.add_row(*([str(context)] if contexts else []), kind, *cells)
    return table
