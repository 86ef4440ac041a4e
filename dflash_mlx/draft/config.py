"""The facts of one DFlash draft, read from any published spelling of `config.json`.

Knows the spellings and their conflicts; knows no tensor, no target and no network. Required facts are
required: a missing or contradictory one is a `DraftError` that names the field and the file, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DraftError
from .fields import MAX_SIZE, Fields, brief, is_number, read_json

FULL, SLIDING = "full_attention", "sliding_attention"

# Fields that each rope type needs besides its type; other types are refused by name.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}

# Further numbers of a rope section, each with the least it may be.
ROPE_OPTIONS = {"beta_fast": 1e-6, "beta_slow": 1e-6, "mscale": 0, "mscale_all_dim": 0, "attention_factor": 1e-6}

# What a DFlash 2 draft has besides; a draft with one of them needs all.
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
MAX_KERNEL = 256  # of a convolution, in block rows

MAX_LAYERS = 1024  # far beyond any draft; a damaged count must not build layers for ever

# Config keys of other layouts and generations, with what to tell the user.
FOREIGN_KEYS = {
    "transformer_layer_config": "a `speculators` draft: this layout is not read yet",
    "speculators_model_type": "a `speculators` draft: this layout is not read yet",
    "aux_hidden_state_layer_ids": "a `speculators` draft: this layout is not read yet",
    "eagle_config": "an EAGLE draft, not a DFlash draft",
}


@dataclass(frozen=True)
class DraftConfig:
    """One draft, validated. Sizes are in elements, positions and windows in tokens.

    Source of the fields: z-lab's DFlash `config.json`; `from_dict` reads, `to_dict` writes that layout.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    conv_kernel_size: int = 0  # this and the next three: 0 in a DFlash (v1) draft
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    dtype: str | None = None
    quantization: dict[str, Any] | None = None

    @property
    def context_width(self) -> int:
        """Columns of `fc`: taps times the width of the target's hidden state."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    @property
    def kind(self) -> str:
        """ "dflash" or "dflash2"."""
        return "dflash2" if self.conv_kernel_size else "dflash"

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None where it attends to everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether block tokens of this layer see only earlier ones: sliding layers do unless `is_causal` says."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def with_bias(self, has_bias: bool) -> DraftConfig:
        """The same draft with attention biases as its tensors have them; the flag in configs is unreliable."""
        return replace(self, attention_bias=has_bias)

    @classmethod
    def from_file(cls, path: Path) -> DraftConfig:
        """Read `config.json`. Raises `DraftError` when it is missing, no JSON object, or not a DFlash draft."""
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
        """Read any spelling of the z-lab layout; `source` is the file named in errors.

        Raises:
            DraftError: a fact is missing, contradicts itself, is out of range, or belongs to another layout.
        """
        read = Fields(config, source)
        _refuse_foreign(read)
        hidden = read.positive("hidden_size")
        layers = read.positive("num_hidden_layers", MAX_LAYERS)
        heads = read.positive("num_attention_heads")
        kv_heads = read.positive("num_key_value_heads")
        if heads % kv_heads:
            raise read.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
        head_dim = _head_dim(read, hidden, heads)
        theta, scaling = _rope(read)
        layer_types, window, causal = _attention(read, layers)
        vocab = read.positive("vocab_size")
        target_layers = read.optional_int("num_target_layers")
        target_hidden = read.optional_int("target_hidden_size")
        taps = _taps(read, target_layers)
        if len(taps) * (target_hidden or hidden) > MAX_SIZE:
            raise read.error("target_layer_ids", f"{len(taps)} taps of width {target_hidden or hidden} are too many")
        return cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=read.positive("intermediate_size"),
            vocab_size=vocab,
            rms_norm_eps=read.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            block_size=_block_size(read),
            mask_token_id=_mask_token(read, vocab),
            target_layer_ids=taps,
            layer_types=layer_types,
            sliding_window=window,
            is_causal=causal,
            max_position_embeddings=read.optional_int("max_position_embeddings"),
            num_target_layers=target_layers,
            target_hidden_size=target_hidden,
            attention_bias=read.flag("attention_bias"),
            final_logit_softcapping=read.optional_number("final_logit_softcapping", zero_is_off=True),
            input_embedding_scale=read.optional_number("input_embedding_scale") or 1.0,
            output_multiplier=read.optional_number("output_multiplier") or 1.0,
            **_dflash2(read, hidden, vocab),
            dtype=read.optional("dtype", str) or read.optional("torch_dtype", str),
            quantization=read.optional("quantization", dict) or read.optional("quantization_config", dict),
        )

    def to_dict(self) -> dict[str, Any]:
        """The draft in z-lab's own layout (plus mlx-lm's `quantization`), which every DFlash engine reads."""
        config: dict[str, Any] = {
            "architectures": ["DFlash2DraftModel" if self.kind == "dflash2" else "DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        }
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "block_size", "attention_bias",
        ):  # fmt: skip
            config[name] = getattr(self, name)
        config["layer_types"] = list(self.layer_types)
        config["sliding_window"] = self.sliding_window
        for name in (
            "rope_scaling", "max_position_embeddings", "num_target_layers", "target_hidden_size", "is_causal",
            "dtype", "final_logit_softcapping", "quantization",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                config[name] = getattr(self, name)
        nested: dict[str, Any] = {
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
        }
        for name in ("input_embedding_scale", "output_multiplier"):
            if getattr(self, name) != 1.0:
                nested[name] = getattr(self, name)
        if self.kind == "dflash2":
            nested.update({name: getattr(self, name) for name in DFLASH2_FIELDS})
        config["dflash_config"] = nested
        if self.quantization is not None:
            config["quantization_config"] = self.quantization  # the hub's model tree reads this spelling
        return config


def _refuse_foreign(read: Fields) -> None:
    config, nested = read.config, read.optional("dflash_config", dict) or {}
    for key, meaning in FOREIGN_KEYS.items():
        if key in config or key in nested:
            raise DraftError(f"{read.source}: {meaning} (it has `{key}`)")
    names = read.optional("architectures", list) or []
    named = any("DFlash" in str(name) for name in names)
    if not named and not nested and "target_layer_ids" not in config:
        what = brief(names[0] if names else config.get("model_type", "an unnamed model")).strip("'")
        raise DraftError(
            f"{read.source}: {what} is not a DFlash draft (no dflash_config, no DFlash architecture); "
            "a target goes to --model"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise read.error("hidden_act", f"{brief(activation)} is not supported, DFlash drafts use 'silu'")
    if (factor := read.get("partial_rotary_factor", default=None)) not in (None, 1, 1.0):
        raise read.error("partial_rotary_factor", f"{brief(factor)} is not supported yet")


def _head_dim(read: Fields, hidden: int, heads: int) -> int:
    size = read.optional_int("head_dim")
    if size is None and hidden % heads:
        raise read.error("head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} heads")
    size = size or hidden // heads
    if size % 2 or size * heads > MAX_SIZE:
        raise read.error("head_dim", f"{size} is odd or, with {heads} heads, too large; rotary embedding needs pairs")
    return size


def _block_size(read: Fields) -> int:
    block = read.positive("block_size")
    if block < 2:
        raise read.error("block_size", f"{block}: a block holds the anchor and at least one draft token")
    return block


def _mask_token(read: Fields, vocab: int) -> int:
    mask = read.get("mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab:
        raise read.error("mask_token_id", f"{brief(mask)} is not a token id below vocab_size {vocab}")
    return mask


def _taps(read: Fields, target_layers: int | None) -> tuple[int, ...]:
    taps = read.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(tap) is int for tap in taps):
        raise read.error("target_layer_ids", f"{brief(taps)} is not a list of layer numbers")
    if len(set(taps)) != len(taps):
        raise read.error("target_layer_ids", f"{brief(taps)} names a layer twice")
    if min(taps) < 0 or (target_layers is not None and max(taps) >= target_layers):
        limit = "" if target_layers is None else f" to {target_layers - 1} (num_target_layers {target_layers})"
        raise read.error("target_layer_ids", f"{brief(taps)} must lie in 0{limit}")
    return tuple(taps)


def _dflash2(read: Fields, hidden: int, vocab: int) -> dict[str, int]:
    """The fields of a DFlash 2 draft, none for a v1 draft."""
    named = any("DFlash2" in str(name) for name in read.optional("architectures", list) or [])
    if not named and all(read.get(name, default=None) in (None, 0) for name in DFLASH2_FIELDS):
        return {}
    limits = dict(zip(DFLASH2_FIELDS, (MAX_KERNEL, hidden, MAX_SIZE, vocab), strict=True))
    sizes = {name: read.positive(name, most) for name, most in limits.items()}
    if hidden % (group := sizes["conv_group_size"]):
        raise read.error("conv_group_size", f"{group} does not divide hidden_size {hidden}")
    if (rows := 2 * sizes["conv_kernel_size"] * (hidden // group)) > MAX_SIZE:
        raise read.error("conv_kernel_size", f"with groups of {group} it asks for {rows} rows, {MAX_SIZE} are the most")
    return sizes


def _attention(read: Fields, layers: int) -> tuple[tuple[str, ...], int | None, bool | None]:
    """Layer types, window and the causal override, by the precedence that vLLM and the reference share."""
    use_swa = read.flag("use_swa")
    types = read.get("layer_types", default=None)
    causal = read.config.get("is_causal")
    if causal is None:
        causal = (read.config.get("dflash_config") or {}).get("causal")
    if types is None:
        types = [SLIDING if use_swa else FULL] * layers
        if use_swa and causal is None:
            causal = False
    if not isinstance(types, list) or len(types) != layers:
        raise read.error("layer_types", f"expected a list of num_hidden_layers {layers} entries, found {brief(types)}")
    if unknown := sorted({str(kind) for kind in types} - {FULL, SLIDING}):
        raise read.error("layer_types", f"{brief(unknown)} is not {FULL!r} or {SLIDING!r}")
    window = None
    if SLIDING in types:
        window = read.optional_int("swa_window_size") or read.optional_int("sliding_window")
        if window is None:
            raise read.error("sliding_window", "missing, but layer_types has sliding layers")
        if window < 2:
            raise read.error("sliding_window", f"{window} leaves no room for context")
    if causal is not None and not isinstance(causal, bool):
        raise read.error("is_causal", f"{brief(causal)} is not true or false")
    return tuple(types), window, causal


def _rope(read: Fields) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling from `rope_theta`, `rope_parameters` and `rope_scaling`, which may all be present."""
    config = read.config
    found = {name: read.optional(name, dict) for name in ("rope_parameters", "rope_scaling")}
    sections = {name: section for name, section in found.items() if section}
    bases = {name: section["rope_theta"] for name, section in sections.items() if section.get("rope_theta") is not None}
    if config.get("rope_theta") is not None:
        bases["rope_theta"] = config["rope_theta"]
    if not bases:
        raise read.error("rope_theta", "missing, at the top level and under rope_parameters")
    for name, theta in bases.items():
        if not is_number(theta, 1) or theta == 1:
            raise read.error("rope_theta", f"{brief(theta)} ({name}) is not a number above 1")
    if len(set(bases.values())) > 1:
        raise read.error("rope_theta", f"conflicting values {bases}; keep the one the draft was trained with")
    scalings = [_rope_scaling(read, name, section) for name, section in sections.items()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise read.error("rope_scaling", "differs from rope_parameters; keep the one the draft was trained with")
    return float(theta), scalings[0] if scalings else None


def _rope_scaling(read: Fields, name: str, section: dict[str, Any]) -> dict[str, Any] | None:
    kinds = [section[key] for key in ("rope_type", "type") if section.get(key) is not None] or ["default"]
    if kinds[0] != kinds[-1]:
        raise read.error(name, f"rope_type and type disagree: {brief(kinds)}")
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        known = ", ".join(ROPE_FIELDS)
        raise read.error(f"{name}.rope_type", f"{brief(kind)} is not supported (known: {known})")
    for field in ROPE_FIELDS[kind]:
        least = 1 if field == "original_max_position_embeddings" else 1e-6
        if not is_number(value := section.get(field), least):
            raise read.error(f"{name}.{field}", f"{brief(value)}: rope_type {kind!r} needs a positive number")
    for field, least in ROPE_OPTIONS.items():
        if (value := section.get(field)) is not None and not is_number(value, least):
            raise read.error(f"{name}.{field}", f"{brief(value)} is not a positive number")
    if (factor := section.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise read.error(f"{name}.partial_rotary_factor", f"{brief(factor)} is not supported yet")
    if kind == "default":
        return None
    if kind == "yarn":
        section = _yarn(read, name, section)
    fields = {key: value for key, value in section.items() if key not in ("rope_theta", "type") and value is not None}
    return {**fields, "rope_type": kind}


def _yarn(read: Fields, name: str, section: dict[str, Any]) -> dict[str, Any]:
    """What mlx-lm's yarn needs to do as transformers does, or an error where it can't.

    transformers takes a stated `attention_factor` first, then the ratio of `mscale` and `mscale_all_dim` if both
    are given, else 0.1 ln(factor) + 1. mlx-lm always takes the ratio, with defaults that give the last.
    """
    if section.get("truncate") is False:
        raise read.error(f"{name}.truncate", "false is not supported by mlx-lm's yarn")
    stated = section.get("attention_factor")
    derived = 0.1 * math.log(section["factor"]) + 1.0 if section["factor"] > 1 else 1.0
    if stated is not None and abs(stated - derived) > 1e-4:
        raise read.error(f"{name}.attention_factor", f"{stated} differs from the derived {derived:.4f}: not supported")
    ratio = stated is None and section.get("mscale") and section.get("mscale_all_dim")
    unused = ("attention_factor",) if ratio else ("attention_factor", "mscale", "mscale_all_dim")
    return {key: value for key, value in section.items() if key not in unused}
