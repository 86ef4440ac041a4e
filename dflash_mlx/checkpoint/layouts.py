"""Config layouts other than z-lab's, each brought into z-lab's: a table, told apart by the keys a config has.

What a layout calls otherwise is renamed, what its code fixes is spelled out, and what is only copied from the target
is left out. Knows keys; the facts themselves are read and checked by `reading.py`. Sources are named a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..draft.config import DFLASH2_FIELDS
from ..errors import DraftError
from .fields import SPELLINGS, Fields, brief
from .reading import HEAD_DIMS

Config = dict[str, Any]
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True)
class ConfigLayout:
    """One layout.

    Attributes:
        matches: whether a config is in it. translate: to z-lab's; gets the config with look-ups that name its file.
        names: z-lab's name of a field -> what this layout calls it, for errors.
    """

    matches: Callable[[Mapping[str, Any]], bool]
    translate: Callable[[Fields], Config]
    names: Mapping[str, str] = field(default_factory=dict)


def in_zlab(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], str, Mapping[str, str]]:
    """A config in z-lab's layout, its file, and the names that the file has for fields: what `Fields` takes.

    Raises `DraftError` where a layout contradicts itself or needs something that is not supported.
    """
    if isinstance(text := config.get("text_config"), Mapping):
        config = _unwrapped(config, text)
    for layout in LAYOUTS:
        if layout.matches(config):
            return layout.translate(Fields(config, source, layout.names)), source, layout.names
    return config, source, {}


def _unwrapped(config: Mapping[str, Any], text: Mapping[str, Any]) -> Config:
    """A config whose sizes are nested as a multimodal target's are, and win over its outer ones (SGLang)."""
    outer = {name: value for name, value in config.items() if name != "text_config"}
    inner = {name: value for name, value in text.items() if value is not None}
    draft = {name: outer[name] for name in ("architectures", "dflash_config") if outer.get(name)}
    return {**outer, **inner, **draft}


def _speculators(read: Fields) -> Config:
    """`speculators` 0.9 (DFlashSpeculatorConfig): the backbone's own config nested, taps one higher.

    Full layers are never causal there; sliding ones are unless `sliding_window_non_causal`, a key that files older than
    it lack and that vLLM and speculators then take differently.
    """
    config = read.config
    kind = config.get("speculators_model_type", "dflash")
    if kind not in ("dflash", "dflash2"):
        raise DraftError(f"{read.source}: a `speculators` draft of the type {brief(kind)}, which is no DFlash draft")
    layer = read.optional("transformer_layer_config", dict)
    if not layer:
        raise read.error("transformer_layer_config", "missing; it holds the sizes of the draft")
    out = {
        key: value for key, value in layer.items() if key not in ("is_causal", "dflash_config", "quantization_config")
    }
    types = out.get("layer_types")
    non_causal = config.get("sliding_window_non_causal")
    if isinstance(types, list) and "sliding_attention" in types:
        if not isinstance(non_causal, bool):
            raise read.error(
                "sliding_window_non_causal", "missing, but layer_types has sliding layers; set true or false"
            )
        out["is_causal"] = False if non_causal else None
    for key in (
        "draft_vocab_size", "target_hidden_size", "num_target_layers", "dtype", "torch_dtype", "quantization",
        "quantization_config",
    ):  # fmt: skip
        if config.get(key) is not None:
            out[key] = config[key]
    nested = {key: config[key] for key in ("mask_token_id", *DFLASH2_FIELDS) if config.get(key) is not None}
    nested["aux_hidden_state_layer_ids"] = config.get("aux_hidden_state_layer_ids")
    nested["sample_from_anchor"] = read.flag("sample_from_anchor")
    nested["block_size"] = _proposed(read)
    out["architectures"] = ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"]
    return {**out, "dflash_config": nested}


def _proposed(read: Fields) -> int:
    """The block size, cut to what `speculators_config` says that the draft proposes."""
    block, from_anchor = read.positive("block_size"), read.flag("sample_from_anchor")
    section = read.optional("speculators_config", dict) or {}
    methods = section.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise read.error("speculators_config.proposal_methods", f"{brief(methods)} is not a list of objects")
    stated = [method["speculative_tokens"] for method in methods if method.get("speculative_tokens") is not None]
    name = "speculators_config.proposal_methods.speculative_tokens"
    if not stated:
        return block
    if any(tokens != stated[0] for tokens in stated):
        raise read.error(name, f"{brief(stated)} differ; keep the one the draft was trained with")
    most, tokens = block - 1 + from_anchor, stated[0]
    if type(tokens) is not int or not 1 <= tokens <= most:
        raise read.error(
            name,
            f"{brief(tokens)} is not in 1 to {most}, as block_size {block} with sample_from_anchor {from_anchor} asks",
        )
    return tokens + 1 - from_anchor


