"""`dflash-mlx models`: which pairs are published, and which mlx-lm families a draft can drive."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("filter", nargs="?", default="", help="only rows whose names contain this")
    parser.add_argument("--families", action="store_true", help="mlx-lm families and what was verified, by test")
    parser.add_argument("--json", action="store_true", help="one JSON array on stdout")


def run(args: argparse.Namespace) -> int:
    rows = _families(args.filter.lower()) if args.families else _pairs(args.filter.lower())
    if args.json:
        print(json.dumps(rows))
    else:
        _table(rows)
    return 0


def _pairs(wanted: str) -> list[dict[str, Any]]:
    from ..registry import pairs

    rows = []
    for pair in pairs():
        for draft in pair.drafts:
            facts = dataclasses.asdict(draft)
            names = ("kind", "block", "size", "licence", "status", "revision")
            row = {"target": ", ".join(pair.targets), "draft": draft.repo, **{name: facts[name] for name in names}}
            if wanted in f"{row['target']} {row['draft']}".lower():
                rows.append(row)
    return rows


def _families(wanted: str) -> list[dict[str, Any]]:
    from ..families import families

    return [
        {**dataclasses.asdict(family), "caches": ", ".join(family.caches)}
        for name, family in families().items()
        if wanted in name.lower()
    ]


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in rows[0] if rows else ("nothing found",):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value)[:44] for value in row.values()))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=200).print(table)
