"""Load a target with its draft: cheap checks first, then the draft, the heavy target last.

A draft that was asked for and can't be used is an error before the target loads. "auto" never fails a load:
it says what it picked, or why it picked nothing.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from . import demo, hub
from .checkpoint.fields import read_json
from .checkpoint.weights import check_draft_folder, folder_config, load_draft_folder
from .decode import lookup as prompt_lookup
from .decode.lookup import PromptLookup
from .draft import DFlashDraftModel, DraftConfig
from .errors import DFlashError, DraftError, TargetError
from .pairs import registry
from .pairs.fit import TargetFacts, check_family, check_fit, check_special_tokens, refuse_draft_as_target, text_config
from .pairs.lineage import Lineage
from .pairs.registry import Pair, PublishedDraft, user_pairs_path
from .target import Target

AUTO, NONE = "auto", "none"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.model")
LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")
DRAFT_FILES = ("*.json", "*.safetensors", "README.md", "mask_embedding.pt", *LICENCE_FILES)
TORCH_FILES = ("*.bin", "*.pt", "*.pth")  # only where there is nothing better
SUBFOLDER = "dflash"  # of a repo that holds the target as well (Xiaomi's MiMo)


@dataclass
class Plan:
    """What will be loaded, settled by configs and headers alone.

    Attributes:
        model: name of the target; draft: name of the draft, or None to decode plainly; block_size: the draft's.
        target_folder: where the target's config and tokenizer are.
        lookup: whether proposals are copied from the text where it repeats itself.
        auto: whether a draft that turns out damaged is left out instead of ending the load.
        notes: lines for the user: what was chosen and why.
    """

    model: str
    revision: str | None = None
    draft: str | None = None
    draft_folder: Path | None = None
    target_folder: Path | None = None
    block_size: int | None = None
    lookup: bool = False
    auto: bool = False
    notes: list[str] = field(default_factory=list)

    def load(
        self,
        *,
        attn_implementation: str = "sdpa",
        draft_dtype: mx.Dtype | None = None,
        draft_window: int | None = None,
        **options: Any,
    ) -> tuple[nn.Module, DFlashDraftModel | PromptLookup | None, TokenizerWrapper]:
        """Load both models; `options` go to `mlx_lm.load` (tokenizer_config, adapter_path, lazy, ...)."""
        adapters = options.get("adapter_path")
        if adapters is not None and not (Path(adapters) / "adapter_config.json").is_file():
            raise DFlashError(
                f"--adapter-path {adapters}: no adapter_config.json there; give a folder of LoRA adapters"
            )
        _check_window(draft_window)
        if draft_window is not None and self.draft_folder is None:
            raise DraftError(f"draft_window is {draft_window}, but there is no draft that could look back")
        dtype = mx.float32 if self.model == demo.NAME else None  # ties of bfloat16 would blur the comparison
        draft = self._load_draft(draft_dtype or dtype, attn_implementation, draft_window)
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
        return model, PromptLookup(draft) if self.lookup else draft, tokenizer

    def lookup_alone(self) -> None:
        """The lookup is the only drafter."""
        self.draft, self.block_size = prompt_lookup.NAME, prompt_lookup.BLOCK_SIZE

    def _load_draft(
        self, dtype: mx.Dtype | None, attn_implementation: str, window: int | None
    ) -> DFlashDraftModel | None:
        if self.draft_folder is None:
            return None
        try:
            return load_draft_folder(self.draft_folder, dtype, attn_implementation, window, self.target_folder)
        except DraftError as error:
            if not self.auto:
                raise
            self.draft = self.draft_folder = self.block_size = None
            if self.lookup:
                self.lookup_alone()
            self.notes.append(f"no draft: {error}; decoding plainly")
            warnings.warn(self.notes[-1], RuntimeWarning, stacklevel=2)
            return None


def plan(
    model: str,
    draft_model: str | None = AUTO,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    lookup: bool = False,
) -> Plan:
    """Settle what to load without loading it.

    Args:
        model: "demo", a repo of the hub or a local folder.
        draft_model: "auto", None or "none", "lookup", a repo or a local folder.
        lookup: look up beside the draft, or alone where there is none.

    Raises:
        DFlashError: the target can't be found, or an explicit draft can't be used with it.
    """
    result = Plan(model, revision, auto=draft_model == AUTO, lookup=lookup or draft_model == prompt_lookup.NAME)
    config_folder = (
        demo.TARGET
        if model == demo.NAME
        else hub.fetch(model, revision=revision, allow_patterns=hub.CONFIG_FILES, what="target")
    )
    config = read_config(config_folder, model)
    refuse_draft_as_target(model, config)
    if draft_model in (None, NONE, prompt_lookup.NAME):
        result.notes.append("no draft: none was asked for")
    elif draft_model == AUTO:
        _auto(result, draft_revision, config_folder, config)
    else:
        _take(result, str(draft_model), draft_revision, config_folder, config)
    if result.lookup:
        if result.draft is None:
            check_family(model, config, taps=False)
            result.lookup_alone()
        result.notes.append("prompt lookup: where the text repeats itself, proposals are copied from it")
    return result


def load(
    model: str,
    draft_model: str | None = AUTO,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    **options: Any,
) -> tuple[nn.Module, DFlashDraftModel | PromptLookup | None, TokenizerWrapper]:
    """Load a target, its draft and the tokenizer.

    Args:
        model: "demo" (the bundled pair), a repo of the hub or a local folder.
        draft_model: "auto" looks the pair up and decodes plainly, with a warning, where there is none; None
            decodes plainly; "lookup" proposes from the text itself; a repo or a folder is used or raises.
        revision, draft_revision: pin them; an "auto" draft comes with the revision of the pair list, or with that of
            `draft_revision`, by which an older generation of an overwritten repo is had.
        options: `attn_implementation` ("sdpa", "eager"), `draft_dtype`, `draft_window` (see `load_draft`), and those of
            `mlx_lm.load`.

    Returns:
        (model, draft or `PromptLookup` or None, tokenizer). The tokenizer's `eos_token_ids` hold the end tokens of
        tokenizer, config and generation config.

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
    draft_window: int | None = None,
) -> DFlashDraftModel:
    """Load a draft, and check that it fits `target` (an mlx-lm model) if one is given.

    Args:
        draft_window: tokens of context that the draft looks back at most (its `context_window`), None: as the
            checkpoint says. The text stays the same; rounds at long context get cheaper, and may accept less.

    Raises:
        DraftError: missing, damaged, of another kind, or for another target. TargetError: see `Target`.
    """
    _check_window(draft_window)
    name = str(path_or_repo)
    folder = fetch_draft(name, revision)
    if target is not None:
        _check_on(target, check_draft_folder(folder).config, name)
    return load_draft_folder(folder, dtype, attn_implementation, draft_window)


