"""The model card of a converted draft, and its upload. Knows the hub's library, not the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mlx import demo
from dflash_mlx.errors import DFlashError
from dflash_mlx.loading import SUBFOLDER

if TYPE_CHECKING:
    from .convert import Conversion

TEXT = """
# {title}

The DFlash draft [{source}]({link}){revision}, {what}, by dflash-mlx.
It proposes blocks of {block} tokens for its target; it is no language model of its own.

Licence: {licence}. The terms of the source apply to this copy.

```bash
pip install dflash-mlx
dflash-mlx generate --model <target> --draft-model <this folder or repo> --prompt "hello"
```
"""


def source_metadata(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Front matter of the source's README.md, {} without one; one that can't be read is noted."""
    from huggingface_hub.repocard import metadata_load
    from yaml import YAMLError

    readme = folder / "README.md"
    if folder.name == SUBFOLDER and not readme.is_file() and (folder.parent / "config.json").is_file():
        readme = folder.parent / "README.md"  # the repo's, target and draft alike
    try:
        return (metadata_load(readme) or {}) if readme.is_file() else {}
    except (ValueError, YAMLError):
        notes.append(f"{readme}: its front matter can't be read, so the licence is not taken over")
        return {}


def write_card(folder: Path, source: str, revision: str | None, source_folder: Path, result: Conversion) -> None:
    """Write `README.md`: where the draft comes from, its licence, how to use it."""
    from huggingface_hub import ModelCard, ModelCardData

    meta = source_metadata(source_folder, result.notes)
    licence = meta.get("license")
    local = source == demo.NAME or Path(source).expanduser().is_dir()
    config = result.config
    quantization = config.quantization
    data = ModelCardData(
        license=licence,
        license_name=meta.get("license_name"),
        license_link=meta.get("license_link"),
        base_model=meta.get("base_model"),
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "dflash", "speculative-decoding"],
    )
    text = TEXT.format(
        title=result.path.name,
        source=Path(source).expanduser().resolve().name if local else source,
        link="." if local else f"https://huggingface.co/{source}",
        revision=f" at revision {revision}" if revision else "",
        what=f"quantised to {quantization['bits']} bits" if quantization else f"in {config.dtype or 'its own dtype'}",
        block=config.widest_block,
        licence=licence or "not stated by the source; ask its authors before you pass it on",
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(folder / "README.md")


def check_repo_name(repo: str) -> None:
    """Raise `DFlashError` unless the hub would take this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise DFlashError(f"--upload-repo {repo!r} is no valid repo name; give it as org/name") from None


def upload(folder: Path, repo: str) -> None:
    """Upload a converted draft. Raises `DFlashError` when the hub refuses; the local result stays."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: of httpx or httpx2, by its version

    try:
        api = HfApi()
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a DFlash draft for MLX")
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:  # RuntimeError: from its Xet transport
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DFlashError(f"{repo}: upload failed ({first}); the result is in {folder}") from None
