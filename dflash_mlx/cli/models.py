"""`dflash-mlx models`: which pairs are published, and which mlx-lm families a draft can drive."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

# Columns of the table of pairs -> the least width of the terminal that shows them; --json has every field.
COLUMNS = {
    "target": 0, "draft": 0, "problem": 0, "kind": 60, "block": 60, "generation": 75, "revision": 95, "size": 105,
    "licence": 125, "taps": 150, "thinking": 150, "status": 165, "layout": 180,
}  # fmt: skip
GENERATIONS = (
    "Where a repo was overwritten, both generations are listed; the commit gives the older one: "
    "--draft-model auto --draft-revision {revision}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("filter", nargs="?", default="", help="only rows whose names contain this")
    parser.add_argument("--families", action="store_true", help="mlx-lm families and what was verified, by test")
    parser.add_argument("--json", action="store_true", help="one JSON array on stdout, with every field")


def run(args: argparse.Namespace) -> int:
    rows = _families(args.filter.lower()) if args.families else _pairs(args.filter.lower())
    if args.json:
        print(json.dumps(rows))
    elif args.families:
        _table(rows, dict.fromkeys(rows[0], 0) if rows else {})
    else:
        _table(rows, COLUMNS)
        older = (row["revision"] for row in rows if row["generation"] == "original" and row["revision"])
        if revision := next(older, None):
            print(GENERATIONS.format(revision=revision[:12]))
    return 0


def _pairs(wanted: str) -> list[dict[str, Any]]:
    """A row a draft, the user's own first; `wanted` may be part of any name. Its `problem`: why it can't run here."""
    from ..pairs.fit import family_problem
    from ..pairs.registry import pairs, user_pairs

    rows = []
    for pair in (*user_pairs(), *pairs()):
        facts = {name: value for name, value in vars(pair).items() if name not in ("targets", "drafts")}
        for draft in pair.drafts:
            row = {"target": ", ".join(pair.targets), "draft": draft.repo, **dataclasses.asdict(draft), **facts}
            if wanted in " ".join((row["target"], *draft.repos)).lower():
                problem = draft.problem() or (family_problem(pair.model_type) if pair.model_type else None)
                rows.append({**row, "problem": problem})
    return rows


def _families(wanted: str) -> list[dict[str, Any]]:
    from ..pairs.families import families

    return [
        {**dataclasses.asdict(family), "caches": ", ".join(family.caches)}
        for name, family in families().items()
        if wanted in name.lower()
    ]


def _table(rows: list[dict[str, Any]], columns: dict[str, int]) -> None:
    """Print as many columns as the terminal has room for; 200 characters where the output is none."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=200)
    names = [name for name, width in columns.items() if width <= console.width] if rows else []
    table = Table()
    for name in names or ["nothing found"]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row) for name in names))
    console.print(table)
    if len(names) < len(columns) and rows:
        print(f"{len(columns) - len(names)} more columns in a wider window, everything with --json")


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    if name == "revision" and value:
        return str(value)[:12]
    if name == "taps":
        return str(len(value) if value else row["tap_count"] or "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value) if name == "problem" else str(value)[:44]
