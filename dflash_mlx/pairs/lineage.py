"""What a model was made from: the `base_model` of its card, then those of the cards of its bases, three hops far.

Knows cards, local and on the hub; knows no draft. A card that is absent or broken says nothing; one that can't be had
(offline, gated) is a problem to tell the user when nothing else was found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import hub
from ..errors import DFlashError
from .names import normalise

HOPS = 3  # of a chain of base models, before a name says little about the weights
CARDS = 8  # to read from the hub at most, whatever the cards list
REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Ancestor:
    """A model that the target was made from; `changed` unless every step between was a mere quantisation."""

    name: str
    changed: bool


@dataclass
class Lineage:
    """The ancestors of a model, nearest first; iterating reads a card only when its bases are asked for.

    Attributes:
        name, folder: the model, and the local folder of its card and config.
        problems: cards that could not be had, with the reason.
    """

    name: str
    folder: Path
    problems: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Ancestor]:
        level, seen, cards = [Ancestor(self.name, False)], {self.name}, 0
        for hop in range(HOPS):
            bases: list[Ancestor] = []
            for child in level:
                folder: Path | None = self.folder
                if hop:
                    if not REPO.fullmatch(child.name) or cards == CARDS:
                        continue
                    cards += 1
                    folder = self._card(child.name)
                for base in bases_of(child, folder) if folder else ():
                    if base.name not in seen:
                        seen.add(base.name)
                        bases.append(base)
                        yield base
            level = bases

    def _card(self, name: str) -> Path | None:
        try:
            return hub.fetch(name, allow_patterns=["README.md"], what="card of")
        except DFlashError as error:
            self.problems.append(str(error))
            return None


def bases_of(child: Ancestor, folder: Path) -> list[Ancestor]:
    """What a card says the model was made from, then what the config's `_name_or_path` says."""
    card = front_matter(folder / "README.md") or {}
    stated = card.get("base_model")
    given = stated if isinstance(stated, list) else [stated]
    names = [name for name in given if isinstance(name, str) and name and name.isprintable()]
    relation = "merge" if len(names) > 1 else card.get("base_model_relation")
    original = _name_or_path(folder)
    return [_base(child, name, relation) for name in names] + [_base(child, name, None) for name in original]


def front_matter(card: Path) -> dict[str, Any] | None:
    """The front matter of a model card, None where there is none that can be read."""
    import yaml
    from huggingface_hub.repocard import metadata_load

    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def _base(child: Ancestor, name: str, relation: object) -> Ancestor:
    """`relation`: what the card states it is, "quantized", "finetune", "adapter", "merge" or nothing."""
    same = relation == "quantized" if relation else normalise(child.name) == normalise(name)
    return Ancestor(name, child.changed or not same)


def _name_or_path(folder: Path) -> list[str]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    name = config.get("_name_or_path") if isinstance(config, dict) else None
    return [name] if isinstance(name, str) and name.strip() and name.isprintable() else []
