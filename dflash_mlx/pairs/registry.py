"""Which published draft belongs to a target: two tables and the matching of names, all offline.

Knows names and published facts; loads nothing and asks no network. Whether a draft really fits is settled later, by
its config and tensors (`fit`). A fact that nobody has stated yet is absent from the tables, and None here.

The tables: `pairs.json` beside this file, and the user's own, which comes first: the file that DFLASH_MLX_PAIRS names,
else `dflash-mlx/pairs.json` in the user's config folder (XDG_CONFIG_HOME, else ~/.config).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import DFlashError
from .lineage import Ancestor
from .names import normalise

PAIRS_VARIABLE = "DFLASH_MLX_PAIRS"
RUNNABLE = {"dflash", "dflash2"}  # kinds
# Kinds of drafts in the tables, and what to call them.
KINDS = {
    "dflash": "a DFlash draft",
    "dflash2": "a DFlash 2 draft",
    "dspark": "a DSpark draft",
    "assistant": "a Muse assistant draft",
}
# Layouts of their files, and what to say of them.
LAYOUTS = {
    "z-lab": "",
    "speculators": " in the `speculators` layout",
    "deepspec": " with its own embedding and head",
    "laguna": " in poolside's layout",
    "mimo": " in Xiaomi's layout",
    "modelopt": " in NVIDIA's layout",
}
READABLE = {"z-lab", "speculators", "deepspec", "laguna", "mimo"}  # layouts


@dataclass(frozen=True)
class PublishedDraft:
    """One draft as published.

    Attributes:
        revision: commit to load, None for the main branch. kind, layout: see `KINDS`, `LAYOUTS`.
        generation: "retrain" or "original" where a repo was overwritten with a retrained draft.
        block: tokens of a block. taps: target layers, 0 is the output of the first; tap_count where only that is known.
        mask: id of the mask token. thinking: the mode it was trained or evaluated in.
        gated: whether its terms have to be accepted first. size: of the download, in words.
        status: "verified" (run here with its target), "loads" (its weights load here) or "unseen".
        evidence: where the facts are from: its own "config", a third party's "table", or None, its name alone.
        mirrors: repos with the same weights. mlx_mirrors: repos with these weights quantised for MLX.
    """

    repo: str
    revision: str | None = None
    kind: str = "dflash"
    layout: str = "z-lab"
    generation: str | None = None
    block: int | None = None
    taps: list[int] | None = None
    tap_count: int | None = None
    mask: int | None = None
    thinking: bool | None = None
    licence: str | None = None
    gated: bool | None = None
    size: str | None = None
    status: str = "unseen"
    evidence: str | None = None
    mirrors: list[str] = field(default_factory=list)
    mlx_mirrors: list[str] = field(default_factory=list)
    note: str | None = None

    @property
    def repos(self) -> list[str]:
        """Every repo that holds these weights."""
        return [self.repo, *self.mirrors, *self.mlx_mirrors]

    def describe(self) -> str:
        return f"{KINDS[self.kind]}{LAYOUTS[self.layout]}"

    def problem(self) -> str | None:
        """Why it can't be run, None where it can."""
        if self.kind not in RUNNABLE or self.layout not in READABLE:
            return f"{self.describe()}, which is not supported"
        if self.generation == "original" and self.revision is None:  # overwritten
            return "the commit of this generation is not known"
        return None


@dataclass(frozen=True)
class Pair:
    """A target and its drafts; sizes are those of the target, in elements, layers and rows.

    recommended_block: bits of the target's weights ("4", "8", "16") -> block size that was measured best with them.
    """

    targets: list[str]
    drafts: list[PublishedDraft]
    model_type: str | None = None
    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    recommended_block: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolution:
    """The drafts for a target, best first, perhaps none; `reason` says why, in one sentence for the user."""

    drafts: list[PublishedDraft]
    reason: str
    pair: Pair | None = None


@cache
def pairs() -> tuple[Pair, ...]:
    """The table of published pairs."""
    return _parse(resources.files(__package__).joinpath("pairs.json").read_text(encoding="utf-8"), "pairs.json")


def user_pairs() -> tuple[Pair, ...]:
    """The user's own table, empty without one. Raises `DFlashError` for one that can't be read."""
    path = user_pairs_path()
    if not path.is_file():
        if PAIRS_VARIABLE in os.environ:
            raise DFlashError(f"{PAIRS_VARIABLE}: {path}: no such file")
        return ()
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:  # ValueError: of the encoding
        raise DFlashError(f"{path}: can't be read ({error})") from None


