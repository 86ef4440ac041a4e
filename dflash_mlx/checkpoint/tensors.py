"""How each tensor of a draft comes from the tensors of its files, known from their headers alone.

Every published layout stores the same draft under other names, fused, offset or packed otherwise. Here each
canonical tensor gets its recipe. Knows names, shapes and the draft's config; knows no file format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..draft.config import PER_ELEMENT, PER_HEAD, DraftConfig
from ..errors import DraftError
from . import packed, schemes
from .recipe import Recipe, Recipes
from .tensor_info import TensorInfo

# Names of other layouts -> z-lab's, one after the other. What they have in common is the tensor, not the spelling.
RENAMES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^(?:(?:model|draft_model|module|dflash_module)\.)+", ""),  # as a trainer or a wrapper saved it
        (r"^logit_head\.(weight|scales|biases)$", r"lm_head.\1"),
        (r"^logit_head\.", ""),
        (r"^midlayer\.", "layers.0."),  # drafts of one layer
        (r"^encoder\.fc\.", "fc."),  # Meta's Muse assistant
        (r"^encoder\.output_norm_enc\.", "hidden_norm."),
        (r"\.self_attn\.sink$", ".self_attn.attention_sink_bias"),  # poolside's Laguna
        (r"^mask_embedding\.weight$", "mask_embedding"),
        (r"^draft_id_to_target_id$", "d2t"),
        (r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$", r"\1"),
    )
)

# What a file may hold that a draft does not need, and why.
UNUSED = {
    r"(^|\.)inv_freq$": "rope frequencies, which follow from config.json",
    r"^t2d$": "which target ids have a draft id, which follows from d2t",
    r"^verifier_(norm|lm_head)\.": "a copy of the target's own",
    **{rf"\.{kind}$": why for kind, why in schemes.UNUSED.items()},
}

NORM = re.compile(r"(^|\.)(input_layernorm|post_attention_layernorm|q_norm|k_norm|norm|hidden_norm)\.weight$")
FUSED = re.compile(r"(.*\.)(qkv_proj|gate_up_proj)\.(weight|bias|scales|biases)$")
GATED = re.compile(r"(.*\.self_attn\.)q_proj\.(weight|bias|scales|biases)$")


def canonical_recipes(
    config: DraftConfig, tensors: Mapping[str, TensorInfo], folder: Path, beside: Recipes | None = None
) -> tuple[DraftConfig, Recipes, dict[str, str]]:
    """Every tensor of a draft under z-lab's name.

    Args:
        config: as config.json states it. tensors: of the files. folder: named in errors. beside: further tensors by
            canonical name.

    Returns:
        The config with what only the tensors tell (biases, own embedding, gate ...), the recipes, and the tensors
        that are not used with the reason.

    Raises:
        DraftError: two tensors are the same one, or a fused one has other rows than config.json says.
    """
    recipes, unused = _named(dequantising(tensors, config))
    recipes.update(beside or {})
    recipes = _split_fused(config, recipes)
    config, recipes = _split_gated(config, recipes, folder)
    if config.offset_norms:
        recipes = {name: recipe.then(_plus_one) if NORM.search(name) else recipe for name, recipe in recipes.items()}
        config = replace(config, offset_norms=False)
    return _as_stored(config, recipes), recipes, unused


def dequantising(tensors: Mapping[str, TensorInfo], config: DraftConfig) -> Recipes:
    """One recipe a tensor, by the names of the files; matrices that another tool quantised come out dequantised.

    Raises `DraftError` for a scheme that is not read.
    """
    found = packed.recipes(tensors, config.quantization)
    parts = {source for recipe in found.values() for source in recipe.sources}
    return {name: Recipe.stored(name, info) for name, info in tensors.items() if name not in parts} | found


def canonical_name(name: str) -> str:
    """z-lab's name for a tensor or module of any layout."""
    for pattern, new in RENAMES:
        name = pattern.sub(new, name)
    return name


def _named(stored: Recipes) -> tuple[Recipes, dict[str, str]]:
    recipes: Recipes = {}
    unused: dict[str, str] = {}
    for old, recipe in stored.items():
        name = canonical_name(old)
        if why := next((why for pattern, why in UNUSED.items() if re.search(pattern, name)), None):
            unused[old] = why
        elif name in recipes:
            raise DraftError(f"{recipe.file}: {old} and {recipes[name].sources[0]} are both {name}; keep one of them")
        else:
            recipes[name] = recipe
    return recipes, unused


