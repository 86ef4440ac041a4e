"""Load a target with its draft: cheap checks first, then the draft, the heavy target last.

A draft that was asked for and can't be used is an error before the target loads. "auto" never fails a load:
it says what it picked, or why it picked nothing.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import demo, hub, registry
from .draft import DFlashDraftModel, DraftConfig
from .draft.fields import read_json
from .draft.weights import check_draft_folder, load_draft_folder
from .errors import DFlashError, DraftError, TargetError
from .fit import TargetFacts, check_family, check_fit, check_special_tokens, refuse_draft_as_target, text_config
from .target import Target

AUTO, NONE = "auto", "none"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.model")
DRAFT_FILES = ("*.json", "*.safetensors", "README.md")


@dataclass
class Plan:
    """What will be loaded, settled by configs and headers alone.

    Attributes:
        model: name of the target; draft: name of the draft, or None to decode plainly; block_size: the draft's.
        auto: whether a draft that turns out damaged is left out instead of ending the load.
        notes: lines for the user: what was chosen and why.
    """

    model: str
    revision: str | None = None
    draft: str | None = None
    draft_folder: Path | None = None
    block_size: int | None = None
    auto: bool = False
    notes: list[str] = field(default_factory=list)

    def load(
        self, *, attn_implementation: str = "sdpa", draft_dtype: mx.Dtype | None = None, **options: Any
    ) -> tuple[nn.Module, DFlashDraftModel | None, TokenizerWrapper]:
        """Load both models; `options` go to `mlx_lm.load` (tokenizer_config, adapter_path, lazy, ...)."""
        import mlx_lm

        adapters = options.get("adapter_path")
        if adapters is not None and not (Path(adapters) / "adapter_config.json").is_file():
            raise DFlashError(
                f"--adapter-path {adapters}: no adapter_config.json there; give a folder of LoRA adapters"
            )
        dtype = mx.float32 if self.model == demo.NAME else None  # ties of bfloat16 would blur the comparison
        draft = self._load_draft(draft_dtype or dtype, attn_implementation)
        folder = fetch_target(self.model, self.revision)
        ends = end_tokens(folder)
        if not any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
            raise TargetError(f"{self.model}: no tokenizer in {folder}; copy the files of the original model there")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                model, tokenizer = mlx_lm.load(str(folder), **options)[:2]
        except (Exception, SystemExit) as error:  # mlx-lm and transformers take any file and raise what they like
            what = f"{type(error).__name__}: {error}"
            raise TargetError(f"{self.model}: mlx-lm can't load it ({what})") from error
        if dtype is not None:
            model.set_dtype(dtype)
        tokenizer.eos_token_ids = tokenizer.eos_token_ids | ends
        if draft is not None:
            _check_on(model, draft.config, str(self.draft))
        return model, draft, tokenizer

    def _load_draft(self, dtype: mx.Dtype | None, attn_implementation: str) -> DFlashDraftModel | None:
        if self.draft_folder is None:
            return None
        try:
            return load_draft_folder(self.draft_folder, dtype, attn_implementation)
        except DraftError as error:
            if not self.auto:
                raise
            self.draft = self.draft_folder = self.block_size = None
            self.notes.append(f"no draft: {error}; decoding plainly")
            warnings.warn(self.notes[-1], RuntimeWarning, stacklevel=2)
            return None


def plan(
    model: str, draft_model: str | None = AUTO, *, revision: str | None = None, draft_revision: str | None = None
) -> Plan:
    """Settle what to load without loading it.

    Args:
        model: "demo", a repo of the hub or a local folder.
        draft_model: "auto", None or "none", a repo or a local folder.

    Raises:
        DFlashError: the target can't be found, or an explicit draft can't be used with it.
    """
    result = Plan(model, revision, auto=draft_model == AUTO)
    config_folder = (
        demo.TARGET
        if model == demo.NAME
        else hub.fetch(model, revision=revision, allow_patterns=hub.CONFIG_FILES, what="target")
    )
    config = read_config(config_folder, model)
    refuse_draft_as_target(model, config)
    if draft_model in (None, NONE):
        result.notes.append("no draft: none was asked for")
    elif draft_model == AUTO:
        _auto(result, config_folder, config)
    else:
        _take(result, str(draft_model), draft_revision, config_folder, config)
    return result


def load(
    model: str,
    draft_model: str | None = AUTO,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    **options: Any,
) -> tuple[nn.Module, DFlashDraftModel | None, TokenizerWrapper]:
    """Load a target, its draft and the tokenizer.

    Args:
        model: "demo" (the bundled pair), a repo of the hub or a local folder.
        draft_model: "auto" looks the pair up and decodes plainly, with a warning, where there is none; None
            decodes plainly; a repo or a folder is used or raises.
        revision, draft_revision: pin them; an "auto" draft comes with the revision of the pair list.
        options: `attn_implementation` ("sdpa", "eager"), `draft_dtype`, and those of `mlx_lm.load`.

    Returns:
        (model, draft or None, tokenizer). The tokenizer's `eos_token_ids` hold the end tokens of tokenizer,
        config and generation config.

    Raises:
        DFlashError: see `plan`; a folder or file is missing, damaged or of another kind.
    """
    settled = plan(model, draft_model, revision=revision, draft_revision=draft_revision)
    if draft_model == AUTO and settled.draft is None:
        warnings.warn(settled.notes[-1], RuntimeWarning, stacklevel=2)
    return settled.load(**options)


def load_draft(
    path_or_repo: str | Path,
    target: nn.Module | None = None,
    *,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    attn_implementation: str = "sdpa",
) -> DFlashDraftModel:
    """Load a draft, and check that it fits `target` (an mlx-lm model) if one is given.

    Raises:
        DraftError: missing, damaged, of another kind, or for another target. TargetError: see `Target`.
    """
    name = str(path_or_repo)
    folder = fetch_draft(name, revision)
    if target is not None:
        _check_on(target, check_draft_folder(folder)[0], name)
    return load_draft_folder(folder, dtype, attn_implementation)


def fetch_draft(name: str, revision: str | None = None) -> Path:
    """The local folder of a draft: bundled, local, or downloaded."""
    if name == demo.NAME:
        return demo.DRAFT
    return hub.fetch(name, revision=revision, allow_patterns=DRAFT_FILES, what="draft")


def end_tokens(folder: Path) -> set[int]:
    """End token ids of `config.json` (text model included) and `generation_config.json`."""
    found: set[int] = set()
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    for section in (config, text_config(str(folder), config), read_json(generation) if generation.is_file() else {}):
        ids = section.get("eos_token_id")
        found |= {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
    return found


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A target's config.json."""
    if not (folder / "config.json").is_file():
        raise TargetError(f"{name}: no config.json in {folder}; --model takes a folder or repo in mlx-lm's format")
    try:
        return read_json(folder / "config.json")
    except DraftError as error:
        raise TargetError(str(error)) from None


