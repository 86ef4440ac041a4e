"""What a source's licence asks of a copy: whether it may be uploaded, and what its card has to carry.

Knows cards and the table of published drafts; uploads and writes nothing. Converting for oneself is always allowed;
`Terms.check_upload` refuses where passing a copy on would break what the source states, or where it states nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dflash_mlx import demo
from dflash_mlx.checkpoint.fields import brief
from dflash_mlx.checkpoint.folder import refuse_irregular
from dflash_mlx.errors import DFlashError, DraftError
from dflash_mlx.loading import LICENCE_FILES, SUBFOLDER
from dflash_mlx.pairs import registry
from dflash_mlx.pairs.lineage import front_matter

HUB_IDS = {"mit", "apache-2.0", "gemma", "cc-by-nc-nd-4.0"}  # of the table's licences; the hub calls the rest "other"
MAX_LICENCE = 2**20  # bytes of a file
UNNAMED = {"", "other", "unknown"}
NO_DERIVATIVES = re.compile(r"(^|[-_ ])nd([-_ /]|$)|no-?deriv", re.IGNORECASE)
# What a licence wants said beside every copy.
NOTICES = {
    "gemma": "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.",
    "nvidia-open-model-license": "Licensed by NVIDIA Corporation under the NVIDIA Open Model License.",
}


@dataclass(frozen=True)
class Terms:
    """The terms of one source.

    Attributes:
        licence, name, link: as in the front matter of a card; `licence` is the hub's id, "other" where it has a name.
        base_model: the target, as the card or the table has it. tags: those of the source's card.
        gated: whether the source has terms that must be accepted before the download.
        files: those with the text of the licence, which go with a copy.
    """

    source: str
    folder: Path
    licence: str | list[str] | None = None
    name: str | None = None
    link: str | None = None
    base_model: str | list[str] | None = None
    tags: list[str] = field(default_factory=list)
    gated: bool = False
    files: list[Path] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The licence by every name it is given, what says nothing left out."""
        stated = self.licence if isinstance(self.licence, list) else [self.licence or ""]
        return [name for name in (*stated, self.name or "", self.link or "") if name.lower() not in UNNAMED]

    @property
    def described(self) -> str:
        return ", ".join(self.names) or "not stated by the source; ask its authors before you pass it on"

    @property
    def notices(self) -> list[str]:
        return [NOTICES[name] for name in self.names if name in NOTICES]

    def check_upload(self) -> None:
        """Raise `DFlashError`, with the reason, where a copy may not be passed on."""
        if any(NO_DERIVATIVES.search(name) for name in self.names):
            problem = f"its licence, {self.described}, allows no derivatives"
        elif self.gated:
            problem = "it is gated, and a copy would go round the terms that have to be accepted there"
        elif not self.names:
            own = Path(self.source).expanduser().is_dir()
            advice = f"if it is yours, state `license:` in {self.folder / 'README.md'}" if own else "ask its authors"
            problem = f"it states no licence, so nobody may pass it on; {advice}"
        else:
            return
        raise DFlashError(f"--upload-repo: {self.source} can't be passed on: {problem}; leave out --upload-repo")


def read_terms(source: str, revision: str | None, folder: Path, notes: list[str]) -> Terms:
    """The terms of a source, from its card, and from the table of published drafts where the card is silent."""
    meta = _front_matter(folder, notes)
    licence = meta.get("license")
    named = [text for text in licence if isinstance(text, str)] if isinstance(licence, list) else licence
    terms = Terms(
        source,
        folder,
        licence=named if isinstance(named, (str, list)) and named else None,
        name=_text(meta.get("license_name")),
        link=_text(meta.get("license_link")),
        base_model=_base_model(meta.get("base_model"), notes),
        tags=[tag for tag in tags if isinstance(tag, str)] if isinstance(tags := meta.get("tags"), list) else [],
        gated=any(str(key).startswith("extra_gated") for key in meta),
        files=_licence_files(folder, notes),
    )
    changes: dict[str, Any] = {}
    if terms.licence is None and folder.is_relative_to(Path(demo.__file__).parent):
        changes["licence"] = "mit"  # the bundled drafts are part of this package
    if found := registry.find_draft(source, revision):
        pair, draft = found
        changes["gated"] = terms.gated or bool(draft.gated)
        changes["base_model"] = terms.base_model or pair.targets[0]
        if terms.licence is None and draft.licence:
            known = draft.licence in HUB_IDS
            changes.update(licence=draft.licence if known else "other", name=None if known else draft.licence)
    return replace(terms, **changes)


def _base_model(stated: object, notes: list[str]) -> str | list[str] | None:
    names = stated if isinstance(stated, list) else [stated]
    if stated is None or all(isinstance(name, str) and name.isprintable() for name in names):
        return cast("str | list[str] | None", stated or None)
    notes.append(f"README.md: base_model: {brief(stated)} is no name of a model, so it is not taken over")
    return None


def _licence_files(folder: Path, notes: list[str]) -> list[Path]:
    """What may be copied of a stranger's folder; the rest is noted."""
    files = []
    for file in sorted(file for pattern in LICENCE_FILES for file in folder.glob(pattern)):
        try:
            refuse_irregular(file)
            if (size := file.stat().st_size) > MAX_LICENCE:
                raise DraftError(f"{file}: {size} bytes, {MAX_LICENCE} is the most; no licence needs so many")
            files.append(file)
        except DraftError as error:
            notes.append(f"not copied: {error}")
    return files


def _front_matter(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Of the source's README.md, {} without one; one that can't be read is noted."""
    readme = folder / "README.md"
    if folder.name == SUBFOLDER and not readme.is_file() and (folder.parent / "config.json").is_file():
        readme = folder.parent / "README.md"  # the repo's, target and draft alike
    if not readme.is_file():
        return {}
    meta = front_matter(readme)
    if meta is None:
        notes.append(f"{readme}: its front matter can't be read, so the licence is not taken over")
    return meta or {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
