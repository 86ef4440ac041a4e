"""Which mlx-lm families a draft can drive, and which requests may share a batch: a table written by the test matrix
(`tests/matrix.py --write`).

It lets a family that is known not to work be refused before its weights load. A family that is not in the table
is judged by its structure when it is loaded; its requests run one by one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Family:
    """One module of `mlx_lm.models`.

    Attributes:
        status: "verified", "lookup only" (no taps are to be had, so prompt lookup and other drafters that want none
            drive it, no DFlash draft), "refused" or "not built"; reason: why, where it is not verified.
        batch: "verified" where several requests in one batch say what each says alone, else what goes wrong.
        caches: cache classes that were tested. mlx_lm: version that was tested.
    """

    name: str
    status: str
    reason: str
    batch: str
    caches: tuple[str, ...]
    mlx_lm: str


@cache
def families() -> dict[str, Family]:
    """The table, by module name."""
    table = json.loads(resources.files(__package__).joinpath("families.json").read_text(encoding="utf-8"))
    return {
        name: Family(
            name,
            row["status"],
            row.get("reason", ""),
            row.get("batch", "not tested"),
            tuple(row.get("caches", ())),
            table["mlx_lm"],
        )
        for name, row in table["families"].items()
    }