def fetch_target(model: str, revision: str | None = None) -> Path:
    """The local folder of a target: bundled, local, or downloaded."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    if model == demo.NAME:
        return demo.TARGET
    return hub.fetch(model, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, what="target")


def _auto(result: Plan, folder: Path, config: dict[str, Any]) -> None:
    """Pick a published draft, or say why not; nothing here fails the load."""
    if result.model == demo.NAME:
        return _take(result, demo.NAME, None, folder, config)
    resolution = registry.resolve(result.model, base_models=registry.base_models_of(folder))
    if resolution.draft is None:
        result.notes.append(f"no draft: {resolution.reason}; decoding plainly")
        return None
    try:
        _take(result, resolution.draft.repo, resolution.draft.revision, folder, config)
        result.notes.append(f"draft {resolution.draft.repo}: {resolution.reason}")
    except DFlashError as error:
        result.draft = result.draft_folder = result.block_size = None
        result.notes.append(f"no draft: {error}; decoding plainly")


def _take(result: Plan, name: str, revision: str | None, target_folder: Path, config: dict[str, Any]) -> None:
    """Use this draft or raise: its config against the target's first, then the family, then its tensors."""
    facts = TargetFacts.from_config(result.model, config)
    if name != demo.NAME:
        folder = hub.fetch(name, revision=revision, allow_patterns=hub.CONFIG_FILES, what="draft")
        check_fit(DraftConfig.from_file(folder / "config.json"), facts, name)
        check_special_tokens(folder, target_folder, name)
    check_family(result.model, config)
    folder = fetch_draft(name, revision)
    draft_config, _ = check_draft_folder(folder)
    check_fit(draft_config, facts, name)
    result.draft, result.draft_folder, result.block_size = name, folder, draft_config.block_size


def _check_on(model: nn.Module, config: DraftConfig, name: str) -> None:
    target = Target(model)
    target.require_rewindable(target.make_cache())
    check_fit(config, TargetFacts.from_model(target), name)
    target.check_taps(config.target_layer_ids)