def _check_window(window: Any) -> None:
    if window is not None and (type(window) is not int or window < 1):
        raise DraftError(f"draft_window is {window!r}, expected a whole number from 1")


def fetch_draft(name: str, revision: str | None = None) -> Path:
    """The local folder of a draft: bundled, local, or downloaded."""
    if name in demo.DRAFTS:
        return demo.DRAFTS[name]
    folder = peek_draft(name, revision)
    if Path(name).expanduser().is_dir():
        return folder
    inside = ["README.md", *(f"{SUBFOLDER}/{file}" for file in DRAFT_FILES)]
    files = inside if folder.name == SUBFOLDER else DRAFT_FILES
    whole = hub.fetch(name, revision=revision, allow_patterns=files, what="draft")
    if not any(whole.rglob("*.safetensors")):
        whole = hub.fetch(name, revision=revision, allow_patterns=(*files, *TORCH_FILES), what="draft")
    return whole / SUBFOLDER if folder.name == SUBFOLDER else whole


def peek_draft(name: str, revision: str | None = None) -> Path:
    """The folder that holds a draft's config, its weights left where they are; it may lie in a subfolder."""
    files = (*hub.CONFIG_FILES, *(f"{SUBFOLDER}/{file}" for file in hub.CONFIG_FILES))
    folder = hub.fetch(name, revision=revision, allow_patterns=files, what="draft")
    return folder / SUBFOLDER if (folder / SUBFOLDER / "config.json").is_file() else folder


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
    if model == demo.NAME:
        return demo.TARGET
    return hub.fetch(model, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, what="target")


def _auto(result: Plan, revision: str | None, folder: Path, config: dict[str, Any]) -> None:
    """Pick the best published draft that can be used, or say why there is none; nothing here fails the load."""
    if result.model == demo.NAME:
        return _take(result, demo.NAME, None, folder, config)
    lineage = Lineage(result.model, folder)
    try:
        resolution = registry.resolve(result.model, lineage, revision)
    except DFlashError as error:
        result.notes.append(f"no draft: {error}; decoding plainly")
        return None
    failures = []
    for draft in resolution.drafts:
        try:
            _take(result, draft.repo, draft.revision, folder, config)
        except DFlashError as error:
            failures.append(str(error))
            continue
        at = f"@{draft.revision:.12}" if draft.revision else ""
        why = [resolution.reason, *_advice(draft, resolution.pair, config), *(f"instead of: {f}" for f in failures)]
        result.notes.append(f"draft {draft.repo}{at}: {'; '.join(why)}")
        return None
    why = failures or [resolution.reason, *lineage.problems, f"name one with --draft-model or in {user_pairs_path()}"]
    result.notes.append(f"no draft: {'; '.join(why)}; decoding plainly")
    return None


def _advice(draft: PublishedDraft, pair: Pair | None, config: dict[str, Any]) -> Iterator[str]:
    """What the tables know about using this draft well."""
    if draft.thinking is False:
        yield "trained with thinking off"
    if draft.gated:
        yield "gated, its terms have to be accepted on its page"
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else 16
    if pair and (block := pair.recommended_block.get(str(bits))) and block != draft.block:
        yield f"blocks of {block} did best on {bits}-bit targets (--block-size {block})"


def _take(result: Plan, name: str, revision: str | None, target_folder: Path, config: dict[str, Any]) -> None:
    """Use this draft or raise: its config against the target's first, then the family, then its tensors."""
    facts = TargetFacts.from_config(result.model, config)
    if name not in demo.DRAFTS:
        folder = peek_draft(name, revision)
        stated = folder_config(folder, target_folder)
        check_fit(stated, facts, name)
        check_special_tokens(folder, target_folder, name, stated.mask_token_id)
    check_family(result.model, config)
    folder = fetch_draft(name, revision)
    draft_config = check_draft_folder(folder, target_folder).config
    check_fit(draft_config, facts, name)
    result.draft, result.draft_folder, result.block_size = name, folder, draft_config.widest_block
    result.target_folder = target_folder


def _check_on(model: nn.Module, config: DraftConfig, name: str) -> None:
    target = Target(model)
    target.require_rewindable(target.make_cache())
    check_fit(config, TargetFacts.from_model(target), name)
    target.taps_before_norm = config.taps_before_norm
    target.check(config.target_layer_ids)
