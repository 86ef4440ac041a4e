"""The model card of a converted draft, and its upload. Knows the hub's library, not the tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: of httpx or httpx2, by its version
from huggingface_hub.utils import validate_repo_id

from dflash_mlx import demo
from dflash_mlx.errors import DFlashError

from .licence import Terms
from .writer import Conversion

LAYOUT_TAGS: dict[str, list[str]] = {"mlx": ["mlx"], "hf": [], "speculators": ["speculators"]}
TEXT = """
# {title}

The DFlash draft [{source}]({link}){revision}, {what}, by dflash-mlx.
It proposes blocks of {block} tokens for its target; it is no language model of its own.

Licence: {licence} The terms of the source apply to this copy.

```bash
pip install dflash-mlx
dflash-mlx generate --model <target> --draft-model <this folder or repo> --prompt "hello"
```
"""


def write_card(folder: Path, revision: str | None, terms: Terms, to: str, result: Conversion) -> None:
    """Write `README.md`: where the draft comes from, its licence, target and tags, how to use it.

    The source's own licence files go with it.
    """
    source = terms.source
    local = terms.folder.is_relative_to(Path(demo.__file__).parent) or Path(source).expanduser().is_dir()
    config = result.config
    quantization = config.quantization
    own = [*LAYOUT_TAGS[to], "dflash", "speculative-decoding"]
    data = ModelCardData(
        license=cast(Any, terms.licence),  # the hub takes a list as well
        license_name=terms.name,
        license_link=terms.link,
        base_model=terms.base_model,
        library_name="mlx" if to == "mlx" else None,
        pipeline_tag="text-generation",
        tags=own + [tag for tag in terms.tags if tag not in own and tag != "mlx"],
    )
    text = TEXT.format(
        title=result.path.name,
        source=Path(source).expanduser().resolve().name if local else source,
        link="." if local else f"https://huggingface.co/{source}",
        revision=f" at revision {revision}" if revision else "",
        what=f"quantised to {quantization['bits']} bits" if quantization else f"in {config.dtype or 'its own dtype'}",
        block=config.widest_block,
        licence=" ".join((f"{terms.described}.", *terms.notices)),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(folder / "README.md")
    for file in terms.files:
        shutil.copy(file, folder / file.name)


def check_repo_name(repo: str) -> None:
    """Raise `DFlashError` unless the hub would take this name."""
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise DFlashError(f"--upload-repo {repo!r} is no valid repo name; give it as org/name") from None


def upload(folder: Path, repo: str) -> None:
    """Upload a converted draft. Raises `DFlashError` when the hub refuses; the local result stays."""
    try:
        api = HfApi()
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a DFlash draft for MLX")
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:  # RuntimeError: from its Xet transport
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DFlashError(f"{repo}: upload failed ({first}); the result is in {folder}") from None