# What a DeepSpec config says of the draft; the rest is a copy of the target's.
DEEPSPEC = (
    *SIZES, "hidden_act", "attention_bias", "max_position_embeddings", "rope_theta", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "has_embed_tokens", "has_lm_head", "num_target_layers", "markov_rank",
    "enable_confidence_head", "dtype", "torch_dtype", "quantization", "quantization_config",
)  # fmt: skip
OF_THE_TARGET = ("partial_rotary_factor", *SPELLINGS["is_neox_style"])  # of a rope section, which is a copy too


def _deepspec(read: Fields) -> Config:
    """DeepSpec (`build_draft_config`): the target's config with the draft's facts at the top level.

    Its drafts are Qwen3 layers, mostly with embedding and head of their own (the tensors tell). No layer is causal, and
    slot i predicts the token after it (its labels), which the config does not say.
    """
    config = read.config
    names = config.get("architectures")
    if "gemma" in str(names).lower():
        raise read.error("architectures", f"{brief(names)}: a DeepSpec draft with Gemma layers, which is not supported")
    out = {key: config[key] for key in DEEPSPEC if config.get(key) is not None}
    for name in ("rope_parameters", "rope_scaling"):
        if section := read.optional(name, dict):
            out[name] = {key: value for key, value in section.items() if key not in OF_THE_TARGET}
    own = ("block_size", "mask_token_id", "target_layer_ids")
    nested = {key: read.get(key, default=None) for key in own}
    nested["sample_from_anchor"] = read.flag("sample_from_anchor", True)
    return {**out, "is_causal": False, "architectures": ["DFlashDraftModel"], "dflash_config": nested}


def _muse(read: Fields) -> Config:
    """Meta's Muse assistant (transformers, `muse_glimmer_assistant`): never causal, |query - key| <= sliding_window.

    The vocabulary is the Muse family's where the config leaves it out, as vLLM takes it.
    """
    config = read.config
    out = {"vocab_size": 202048, **config, "architectures": ["DFlashDraftModel"]}
    out["dflash_config"] = {"causal": False, **(read.optional("dflash_config", dict) or {})}
    if out.get("layer_types") is None and isinstance(layers := config.get("num_hidden_layers"), int):
        out["layer_types"] = ["sliding_attention"] * min(layers, 1024)
    if config.get("sliding_window") is not None:
        out["sliding_window"] = read.positive("sliding_window") + 1  # z-lab's window counts the query itself
    return out


def _laguna(read: Fields) -> Config:
    """poolside's Laguna (vLLM and SGLang, `DFlashLagunaForCausalLM`): gated attention, a norm for each tap.

    The gate is softplus(g_proj(normed block)) in float32, on attention's output before o_proj. Keys and values of the
    context come from the context feature normed by the layer's own input_layernorm.
    """
    config = read.config
    out = {key: value for key, value in config.items() if key not in ("gating", "model_type") and value is not None}
    out.setdefault("head_dim", HEAD_DIMS["laguna"])
    heads = config.get("num_attention_heads")
    each = config.get("num_attention_heads_per_layer") or []
    if not isinstance(each, list) or any(own != heads for own in each):
        raise read.error(
            "num_attention_heads_per_layer", f"{brief(each)} differs from num_attention_heads: not supported"
        )
    if "sparse" in str(config.get("mlp_layer_types")):
        raise read.error("mlp_layer_types", "a draft with experts is not supported")
    if config.get("layer_types") is None:
        raise read.error("layer_types", "missing; a Laguna draft can't be run without it")
    gating = config.get("gating")
    if gating not in (None, True, False, "per-head", "per-element", "disabled"):
        raise read.error("gating", f"{brief(gating)} is not known")
    nested = dict(read.optional("dflash_config", dict) or {})
    if gating not in (None, False, "disabled"):
        nested["gating"] = "per-element" if gating == "per-element" else "per-head"  # the tensors' rows decide
    return {**out, "dflash_config": {**nested, "aux_hidden_norms": True, "context_layernorm": True}}


# In the order of asking; a config that is in none is in z-lab's own layout (retrains, SpecForge, MiMo, nvidia ...).
LAYOUTS = (
    ConfigLayout(
        lambda config: "transformer_layer_config" in config or "speculators_model_type" in config,
        _speculators,
        {
            **{
                name: f"transformer_layer_config.{name}"
                for name in (*SIZES, "hidden_act", "layer_types", "sliding_window")
            },
            "target_layer_ids": "aux_hidden_state_layer_ids",
        },
    ),
    ConfigLayout(lambda config: "markov_rank" in config and "target_layer_ids" in config, _deepspec),
    ConfigLayout(lambda config: config.get("model_type") == "muse_glimmer_assistant", _muse),
    ConfigLayout(lambda config: config.get("model_type") == "laguna" and bool(config.get("dflash_config")), _laguna),
)
