"""Files from a local folder or from the hub, and what to say when they can't be had.

Knows the hub's library and its errors; knows nothing of models. Progress bars go to stderr (tqdm's default).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .checkpoint.fields import read_json
from .checkpoint.tensor_info import TensorInfo
from .errors import DFlashError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

CONFIG_FILES = (
    "config.json", "generation_config.json", "README.md",
    "tokenizer.json", "tokenizer_config.json", "added_tokens.json",
)  # fmt: skip
PATH_LIKE = re.compile(r"[./~]|[A-Za-z]:[\\/]|.*\\|.*/.*/")  # matched at the start; a repo is `name` or `org/name`


def fetch(
    name: str, *, revision: str | None = None, allow_patterns: Sequence[str] | None = None, what: str = "model"
) -> Path:
    """The local folder of a model: `name` itself where that is a folder, else a download of the hub's repo.

    Args:
        revision: branch, tag or commit of the repo; a local folder has none.
        allow_patterns: glob patterns of the files to download, None for all.
        what: what to call it in errors.

    Raises:
        DFlashError: there is no such folder or repo, or it can't be downloaded; the text says what to do.
    """
    local = Path(os.path.expanduser(name))
    if name and local.is_dir():
        return local
    if name and local.exists():
        raise DFlashError(f"{what} {name} is a file; give the folder that holds it")
    if not name or PATH_LIKE.match(name):
        raise DFlashError(f"{what} {name!r}: no such folder; give an existing folder or a repo as org/name")

    def download() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            name, revision=revision, allow_patterns=list(allow_patterns) if allow_patterns else None
        )

    return Path(_explained(download, name, revision, what))


def peek_config(name: str, revision: str | None = None, *, what: str = "model") -> tuple[Path, dict[str, Any]]:
    """The folder and `config.json` of a model, its weights left where they are.

    Raises `DFlashError` as `fetch`, or when there is no config.json or it is no JSON object.
    """
    folder = fetch(name, revision=revision, allow_patterns=CONFIG_FILES, what=what)
    if not (folder / "config.json").is_file():
        raise DFlashError(f"{what} {name}: there is no config.json in {folder}")
    return folder, read_json(folder / "config.json")


def remote_headers(
    name: str, revision: str | None = None, subfolder: str | None = None, *, what: str = "draft"
) -> dict[str, TensorInfo]:
    """Every tensor of a repo or of a folder of it, by range requests for the headers of its safetensors files.

    Raises as `fetch`.
    """

    def read() -> dict[str, TensorInfo]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        try:
            files = _remote_files(HfApi(), name, revision, subfolder)
        except NotASafetensorsRepoError:
            raise DFlashError(f"{what} {name}: the repo holds no model.safetensors") from None
        except SafetensorsParsingError:
            raise DFlashError(f"{what} {name}: the repo holds a damaged safetensors file") from None
        return {
            tensor: TensorInfo(info.dtype, tuple(info.shape), Path(file))
            for file, part in files.items()
            for tensor, info in part.tensors.items()
        }

    return _explained(read, name, revision, what)


def _remote_files(api: HfApi, name: str, revision: str | None, subfolder: str | None) -> dict[str, Any]:
    """The parsed header of each safetensors file; the library itself looks at the top of a repo only."""
    if subfolder is None:
        return dict(api.get_safetensors_metadata(name, revision=revision).files_metadata)
    return {
        file: api.parse_safetensors_file_metadata(name, file, revision=revision)
        for file in api.list_repo_files(name, revision=revision)
        if file.startswith(f"{subfolder}/") and file.endswith(".safetensors")
    }


def _explained(action: Callable[[], T], name: str, revision: str | None, what: str) -> T:
    """Run `action`; its expected failures become one line for the user."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: of httpx or httpx2, by its version

    try:
        return action()
    except (HTTPError, OSError, HFValidationError, RuntimeError) as error:  # RuntimeError: from its Xet transport
        raise DFlashError(f"{what} {name}: {_explain(error, name, revision)}") from None


def _explain(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):  # before RepositoryNotFoundError, of which it is a case
        return f"gated; accept its terms at {constants.ENDPOINT}/{name}, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such folder and no such repo; check the name, or run `hf auth login` if the repo is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repo has no revision {revision or constants.DEFAULT_REVISION}"
    if isinstance(error, errors.HFValidationError):
        return "neither a folder nor a valid repo name (org/name)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__
        if isinstance(cause, errors.HfHubHTTPError):
            return _explain(cause, name, revision)
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return "not in the cache as a whole, and HF_HUB_OFFLINE is set; unset it once or give a local folder"
        return f"not in the cache, and {constants.ENDPOINT} can't be reached; check the connection or give a folder"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        advice = "run `hf auth login`" if status in (401, 403) else "try again later"
        return f"{constants.ENDPOINT} refused the download (HTTP {status}); {advice}"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return f"the disk is full; free some space or let HF_HOME (now {constants.HF_HOME}) be elsewhere"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"the download broke off ({first}); check the connection and try again"
