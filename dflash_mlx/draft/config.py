"""The facts of one DFlash draft, read from any published spelling of `config.json`.

Knows the spellings and their conflicts; knows no tensor, no target and no network. Required facts are
required: a missing or contradictory one is a `DraftError` that names the field and the file, never a guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DraftError

FULL, SLIDING = "full_attention", "sliding_attention"

# Where a fact may stand: the nested section first, then the top level (facts from published configs).
SECTIONS = ("dflash_config", None)

# Fields that each rope type needs besides its type; other types are refused by name.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}

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
    dtype: str | None = None
    quantization: dict[str, Any] | None = None

    @property
    def context_width(self) -> int:
        """Columns of `fc`: taps times the width of the target's hidden state."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

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
        read = _Reader(config, source)
        read.refuse_foreign()
        hidden = read.positive("hidden_size")
        layers = read.positive("num_hidden_layers")
        heads = read.positive("num_attention_heads")
        kv_heads = read.positive("num_key_value_heads")
        if heads % kv_heads:
            raise read.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
        theta, scaling = _rope(read)
        layer_types, window, causal = _attention(read, layers)
        vocab = read.positive("vocab_size")
        target_layers = read.optional_int("num_target_layers")
        return cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_head_dim(read, hidden, heads),
            intermediate_size=read.positive("intermediate_size"),
            vocab_size=vocab,
            rms_norm_eps=read.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            block_size=_block_size(read),
            mask_token_id=_mask_token(read, vocab),
            target_layer_ids=_taps(read, target_layers),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=causal,
            max_position_embeddings=read.optional_int("max_position_embeddings"),
            num_target_layers=target_layers,
            target_hidden_size=read.optional_int("target_hidden_size"),
            attention_bias=bool(read.get("attention_bias", default=False)),
            final_logit_softcapping=read.optional_number("final_logit_softcapping", zero_is_off=True),
            input_embedding_scale=read.optional_number("input_embedding_scale") or 1.0,
            output_multiplier=read.optional_number("output_multiplier") or 1.0,
            dtype=config.get("dtype") or config.get("torch_dtype"),
            quantization=config.get("quantization") or config.get("quantization_config"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The draft in z-lab's own layout (plus mlx-lm's `quantization`), which every DFlash engine reads."""
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
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
        config["dflash_config"] = nested
        if self.quantization is not None:
            config["quantization_config"] = self.quantization  # the hub's model tree reads this spelling
        return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a `DraftError` that says what the file is instead."""
    if not path.is_file():
        raise DraftError(f"{path}: no such file; a draft folder holds config.json and model.safetensors")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DraftError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise DraftError(f"{path}: holds a JSON {type(config).__name__}, expected an object")
    return config


