"""Which published draft belongs to a target: a table (`pairs.json`) and the matching of names, all offline.

Knows names and published facts; loads nothing and asks no network. Whether a draft really fits is settled later, by
its config and tensors (`fit`). A field that is null in the table is a fact that nobody has stated yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

RUNNABLE = {"dflash", "dflash2"}
# Kinds of drafts in the table, and what to call them.
KINDS = {
    "dflash": "a DFlash draft",
    "dflash2": "a DFlash 2 draft",
    "dspark": "a DSpark draft",
    "speculators": "a DFlash draft in the `speculators` layout",
    "deepspec": "a DFlash draft with its own embedding and head",
    "assistant": "a Muse assistant draft",
}
HOPS = 3  # of a chain of base models, before a name says little about the weights

# What quantisers and packagers append to a model's name, stripped repeatedly from the end.
PACKAGING = re.compile(
    r"""(?: - (?: mlx(-lm|-vlm)? | \d(\.\d+)?-?bit | mixed-\d-\d(bit)? | (bf|fp|f|float)(8|16|32) | mxfp[48] | nvfp4
              | int[2-8] | q\d(-(k|s|m|l|xs|xl|0|1))* | oq\d(\.\d)?e? | optiq.* | ud(-.*)? | dwq(-.*)? | qat | gptq
              | awq | gs?\d+ | mtp | text | vl )
        | (?<=-it)qat )$""",
    re.VERBOSE,
)
# Spellings of one family, as a prefix.
SPELLINGS = (
    (re.compile(r"^(meta-)?llama-?3\.1(?=-)"), "llama-3.1"),
    (re.compile(r"^gemma-?4(?=-)"), "gemma-4"),
)


@dataclass(frozen=True)
class PublishedDraft:
    """One draft as published.

    Attributes:
        revision: commit to load, None for the main branch. kind: see `KINDS`. block: tokens of a block.
        taps: target layers, 0 is the output of the first. mask: id of the mask token.
        thinking: the mode it was trained or evaluated in. size: of the download, in words.
        status: "verified" (run here with its target), "loads", or only known from its own "config", from a third
            party's "table", or by name ("unseen").
    """

    repo: str
    revision: str | None
    kind: str
    block: int | None
    taps: list[int] | None
    mask: int | None
    thinking: bool | None
    licence: str | None
    gated: bool | None
    size: str | None
    status: str
    note: str | None


@dataclass(frozen=True)
class Pair:
    """A target and its drafts, best first; sizes are those of the target, in elements, layers and rows."""

    targets: list[str]
    model_type: str | None
    hidden: int | None
    layers: int | None
    vocab: int | None
    drafts: list[PublishedDraft]


@dataclass(frozen=True)
class Resolution:
    """The draft for a target, or None; `reason` says why, in one sentence for the user."""

    draft: PublishedDraft | None
    reason: str


@cache
def pairs() -> tuple[Pair, ...]:
    """The table of published pairs."""
    entries = json.loads(resources.files(__package__).joinpath("pairs.json").read_text(encoding="utf-8"))
    return tuple(
        Pair(**{**entry, "drafts": [PublishedDraft(**draft) for draft in entry["drafts"]]}) for entry in entries
    )


def normalise(name: str) -> str:
    """The key by which names of one model are equal: no organisation, lower case, nothing about the packaging.

    Takes repo ids, folders and paths into the hub's cache. Keys are compared whole, never by a part of them.
    """
    parts = [part for part in re.split(r"[/\\]+", name.strip()) if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    key = cached.rpartition("--")[2] if cached else (parts or [""])[-1]
    key = re.sub(r"[\s_]+", "-", key.lower())
    while (shorter := PACKAGING.sub("", key)) != key:
        key = shorter
    for spelling, family in SPELLINGS:
        key = spelling.sub(family, key)
    return key


def resolve(target: str, *, base_models: Sequence[str] = ()) -> Resolution:
    """Find the draft for a target: by its exact id, then by its base models, then by its name.

    Args:
        target: a repo id or the path of a folder.
        base_models: what the target was made from, nearest first (see `base_models_of`); at most `HOPS` count.
    """
    chain = list(base_models[:HOPS])
    found = [(target, pair) for pair in pairs() if target in pair.targets]
    for name in (*chain, target):
        found += [(name, pair) for pair in pairs() if normalise(name) in map(normalise, pair.targets)]
    if not found:
        bases = f" or what it was made from ({', '.join(chain)})" if chain else ""
        return Resolution(None, f"no published draft is known for {target}{bases}")
    name, pair = found[0]
    draft = next((draft for draft in pair.drafts if draft.kind in RUNNABLE), None)
    if draft is None:
        others = " and ".join(f"{other.repo} is {KINDS[other.kind]}" for other in pair.drafts)
        return Resolution(None, f"what is published for {pair.targets[0]} can't be run yet: {others}")
    reason = f"published for {pair.targets[0]}"
    if normalise(name) != normalise(target):
        reason += ", from which this model was made; what was changed since may cost acceptance"
    if draft.thinking is False:
        reason += ", trained with thinking off"
    if draft.gated:
        reason += ", gated, so its terms have to be accepted on its page"
    return Resolution(draft, reason)


def base_models_of(folder: Path) -> list[str]:
    """What a local model says it was made from: the card's `base_model`, then the config's `_name_or_path`.

    A card or config that is absent or broken says nothing.
    """
    import yaml
    from huggingface_hub.repocard import metadata_load

    names: list[object] = []
    try:
        stated = (metadata_load(folder / "README.md") or {}).get("base_model")
        names += stated if isinstance(stated, list) else [stated]
    except (OSError, ValueError, yaml.YAMLError):
        pass
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names.append(config.get("_name_or_path") if isinstance(config, dict) else None)
    except (OSError, ValueError):
        pass
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name.strip()))