def _split_fused(config: DraftConfig, recipes: Recipes) -> Recipes:
    """`qkv_proj` and `gate_up_proj` into their parts; every kind of tensor of a linear layer has its rows first."""
    kv = config.num_key_value_heads * config.head_dim
    out: Recipes = {}
    for name, recipe in recipes.items():
        if not (found := FUSED.match(name)):
            out[name] = recipe
            continue
        path, fused, kind = found.groups()
        rows = recipe.shape[0] if recipe.shape else 0
        if fused == "qkv_proj":
            query = config.num_attention_heads * config.head_dim
            query *= 2 if rows == 2 * (query + kv) else 1  # with the gate of `_split_gated`
            parts = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        else:
            parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        if rows != sum(parts.values()):
            raise DraftError(
                f"{recipe.file}: {name} has {rows} rows, config.json asks for {' + '.join(map(str, parts.values()))}"
            )
        start = 0
        for part, count in parts.items():
            if (split := f"{path}{part}.{kind}") in recipes:
                raise DraftError(f"{recipe.file}: {name} and {split} are both there; keep one of them")
            out[split] = recipe.rows(start, start + count)
            start += count
    return out


def _split_gated(config: DraftConfig, recipes: Recipes, folder: Path) -> tuple[DraftConfig, Recipes]:
    """Qwen3.5's `q_proj` of twice the rows: each head's query rows, then the rows of its gate (transformers)."""
    heads, dim = config.num_attention_heads, config.head_dim
    gated = {
        name: found
        for name, recipe in recipes.items()
        if (found := GATED.match(name)) and recipe.shape[:1] == (2 * heads * dim,)
    }
    if not gated and config.offset_norms is None:
        raise DraftError(
            f"{folder / 'config.json'}: use_gemma_norm: missing; model_type is Qwen3.5's but q_proj has no gate, so "
            "whether norms are stored as offsets can't be told: set it to true if they are, else to false"
        )
    if not gated:
        return config, recipes
    out = {name: recipe for name, recipe in recipes.items() if name not in gated}
    for name, found in gated.items():
        path, kind = found.groups()
        for part, which in (("q_proj", 0), ("g_proj", 1)):
            shape = (heads * dim, *recipes[name].shape[1:])
            out[f"{path}{part}.{kind}"] = recipes[name].then(partial(_half_of_heads, heads, dim, which), shape)
    offset = True if config.offset_norms is None else config.offset_norms
    return replace(config, gating=PER_ELEMENT, gate_activation="sigmoid", offset_norms=offset), out


def _half_of_heads(heads: int, dim: int, which: int, array: mx.array) -> mx.array:
    rest = array.shape[1:]
    return array.reshape(heads, 2, dim, *rest)[:, which].reshape(heads * dim, *rest)


def _plus_one(weight: mx.array) -> mx.array:
    return weight + 1  # in its own dtype, as mlx-lm does for Qwen3.5


def _as_stored(config: DraftConfig, recipes: Recipes) -> DraftConfig:
    """The config with what its flags leave open or get wrong, decided by which tensors there are."""

    def some(ending: str) -> bool:
        return any(name.endswith(ending) for name in recipes)

    biased = some("_proj.bias")  # the flag in configs is unreliable
    sinks = {
        i for i in range(config.num_hidden_layers) if f"layers.{i}.self_attn.attention_sink_bias" in recipes
    } | set(config.attention_sink_layers)
    gating = config.gating
    gates = recipes.get("layers.0.self_attn.g_proj.weight")
    if gating and gates is not None:
        gating = PER_HEAD if gates.shape[:1] == (config.num_attention_heads,) else PER_ELEMENT
    overrides = config.quantization and {canonical_name(key): value for key, value in config.quantization.items()}
    return replace(
        config,
        attention_bias=biased and (config.attention_bias or some("self_attn.q_proj.bias")),
        attention_output_bias=biased and (config.attention_output_bias or some("self_attn.o_proj.bias")),
        qk_norm=config.qk_norm or some("self_attn.q_norm.weight"),
        has_embed_tokens=config.has_embed_tokens or "embed_tokens.weight" in recipes,
        has_lm_head=config.has_lm_head or "lm_head.weight" in recipes or config.draft_vocab_size is not None,
        mask_embedding=config.mask_embedding or "mask_embedding" in recipes,
        attention_sink_layers=tuple(sorted(sinks)),
        gating=gating,
        quantization=overrides,
    )
