"""The pair that is served, behind mlx-lm's `ModelProvider`. It is loaded once; requests can't load another."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import mlx_lm
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.server import ModelProvider

from .. import __version__
from ..decode.caches import cache_names
from ..errors import DFlashError
from ..loading import Plan, fetch_target
from ..pairs.families import families
from .disk import FORMAT

DEFAULT = "default_model"  # mlx-lm's name for the model of the command line
# Families whose requests do not say in a batch what they say alone, and what goes wrong.
UNBATCHED = {family.name: family.batch for family in families().values() if family.batch != "verified"}


class Provider(ModelProvider):
    """mlx-lm's provider with a DFlash draft.

    Attributes:
        block_size: of a request that does not say, at most; 1 without a draft.
        pinned: that block where the command line says so; None lets each round choose.
        cuttable: whether the target's caches can drop their last rows (recurrent and rotating ones can't, always).
        one_by_one: why requests do not share a batch, "" where they do.
    """

    model: Any  # mlx-lm's constructor sets them to None
    tokenizer: Any
    draft_model: Any
    model_key: Any

    def __init__(self, args: argparse.Namespace, plan: Plan):
        super().__init__(args)
        self.plan = plan
        self.cuttable = False
        self.one_by_one = ""

    @property
    def block_size(self) -> int:
        return self.pinned or self.plan.block_size or 1

    @property
    def pinned(self) -> int | None:
        return self.cli_args.block_size and min(self.cli_args.block_size, self.plan.block_size or 1)

    @property
    def public_name(self) -> str:
        """The served model's name for clients: a repo as it is, of a folder the last part."""
        return _public(self.plan.model)

    @property
    def public_draft(self) -> str | None:
        return None if self.plan.draft is None else _public(self.plan.draft)

    def answers_to(self, name: str) -> bool:
        return name in (DEFAULT, self.public_name, self.plan.model, *self.cli_args.alias)

    def load_default(self) -> None:
        args = self.cli_args
        if self.model is None:
            self._load(self.plan.model, args.adapter_path, self.plan.draft)

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        args = self.cli_args
        self.model, self.draft_model, self.tokenizer = self.plan.load(
            attn_implementation=args.attn_implementation,
            draft_window=args.draft_window,
            adapter_path=adapter_path,
            tokenizer_config=self._tokenizer_config,
            trust_remote_code=args.trust_remote_code,
        )
        if args.use_default_chat_template and self.tokenizer.chat_template is None:
            default = getattr(self.tokenizer, "default_chat_template", None)
            if default is None:
                raise DFlashError("--use-default-chat-template: this tokenizer has none; give --chat-template")
            self.tokenizer.chat_template = default
        self.model_key = (model_path, adapter_path, self.plan.draft)
        caches = make_prompt_cache(self.model)
        self.cuttable = all(map(_always_cuttable, caches))
        self.one_by_one = self._why_one_by_one(caches)

    def _why_one_by_one(self, caches: list[Any]) -> str:
        """Only what was measured is batched: this family with these cache classes in this version of mlx-lm."""
        args = self.cli_args
        package, _, family = type(self.model).__module__.rpartition(".")
        known = families().get(family) if package == "mlx_lm.models" else None
        if args.decode_concurrency == 1:
            return "--decode-concurrency 1"
        if args.kv_bits is not None:
            return "quantised caches can't be batched"
        if known is None or not set(cache_names(caches)) <= set(known.caches):
            return f"{family} with these caches was not tested in a batch"
        if known.mlx_lm != mlx_lm.__version__:
            return f"batches were tested with mlx-lm {known.mlx_lm}, this is {mlx_lm.__version__}"
        return f"{family} in a batch: {UNBATCHED[family]}" if family in UNBATCHED else ""

    def fingerprint(self) -> str:
        """What caches on disk must have been made with: both models' files by name, size and time, code and flags."""
        args = self.cli_args
        folders = [fetch_target(self.plan.model, self.plan.revision), self.plan.draft_folder, args.adapter_path]
        facts: list[Any] = [FORMAT, __version__, mlx_lm.__version__]
        facts += [args.kv_bits, args.kv_group_size, args.quantized_kv_start, args.draft_window]
        for folder in folders:
            if folder is not None:
                files = (f for f in sorted(Path(folder).iterdir()) if f.suffix in (".json", ".safetensors"))
                # A file of the hub's cache is a link to a blob that is named by its content.
                facts += [(f.name, os.path.realpath(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _always_cuttable(cache: Any) -> bool:
    return all(map(_always_cuttable, cache.caches)) if type(cache) is CacheList else type(cache) is KVCache


def _public(name: str) -> str:
    return Path(name).resolve().name if Path(os.path.expanduser(name)).is_dir() else name