class _Reader:
    """Typed look-ups in one config; every error names field and file."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config, self.source = config, source

    def error(self, field: str, problem: str) -> DraftError:
        return DraftError(f"{self.source}: {field}: {problem}")

    def refuse_foreign(self) -> None:
        for key, meaning in FOREIGN_KEYS.items():
            if key in self.config or key in (self.config.get("dflash_config") or {}):
                raise DraftError(f"{self.source}: {meaning} (it has `{key}`)")
        names = self.config.get("architectures") or []
        if any("DFlash2" in str(name) for name in names):
            raise DraftError(f"{self.source}: a DFlash 2 draft ({names[0]}): only DFlash (v1) drafts are read yet")
        if not isinstance(self.config.get("dflash_config", {}), Mapping):
            raise self.error("dflash_config", "expected an object")
        named = any("DFlash" in str(name) for name in names)
        if not named and not self.config.get("dflash_config") and "target_layer_ids" not in self.config:
            what = names[0] if names else self.config.get("model_type", "an unnamed model")
            raise DraftError(
                f"{self.source}: {what} is not a DFlash draft (no dflash_config, no DFlash architecture); "
                "a target goes to --model"
            )
        if self.config.get("hidden_act", "silu") != "silu":
            raise self.error("hidden_act", f"{self.config['hidden_act']!r} is not supported, DFlash drafts use 'silu'")
        if (factor := self.get("partial_rotary_factor", default=None)) not in (None, 1, 1.0):
            raise self.error("partial_rotary_factor", f"{factor} is not supported yet")

    def get(self, field: str, **default: Any) -> Any:
        """The value of a field wherever it stands; two different values are a conflict."""
        found = [
            (f"{section}.{field}" if section else field, place[field])
            for section in SECTIONS
            if isinstance(place := self.config.get(section) if section else self.config, Mapping)
            and place.get(field) is not None
        ]
        if len(found) > 1 and found[0][1] != found[1][1]:
            (one, a), (two, b) = found
            raise self.error(field, f"{one} is {a!r} but {two} is {b!r}; keep the one the draft was trained with")
        if found:
            return found[0][1]
        if "default" in default:
            return default["default"]
        raise self.error(field, "missing; the draft can't be run without it")

    def positive(self, field: str) -> int:
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(field, f"{value!r} is not a positive whole number")
        return value

    def optional_int(self, field: str) -> int | None:
        return None if self.get(field, default=None) is None else self.positive(field)

    def number(self, field: str) -> float:
        value = self.get(field)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.error(field, f"{value!r} is not a positive number")
        return float(value)

    def optional_number(self, field: str, zero_is_off: bool = False) -> float | None:
        off = (None, 0) if zero_is_off else (None,)
        return None if self.get(field, default=None) in off else self.number(field)


def _head_dim(read: _Reader, hidden: int, heads: int) -> int:
    if (explicit := read.optional_int("head_dim")) is not None:
        return explicit
    if hidden % heads:
        raise read.error("head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _block_size(read: _Reader) -> int:
    block = read.positive("block_size")
    if block < 2:
        raise read.error("block_size", f"{block}: a block holds the anchor and at least one draft token")
    return block


def _mask_token(read: _Reader, vocab: int) -> int:
    mask = read.get("mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab:
        raise read.error("mask_token_id", f"{mask!r} is not a token id below vocab_size {vocab}")
    return mask


def _taps(read: _Reader, target_layers: int | None) -> tuple[int, ...]:
    taps = read.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(tap) is int for tap in taps):
        raise read.error("target_layer_ids", f"{taps!r} is not a list of layer numbers")
    if len(set(taps)) != len(taps):
        raise read.error("target_layer_ids", f"{taps} names a layer twice")
    if min(taps) < 0 or (target_layers is not None and max(taps) >= target_layers):
        limit = "" if target_layers is None else f" to {target_layers - 1} (num_target_layers {target_layers})"
        raise read.error("target_layer_ids", f"{taps} must lie in 0{limit}")
    return tuple(taps)


def _attention(read: _Reader, layers: int) -> tuple[tuple[str, ...], int | None, bool | None]:
    """Layer types, window and the causal override, by the precedence that vLLM and the reference share."""
    use_swa = bool(read.get("use_swa", default=False))
    types = read.get("layer_types", default=None)
    causal = read.config.get("is_causal")
    if causal is None:
        causal = (read.config.get("dflash_config") or {}).get("causal")
    if types is None:
        types = [SLIDING if use_swa else FULL] * layers
        if use_swa and causal is None:
            causal = False
    if not isinstance(types, list) or len(types) != layers:
        raise read.error("layer_types", f"expected a list of num_hidden_layers {layers} entries, found {types!r}")
    if unknown := sorted({str(kind) for kind in types} - {FULL, SLIDING}):
        raise read.error("layer_types", f"{unknown} is not {FULL!r} or {SLIDING!r}")
    window = None
    if SLIDING in types:
        window = read.optional_int("swa_window_size") or read.optional_int("sliding_window")
        if window is None:
            raise read.error("sliding_window", "missing, but layer_types has sliding layers")
        if window < 2:
            raise read.error("sliding_window", f"{window} leaves no room for context")
    if causal is not None and not isinstance(causal, bool):
        raise read.error("is_causal", f"{causal!r} is not true or false")
    return tuple(types), window, causal


def _rope(read: _Reader) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling from `rope_theta`, `rope_parameters` and `rope_scaling`, which may all be present."""
    config = read.config
    sections = {}
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name)
        if section is not None and not isinstance(section, Mapping):
            raise read.error(name, f"{section!r} is not an object")
        if section:
            sections[name] = dict(section)
    bases = {name: section["rope_theta"] for name, section in sections.items() if section.get("rope_theta") is not None}
    if config.get("rope_theta") is not None:
        bases["rope_theta"] = config["rope_theta"]
    if not bases:
        raise read.error("rope_theta", "missing, at the top level and under rope_parameters")
    if len(set(bases.values())) > 1:
        raise read.error("rope_theta", f"conflicting values {bases}; keep the one the draft was trained with")
    theta = next(iter(bases.values()))
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not theta > 1:
        raise read.error("rope_theta", f"{theta!r} is not a number above 1")
    scalings = [_rope_scaling(read, name, section) for name, section in sections.items()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise read.error("rope_scaling", "differs from rope_parameters; keep the one the draft was trained with")
    return float(theta), scalings[0] if scalings else None


def _rope_scaling(read: _Reader, name: str, section: dict[str, Any]) -> dict[str, Any] | None:
    kinds = {section[key] for key in ("rope_type", "type") if section.get(key) is not None}
    if len(kinds) > 1:
        raise read.error(name, f"rope_type and type disagree: {sorted(map(str, kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_FIELDS:
        known = ", ".join(ROPE_FIELDS)
        raise read.error(f"{name}.rope_type", f"{kind!r} is not supported (known: {known})")
    for field in ROPE_FIELDS[kind]:
        value = section.get(field)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise read.error(f"{name}.{field}", f"{value!r}: rope_type {kind!r} needs a positive number")
    if (factor := section.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise read.error(f"{name}.partial_rotary_factor", f"{factor} is not supported yet")
    if kind == "default":
        return None
    if kind == "yarn":
        section = _yarn(read, name, section)
    fields = {key: value for key, value in section.items() if key not in ("rope_theta", "type") and value is not None}
    return {**fields, "rope_type": kind}


def _yarn(read: _Reader, name: str, section: dict[str, Any]) -> dict[str, Any]:
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