def user_pairs_path() -> Path:
    """Where the user's own table is, whether or not it exists."""
    if named := os.environ.get(PAIRS_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "dflash-mlx" / "pairs.json"


def resolve(target: str, ancestors: Iterable[Ancestor] = (), revision: str | None = None) -> Resolution:
    """Find the drafts for a target.

    Names are tried in this order, and compared whole, never by a part: the target in the user's table, by id or
    normalised; its exact id in ours; each ancestor in both; its normalised name in ours. `ancestors` may be lazy: it is
    asked only as far as needed. Of a pair in our table, a draft of the user's `revision` comes first, then a DFlash 2
    draft whose config is known (it accepts more than DFlash in every published comparison), then DFlash drafts, then
    other DFlash 2 drafts; within these the table's order, and an overwritten generation comes last. The user's
    own table keeps its order.

    Args:
        target: a repo id or the path of a folder.
        ancestors: what the target was made from, nearest first (`lineage.Lineage`).
        revision: commit of a draft repo that the user asks for.
    """
    own, tried = user_pairs(), []
    name: str | Ancestor = target
    pair = _find(target, own) or _find(target, pairs(), exact=True)
    if pair is None:
        for ancestor in ancestors:
            tried.append(ancestor.name)
            if pair := _find(ancestor.name, own) or _find(ancestor.name, pairs()):
                name = ancestor
                break
    pair = pair or _find(target, pairs())
    if pair is None:
        bases = f" or what it was made from ({', '.join(tried)})" if tried else ""
        return Resolution([], f"no published draft is known for {target}{bases}")
    usable = [draft for draft in pair.drafts if draft.problem() is None]
    if not usable:
        others = " and ".join(f"{draft.repo} is {draft.describe()}" for draft in pair.drafts)
        return Resolution([], f"what is published for {pair.targets[0]} can't be run yet: {others}", pair)
    drafts = usable if pair in own else sorted(usable, key=_rank)
    if revision is not None:
        of_revision = [d for d in drafts if (d.revision or "").startswith(revision)]
        drafts = of_revision or [dataclasses.replace(drafts[0], revision=revision)]
    reason = f"published for {pair.targets[0]}" if pair not in own else f"named by {user_pairs_path()}"
    if isinstance(name, Ancestor) and name.changed:
        reason += f", a family match: this model was made from {name.name}, acceptance may be lower"
    return Resolution(drafts, reason, pair)


def find_draft(repo: str, revision: str | None = None) -> tuple[Pair, PublishedDraft] | None:
    """What our table says of a draft repo or a mirror of one: of this commit, else of the current generation."""
    found = [(pair, draft) for pair in pairs() for draft in pair.drafts if repo in draft.repos]
    named = [(pair, draft) for pair, draft in found if revision and (draft.revision or "").startswith(revision)]
    return next(iter(named or found), None)


def _find(name: str, table: Iterable[Pair], exact: bool = False) -> Pair | None:
    table = tuple(table)
    whole = next((pair for pair in table if name in pair.targets), None)
    if whole or exact or not (key := normalise(name)):
        return whole
    return next((pair for pair in table if key in map(normalise, pair.targets)), None)


def _rank(draft: PublishedDraft) -> tuple[bool, int]:
    second = draft.kind == "dflash2"
    known = draft.evidence == "config" or draft.status != "unseen"
    return draft.generation == "original", (0 if known else 2) if second else 1


# What a field of a table holds, by the annotation of its class.
TYPES: dict[str, tuple[str, Any]] = {
    "str": ("text", lambda v: isinstance(v, str) and v.strip()),
    "int": ("a whole number", lambda v: type(v) is int and v >= 0),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "list[int]": ("a list of numbers", lambda v: isinstance(v, list) and all(type(n) is int and n >= 0 for n in v)),
    "list[str]": ("a list of names", lambda v: isinstance(v, list) and v and all(isinstance(n, str) and n for n in v)),
    "list[PublishedDraft]": ("a list of drafts", lambda v: isinstance(v, list) and v),
    "dict[str, int]": ("numbers by bits", lambda v: isinstance(v, dict) and all(type(n) is int for n in v.values())),
}
CHOICES: dict[str, Collection[str]] = {
    "kind": KINDS,
    "layout": LAYOUTS,
    "generation": ("retrain", "original"),
    "status": ("verified", "loads", "unseen"),
    "evidence": ("config", "table"),
}


def _parse(text: str, source: str) -> tuple[Pair, ...]:
    """A table from its JSON. Raises `DFlashError` that names file, entry and field."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DFlashError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(entries, list):
        raise DFlashError(f"{source}: holds a JSON {type(entries).__name__}, expected a list of pairs")
    table = []
    for i, entry in enumerate(entries):
        where = f"{source}: pair {i}"
        _check(entry, Pair, where)
        for draft in entry["drafts"]:
            _check(draft, PublishedDraft, f"{where}: draft")
        table.append(Pair(**{**entry, "drafts": [PublishedDraft(**draft) for draft in entry["drafts"]]}))
    return tuple(table)


def _check(entry: Any, kind: type[Pair] | type[PublishedDraft], where: str) -> None:
    if not isinstance(entry, dict):
        raise DFlashError(f"{where}: expected an object, found {entry!r:.80}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name, value in entry.items():
        if name not in fields:
            raise DFlashError(f"{where}: no such field {name!r}; there are {', '.join(fields)}")
        kind_of_value = str(fields[name].type)
        if value is None and kind_of_value.endswith(" | None"):
            continue
        wanted, holds = TYPES[kind_of_value.removesuffix(" | None")]
        if not holds(value):
            raise DFlashError(f"{where}: {name}: {value!r:.80} is not {wanted}")
        if name in CHOICES and value not in CHOICES[name]:
            raise DFlashError(f"{where}: {name}: {value!r:.80} is not one of {', '.join(CHOICES[name])}")
    required = ("targets", "drafts") if kind is Pair else ("repo",)
    if missing := [name for name in required if name not in entry]:
        raise DFlashError(f"{where}: {missing[0]} is missing")
