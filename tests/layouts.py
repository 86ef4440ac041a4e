"""The layouts in which drafts are published, as tables of configs and of spellings of tensors.

`SAME`: another spelling of a draft that z-lab's layout can say. `OTHER`: what that layout has no word for, with what
`plain.py` must know of it. `FAULTS`: what can't be read, and what the error must name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny import draft_config, make_draft

Tensors = dict[str, mx.array]

HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 4, 2, 16, 64, 256
TAPS = {"target_layer_ids": [0, 2], "mask_token_id": 255}
FULL, SLIDING = "full_attention", "sliding_attention"
BOTH = {"layer_types": [SLIDING, FULL], "sliding_window": 6}


def base(**changes: Any) -> Tensors:
    """Weights of a z-lab draft; norms in steps of 1/256, so that w - 1 + 1 is w."""
    weights = dict(tree_flatten(make_draft(**changes).parameters()))
    return {name: mx.round(w * 256) / 256 if w.ndim == 1 else w for name, w in weights.items()}


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)) * scale


TABLE = random(VOCAB, HIDDEN, seed=90)


# Other spellings of tensors ------------------------------------------------------------------------


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {name.replace(old, new): w for name, w in weights.items()}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {prefix + name: w for name, w in weights.items()}


def plus(**more: mx.array) -> Callable[[Tensors], Tensors]:
    return lambda weights: {**weights, **{name.replace("__", "."): w for name, w in more.items()}}


def fused(into: str, *parts: str) -> Callable[[Tensors], Tensors]:
    def change(weights: Tensors) -> Tensors:
        out = dict(weights)
        for name in [name for name in weights if f".{parts[0]}." in name]:
            out[name.replace(parts[0], into)] = mx.concatenate(
                [out.pop(name.replace(parts[0], part)) for part in parts]
            )
        return out

    return change


QKV, GATE_UP = fused("qkv_proj", "q_proj", "k_proj", "v_proj"), fused("gate_up_proj", "gate_proj", "up_proj")


def offset(weights: Tensors) -> Tensors:
    return {name: w - 1 if "norm" in name else w for name, w in weights.items()}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {name: w for name, w in weights.items() if part not in name}


def chain(*changes: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def change(weights: Tensors) -> Tensors:
        for one in changes:
            weights = one(weights)
        return weights

    return change


def quantised(weights: Tensors) -> Tensors:
    out: Tensors = {}
    for name, w in weights.items():
        parts = mx.quantize(w, 32, 4) if name.startswith("layers.") and w.ndim == 2 else [w]
        out.update(zip((name, name[:-6] + "scales", name[:-6] + "biases"), parts, strict=False))
    return out


# Other spellings of configs ------------------------------------------------------------------------


def zlab(**changes: Any) -> dict[str, Any]:
    return draft_config(**changes)


def nested(**more: Any) -> dict[str, Any]:
    return {"dflash_config": {**TAPS, **more}}


def speculators(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """As speculators 0.9 writes it."""
    sizes = {
        key: value
        for key, value in draft_config().items()
        if key not in ("architectures", "block_size", "num_target_layers", "dtype", "dflash_config", "rope_theta")
    }
    backbone = {**sizes, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, **(layer or {})}
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 8, "dtype": "float32",
        "draft_vocab_size": VOCAB, "mask_token_id": 255, "aux_hidden_state_layer_ids": [1, 3], "max_anchors": 3072,
        "target_hidden_size": None, "sample_from_anchor": False, "transformer_layer_config": backbone,
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 7}]},
    }  # fmt: skip
    config.update(changes)
    return {key: value for key, value in config.items() if value != "absent"}


def deepspec(**changes: Any) -> dict[str, Any]:
    """As DeepSpec copies it from a target, noise and all."""
    config = {
        **draft_config(dflash_config=None), **TAPS, "architectures": ["Qwen3DSparkModel"], "block_size": 7,
        "layer_types": [FULL, FULL], "num_anchors": 512, "markov_rank": 0, "enable_confidence_head": False,
        "tie_word_embeddings": False, "attn_output_gate": True, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16, "mrope_interleaved": True, "is_causal": True, "sliding_window": 4096,
    }  # fmt: skip
    return {**config, **changes}


def muse(**changes: Any) -> dict[str, Any]:
    config = draft_config(dflash_config=None, rope_theta=None, num_target_layers=None, attention_bias=None)
    return {
        **config, **TAPS, "model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "layer_types": [SLIDING] * 2,
        "sliding_window": 5, **changes,
    }  # fmt: skip


def laguna(**changes: Any) -> dict[str, Any]:
    return {
        **draft_config(rope_theta=None), "model_type": "laguna", "architectures": ["DFlashLagunaForCausalLM"],
        "draft_vocab_size": VOCAB, "gating": True, "layer_types": [SLIDING, SLIDING], "sliding_window": 6,
        "eagle_aux_hidden_state_layer_ids": [1, 3], "mlp_layer_types": ["dense"] * 2,
        "num_attention_heads_per_layer": [4, 4],
        "rope_parameters": {
            FULL: {"rope_theta": 500000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            SLIDING: {"rope_theta": 20000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
        **changes,
    }  # fmt: skip


def mimo(**more: Any) -> dict[str, Any]:
    own = {"use_swa": True, "swa_window_size": 6, "attention_sink_bias": True, "attention_value_scale": 0.612,
           "backbone_rotary_base": 5e6}  # fmt: skip
    return zlab(partial_rotary_factor=0.5, v_head_dim=16, **nested(**own), **more)


# The cases -----------------------------------------------------------------------------------------

SAME_TENSORS: dict[str, Any] = {  # name -> how the files spell z-lab's tensors
    "prefix model.": prefixed("model."),
    "prefix draft_model. (SpecForge)": prefixed("draft_model."),
    "prefix module. (DDP)": prefixed("module."),
    "prefix module.model.": prefixed("module.model."),
    "wrapper logit_head.": prefixed("logit_head."),
    "fused qkv_proj": QKV,
    "fused gate_up_proj": GATE_UP,
    "both fused, prefixed": chain(QKV, GATE_UP, prefixed("model.")),
    "encoder.fc and encoder.output_norm_enc": chain(renamed("hidden_norm.", "encoder.output_norm_enc."),
                                                    renamed("fc.weight", "encoder.fc.weight")),
    "rotary buffers": plus(
        rotary_emb__inv_freq=mx.ones((8,)), layers__0__self_attn__rotary_emb__inv_freq=mx.ones((8,))),
    "the verifier's own norm and head": plus(verifier_norm__weight=mx.ones((64,)), verifier_lm_head__weight=TABLE),
    "its own embedding, equal to the target's": plus(embed_tokens__weight=TABLE),
    "its own head, equal to the target's": plus(lm_head__weight=TABLE),
    "its own head as logit_head": plus(logit_head__weight=TABLE),
    "a mask embedding, equal to the target's row": plus(mask_embedding=TABLE[255]),
    "a mask embedding as a module": plus(mask_embedding__weight=TABLE[255]),
}  # fmt: skip

# name -> (config, z-lab's config of the same draft, how the tensors are spelled)
SAME: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    **{name: (zlab(), zlab(), change) for name, change in SAME_TENSORS.items()},
    "one layer as midlayer": (zlab(num_hidden_layers=1), zlab(num_hidden_layers=1), renamed("layers.0.", "midlayer.")),
    "offset norms (use_gemma_norm)": (zlab(use_gemma_norm=True), zlab(), offset),
    "retrain: block_size nested": (zlab(block_size=None, **nested(block_size=8)), zlab(), dict),
    "taps as layer_ids": (
        zlab(dflash_config={"layer_ids": [1, 3], "mask_token_id": 255}), zlab(), dict),
    "taps as eagle_aux_hidden_state_layer_ids": (
        zlab(dflash_config={"mask_token_id": 255}, eagle_aux_hidden_state_layer_ids=[1, 3]), zlab(), dict),
    "taps in two spellings that agree": (zlab(eagle_aux_hidden_state_layer_ids=[1, 3]), zlab(), dict),
    "facts under eagle_config": (zlab(dflash_config=None, eagle_config=TAPS), zlab(), dict),
    "use_swa over layer types that are all full": (
        zlab(layer_types=[FULL] * 2, **nested(use_swa=True, swa_window_size=6)),
        zlab(layer_types=[SLIDING] * 2, sliding_window=6, is_causal=False), dict),
    "swa_window_size before sliding_window": (
        zlab(layer_types=[SLIDING, FULL], sliding_window=99, **nested(swa_window_size=6)), zlab(**BOTH), dict),
    "is_causal before dflash_config.causal": (
        zlab(is_causal=False, **BOTH, **nested(causal=True)), zlab(is_causal=False, **BOTH), dict),
    "rope by layer type, all the same": (
        zlab(rope_theta=None, rope_parameters={FULL: {"rope_theta": 10000.0, "rope_type": "default"}}), zlab(), dict),
    "rope of the sliding layers apart, the same": (
        zlab(**BOTH, swa_rope_parameters={"rope_theta": 10000.0}), zlab(**BOTH), dict),
    "rope_dim before a copied partial_rotary_factor": (
        zlab(partial_rotary_factor=0.25, rope_theta=None, rope_parameters={
            "rope_theta": 10000.0, "rope_dim": 16, "mrope_section": [4, 2, 2]}), zlab(), dict),
    "prefix dflash_module. (ModelOpt's state)": (zlab(), zlab(), prefixed("dflash_module.")),
    "is_causal nested": (zlab(**BOTH, **nested(is_causal=False)), zlab(is_causal=False, **BOTH), dict),
    "sliding by max_window_layers": (
        zlab(use_sliding_window=True, sliding_window=6, max_window_layers=1),
        zlab(layer_types=[FULL, SLIDING], sliding_window=6), dict),
    "sliding by max_window_layers, window not stated": (
        zlab(use_sliding_window=True, max_window_layers=1),
        zlab(layer_types=[FULL, SLIDING], sliding_window=4096), dict),
    "the same of no backbone by name": (
        zlab(use_sliding_window=True, max_window_layers=1, model_type=None),
        zlab(layer_types=[FULL, SLIDING], sliding_window=4096), dict),
    "sliding by max_window_layers, window null": (
        {**zlab(use_sliding_window=True, max_window_layers=1), "sliding_window": None}, zlab(), dict),
    "sliding layers, window not stated": (
        zlab(layer_types=[FULL, SLIDING], use_sliding_window=True),
        zlab(layer_types=[FULL, SLIDING], sliding_window=4096), dict),
    "a backbone without a usual window": (
        zlab(use_sliding_window=True, max_window_layers=1, model_type="llama", head_dim=16), zlab(), dict),
    "max_window_layers that no layer reaches": (
        zlab(use_sliding_window=True, sliding_window=6), zlab(), dict),
    "a window that use_sliding_window takes away": (
        zlab(layer_types=[SLIDING] * 2, sliding_window=6, use_sliding_window=False), zlab(is_causal=True), dict),
    "use_swa over a copied use_sliding_window": (
        zlab(use_sliding_window=False, **nested(use_swa=True, swa_window_size=6)),
        zlab(layer_types=[SLIDING] * 2, sliding_window=6, is_causal=False), dict),
    "sizes under text_config": (
        {"architectures": ["DFlashDraftModel"], "hidden_size": 9, **nested(),
         "text_config": {**zlab(dflash_config=None), "architectures": None}}, zlab(), dict),
    "yarn over max_position_embeddings": (
        zlab(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        zlab(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}), dict),
    "rope_interleave false": (zlab(rope_interleave=False), zlab(), dict),
    "logit_scale": (zlab(logit_scale=0.5), zlab(**nested(output_multiplier=0.5)), dict),
    "draft_vocab_size of the whole vocabulary": (zlab(draft_vocab_size=VOCAB), zlab(), dict),
    "gpt_oss-typed, biases promised but absent": (zlab(model_type="gpt_oss", attention_bias=True), zlab(), dict),
    "v_head_dim equal to head_dim": (zlab(v_head_dim=16), zlab(), dict),
    "SpecForge": (
        zlab(**nested(projector_type="dflash"), model_type="qwen3"), zlab(), prefixed("draft_model.")),
    "DeepSpec without its embedding and head": (
        deepspec(has_embed_tokens=False, has_lm_head=False),
        zlab(block_size=7, **nested(sample_from_anchor=True)), dict),
    "query_zero_predicts_next, nested": (
        zlab(**nested(query_zero_predicts_next=True)), zlab(**nested(sample_from_anchor=True)), dict),
    "query_zero_predicts_next beside sample_from_anchor": (
        zlab(query_zero_predicts_next=True, **nested(sample_from_anchor=True)),
        zlab(**nested(sample_from_anchor=True)), dict),
    "query_zero_predicts_next in DeepSpec's layout": (
        deepspec(**nested(query_zero_predicts_next=True)), zlab(block_size=7, **nested(sample_from_anchor=True)), dict),
    "query_zero_predicts_next in speculators' layout": (
        speculators(query_zero_predicts_next=True, sample_from_anchor="absent", speculators_config="absent"),
        zlab(**nested(sample_from_anchor=True)), dict),
    "speculators": (speculators(), zlab(), dict),
    "speculators, sample_from_anchor null": (speculators(sample_from_anchor=None), zlab(), dict),
    "speculators, no speculators_config": (speculators(speculators_config="absent"), zlab(), dict),
    "speculators, fewer tokens than the block has": (
        speculators(speculators_config={"proposal_methods": [{"speculative_tokens": 4}]}), zlab(block_size=5), dict),
    "speculators, Llama backbone with QK norm": (speculators({"model_type": "llama"}), zlab(), dict),
    "speculators, with the verifier's embedding": (speculators(), zlab(), plus(embed_tokens__weight=TABLE)),
    "speculators, the final layer tapped": (
        speculators(aux_hidden_state_layer_ids=[1, 4], num_target_layers=4),
        zlab(dflash_config={**TAPS, "target_layer_ids": [0, 3]}), dict),
    "speculators, causal sliding layers": (
        speculators(BOTH, sliding_window_non_causal=False), zlab(**BOTH), dict),
    "speculators, bidirectional sliding layers": (
        speculators(BOTH, sliding_window_non_causal=True), zlab(is_causal=False, **BOTH), dict),
    "speculators, is_causal copied from the verifier": (speculators({"is_causal": True}), zlab(), dict),
    "Muse: the window includes its end": (
        muse(), zlab(layer_types=[SLIDING] * 2, sliding_window=6, is_causal=False),
        SAME_TENSORS["encoder.fc and encoder.output_norm_enc"]),
    "Muse without layer_types": (
        muse(layer_types=None), zlab(layer_types=[SLIDING] * 2, sliding_window=6, is_causal=False), dict),
    "MLX-quantised under a prefix, with an override": (
        zlab(quantization={"bits": 4, "group_size": 32, "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32}}),
        zlab(quantization={"bits": 4, "group_size": 32}), chain(quantised, prefixed("model."))),
    "MLX-quantised and fused": (
        zlab(quantization={"bits": 4, "group_size": 32}), zlab(quantization={"bits": 4, "group_size": 32}),
        lambda weights: {name: w for kind in ("weight", "scales", "biases") for name, w in chain(QKV, GATE_UP)(
            {n: v for n, v in quantised(weights).items() if n.endswith(kind)}).items()}),
}  # fmt: skip

BIASES = {
    f"layers__{i}__self_attn__{part}_proj__bias": random(rows, seed=i)
    for i in range(2)
    for part, rows in (("q", 64), ("k", 32), ("v", 32))
}
OUT_BIASES = {f"layers__{i}__self_attn__o_proj__bias": random(64, seed=7 + i) for i in range(2)}
SINKS = {f"layers__{i}__self_attn__attention_sink_bias": random(4, seed=20 + i) for i in range(2)}
GATES = {f"layers__{i}__self_attn__g_proj__weight": random(4, 64, seed=30 + i, scale=0.3) for i in range(2)}
WIDE_GATES = {f"layers__{i}__self_attn__g_proj__weight": random(64, 64, seed=30 + i, scale=0.3) for i in range(2)}
TAP_NORMS = {f"aux_hidden_norms__{i}__weight": 1 + random(64, seed=40 + i, scale=0.2) for i in range(2)}
OWN = {"embed_tokens__weight": random(256, 64, seed=50), "lm_head__weight": random(256, 64, seed=51)}
KNOWN = mx.array([1, 2, 4, 8, 9, 40, 77, 200])  # target ids of a reduced vocabulary
MARKED = mx.array([token in KNOWN.tolist() for token in range(VOCAB)])  # t2d
SMALL = {"lm_head__weight": random(8, 64, seed=52), "d2t": KNOWN - mx.arange(8)}
MASK = {"mask_embedding": random(64, seed=53)}


def interleaved(weights: Tensors) -> Tensors:
    """Qwen3.5's q_proj: each head's query rows, then the rows of its gate."""
    out = dict(weights)
    for i in range(2):
        path = f"layers.{i}.self_attn."
        parts = [out[f"{path}q_proj.weight"], out.pop(f"{path}g_proj.weight")]
        out[f"{path}q_proj.weight"] = mx.stack([p.reshape(HEADS, DIM, HIDDEN) for p in parts], 1).reshape(-1, HIDDEN)
    return out


def as_it_is(weights: Tensors) -> Tensors:
    return weights


# name -> (config, weights by z-lab's names, how the files spell them, what `plain_logits` must know)
OTHER: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "Llama backbone, no QK norm": (
        speculators({"model_type": "llama"}), chain(without("q_norm"), without("k_norm")), as_it_is, {}),
    "gpt_oss-typed, biases found by name": (
        zlab(model_type="gpt_oss"), plus(**BIASES, **OUT_BIASES), as_it_is, {}),
    "biases of the inputs only": (zlab(), plus(**BIASES), as_it_is, {}),
    "biases, fused": (zlab(attention_bias=True), plus(**BIASES, **OUT_BIASES), QKV, {}),
    "partial rotary": (zlab(partial_rotary_factor=0.5), as_it_is, as_it_is, {"partial": (0.5, 0.5)}),
    "partial rotary in the section": (
        zlab(rope_theta=None, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
        as_it_is, as_it_is, {"partial": (0.25, 0.25)}),
    "rope by layer type": (
        zlab(**BOTH, rope_theta=None, rope_parameters={
            FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, SLIDING: {"rope_theta": 2e4}}),
        as_it_is, as_it_is,
        {"theta": (2e4, 5e5), "partial": (1.0, 0.5), "windows": (6, None), "causal": (True, False)}),
    "swa_rope_parameters": (
        zlab(**BOTH, swa_rope_parameters={"rope_theta": 2e4}), as_it_is, as_it_is,
        {"theta": (2e4, 1e4), "windows": (6, None), "causal": (True, False)}),
    "rope of neighbours (is_neox_style false)": (zlab(is_neox_style=False), as_it_is, as_it_is, {"neox": False}),
    "rope of neighbours (rope_interleave)": (zlab(rope_interleave=True), as_it_is, as_it_is, {"neox": False}),
    "rope of neighbours (in the section)": (
        zlab(rope_theta=None, rope_parameters={"rope_theta": 10000.0, "rope_interleaved": True}),
        as_it_is, as_it_is, {"neox": False}),
    "the anchor predicts (query_zero_predicts_next)": (
        zlab(query_zero_predicts_next=True), as_it_is, as_it_is, {"from_anchor": True}),
    "DeepSpec, only the head its own": (
        deepspec(), plus(lm_head__weight=OWN["lm_head__weight"]), as_it_is, {"from_anchor": True}),
    "attention sinks": (zlab(**nested(attention_sink_bias=True)), plus(**SINKS), as_it_is, {}),
    "a sink in one layer, found by name": (
        zlab(), plus(layers__1__self_attn__attention_sink_bias=random(4, seed=21)), as_it_is, {}),
    "causal sliding layers with sinks (nvidia)": (
        zlab(is_causal=True, layer_types=[SLIDING] * 2, sliding_window=6, **nested(attention_sink_bias=True)),
        plus(**SINKS), as_it_is, {"windows": (6, 6), "causal": (True, True)}),
    "scaled values": (zlab(**nested(attention_value_scale=0.612)), as_it_is, as_it_is, {"value_scale": 0.612}),
    "MiMo": (
        mimo(), plus(**SINKS, **MASK), as_it_is, {"partial": (0.5, 0.5), "windows": (6, 6), "value_scale": 0.612}),
    "Laguna": (
        laguna(), plus(**GATES, **TAP_NORMS), QKV,
        {"theta": (2e4, 2e4), "windows": (6, 6), "causal": (True, True), "gate": "softplus", "context_norm": True}),
    "Laguna, not causal, a gate for each element, sinks": (
        laguna(gating="per-element", **nested(causal=False)), plus(**WIDE_GATES, **TAP_NORMS, **SINKS),
        chain(QKV, renamed("attention_sink_bias", "sink"), prefixed("model.")),
        {"theta": (2e4, 2e4), "windows": (6, 6), "gate": "softplus", "context_norm": True}),
    "Laguna without a gate": (
        laguna(gating=False), plus(**TAP_NORMS), QKV,
        {"theta": (2e4, 2e4), "windows": (6, 6), "causal": (True, True), "context_norm": True}),
    "Qwen3.5's own layers": (
        zlab(model_type="qwen3_5_text"), plus(**WIDE_GATES), chain(interleaved, offset), {"gate": "sigmoid"}),
    "Qwen3.5's own layers, fused": (
        zlab(model_type="qwen3_5_text"), plus(**WIDE_GATES), chain(interleaved, offset, QKV), {"gate": "sigmoid"}),
    "a gated q_proj alone": (zlab(), plus(**WIDE_GATES), interleaved, {"gate": "sigmoid"}),
    "own embedding and head": (zlab(), plus(**OWN), as_it_is, {}),
    "own mask embedding": (zlab(), plus(**MASK), as_it_is, {}),
    "reduced vocabulary": (speculators(draft_vocab_size=8), plus(**SMALL), plus(t2d=MARKED), {}),
    "reduced vocabulary, soft-capped": (
        zlab(draft_vocab_size=8, final_logit_softcapping=3.0, **nested(output_multiplier=0.5)),
        plus(**SMALL), renamed("d2t", "draft_id_to_target_id"), {"cap": 3.0, "multiplier": 0.5}),
    "speculators, the anchor predicts": (
        speculators(sample_from_anchor=True, speculators_config={"proposal_methods": [{"speculative_tokens": 8}]}),
        as_it_is, as_it_is, {"from_anchor": True}),
    "DeepSpec": (deepspec(), plus(**OWN), as_it_is, {"from_anchor": True}),
    "target_hidden_size of its own": (
        zlab(target_hidden_size=80), plus(**OWN, fc__weight=random(64, 160, seed=60, scale=0.1)), as_it_is, {}),
    "bidirectional sliding window (use_swa)": (
        zlab(**nested(use_swa=True), sliding_window=6), as_it_is, as_it_is, {"windows": (6, 6)}),
    "Muse": (muse(), as_it_is, SAME_TENSORS["encoder.fc and encoder.output_norm_enc"], {"windows": (6, 6)}),
    "soft-cap, multiplier and embedding scale": (
        zlab(final_logit_softcapping=3.0, **nested(output_multiplier=0.5, input_embedding_scale=2.0)),
        as_it_is, as_it_is, {"cap": 3.0, "multiplier": 0.5, "scale": 2.0}),
}  # fmt: skip


# What can't be read --------------------------------------------------------------------------------

# name -> (config, how the tensors are spelled, what the error must name)
FAULTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "two prefixes at once": (zlab(), lambda w: {**w, "model.norm.weight": w["norm.weight"]}, "are both norm.weight"),
    "fused and split": (zlab(), lambda w: {**QKV(w), **w}, "q_proj.weight are both there"),
    "fused, of too few rows": (
        zlab(), lambda w: {n: v[:100] if "qkv" in n else v for n, v in QKV(w).items()}, "64 + 32 + 32"),
    "a gate that the config does not state": (zlab(), plus(**GATES), "g_proj"),
    "tap norms that the config does not state": (zlab(), plus(**TAP_NORMS), "aux_hidden_norms"),
    "a Laguna gate that is missing": (laguna(), plus(**TAP_NORMS), "g_proj.weight"),
    "a Laguna draft without tap norms": (laguna(), plus(**GATES), "aux_hidden_norms.0.weight"),
    "a Laguna draft with experts": (laguna(mlp_layer_types=["dense", "sparse"]), dict, "mlp_layer_types"),
    "a Laguna draft with other heads in a layer": (
        laguna(num_attention_heads_per_layer=[4, 8]), dict, "num_attention_heads_per_layer"),
    "a Laguna draft with a gate of another kind": (laguna(gating="per-layer"), dict, "gating"),
    "a Laguna draft without layer_types": (laguna(layer_types=None), dict, "layer_types"),
    "rope by layer type, one missing": (
        zlab(**BOTH, rope_theta=None, rope_parameters={FULL: {"rope_theta": 1e4}}), dict,
        "rope_parameters.sliding_attention"),
    "rope by layer type without a base": (
        zlab(rope_theta=None, rope_parameters={FULL: {"rope_type": "default"}}), dict, "rope_theta"),
    "too small a rotated part": (zlab(partial_rotary_factor=0.05), dict, "partial_rotary_factor"),
    "v_head_dim of its own": (zlab(v_head_dim=8), dict, "v_head_dim"),
    "sinks promised but absent": (zlab(**nested(attention_sink_bias=True)), dict, "attention_sink_bias"),
    "sinks for other heads": (
        zlab(), plus(layers__0__self_attn__attention_sink_bias=mx.ones((3,))), "attention_sink_bias has shape [3]"),
    "Qwen3.5 config without the gate": (zlab(model_type="qwen3_5"), dict, "use_gemma_norm"),
    "two spellings of taps that differ": (
        zlab(eagle_aux_hidden_state_layer_ids=[0, 2]), dict, "eagle_aux_hidden_state_layer_ids"),
    "the embedding as a tap": (
        zlab(dflash_config={"mask_token_id": 255}, eagle_aux_hidden_state_layer_ids=[0, 2]), dict,
        "eagle_aux_hidden_state_layer_ids"),
    "taps beyond the target": (speculators(aux_hidden_state_layer_ids=[1, 5], num_target_layers=4), dict,
                               "aux_hidden_state_layer_ids"),
    "taps for another fc": (speculators(aux_hidden_state_layer_ids=[1, 2, 3]), dict, "fc.weight"),
    "speculators without taps": (
        speculators(aux_hidden_state_layer_ids="absent"), dict, "aux_hidden_state_layer_ids: missing"),
    "speculators without a backbone": (speculators(transformer_layer_config={}), dict, "transformer_layer_config"),
    "speculators without a size": (
        speculators({"intermediate_size": None}), dict, "transformer_layer_config.intermediate_size"),
    "speculators without a block": (speculators(block_size="absent"), dict, "block_size"),
    "speculators with more tokens than the block has": (
        speculators(speculators_config={"proposal_methods": [{"speculative_tokens": 8}]}), dict, "speculative_tokens"),
    "speculators that do not say whether sliding layers are causal": (
        speculators(BOTH), dict, "sliding_window_non_causal"),
    "speculators of another method": (speculators(speculators_model_type="eagle3"), dict, "'eagle3'"),
    "speculators with DSpark": (speculators(speculators_model_type="dspark"), dict, "'dspark'"),
    "a reduced vocabulary without its map": (
        speculators(draft_vocab_size=8), plus(lm_head__weight=SMALL["lm_head__weight"]),
        "tensor d2t is missing, the map from draft ids to target ids"),
    "a reduced vocabulary without its head": (
        speculators(draft_vocab_size=8), plus(d2t=SMALL["d2t"]), "lm_head.weight"),
    "a head of another size": (speculators(draft_vocab_size=9), plus(**SMALL), "config.json asks for [9"),
    "a map that nobody asked for": (zlab(), plus(**SMALL), "draft_vocab_size"),
    "a map beyond the vocabulary": (zlab(draft_vocab_size=8), plus(**{**SMALL, "d2t": SMALL["d2t"] + 200}), "d2t"),
    "a map that names a token twice": (zlab(draft_vocab_size=8), plus(**{**SMALL, "d2t": -mx.arange(8)}), "d2t"),
    "a mask that marks nothing": (
        zlab(draft_vocab_size=8), plus(**SMALL, t2d=mx.zeros((VOCAB,), mx.bool_)), "t2d marks other target ids"),
    "a mask of another vocabulary": (
        zlab(draft_vocab_size=8), plus(**SMALL, model__t2d=MARKED[:250]), "model.t2d marks other target ids"),
    "a map of fractions": (
        zlab(draft_vocab_size=8), plus(**{**SMALL, "d2t": mx.ones((8,))}), "d2t is stored as F32"),
    "more draft tokens than target tokens": (zlab(draft_vocab_size=300), dict, "draft_vocab_size"),
    "a target of another width, embedding borrowed": (
        zlab(target_hidden_size=80), plus(fc__weight=mx.ones((64, 160))), "target_hidden_size"),
    "DSpark by its config": (zlab(**nested(projector_type="dspark")), dict, "projector_type"),
    "Domino by its config": (zlab(**nested(projector_type="domino")), dict, "projector_type"),
    "an unheard-of projector": (zlab(**nested(projector_type="prism")), dict, "projector_type"),
    "DeepSpec with a Markov head": (deepspec(markov_rank=256), dict, "markov_rank"),
    "DeepSpec with a confidence head": (deepspec(enable_confidence_head=True), dict, "enable_confidence_head"),
    "DeepSpec on Gemma": (deepspec(architectures=["Gemma4DSparkModel"]), dict, "architectures"),
    "DeepSpec with an embedding that is missing": (deepspec(has_embed_tokens=True), dict, "embed_tokens.weight"),
    "query_zero_predicts_next against sample_from_anchor": (
        zlab(query_zero_predicts_next=False, **nested(sample_from_anchor=True)), dict,
        "dflash_config.sample_from_anchor is True but query_zero_predicts_next is False"),
    "query_zero_predicts_next against DeepSpec's own": (
        deepspec(sample_from_anchor=False, query_zero_predicts_next=True), dict, "query_zero_predicts_next is True"),
    "query_zero_predicts_next of text": (zlab(query_zero_predicts_next="yes"), dict, "'yes' is not true or false"),
    "rope_interleave against is_neox_style": (
        zlab(rope_interleave=True, is_neox_style=True), dict, "is_neox_style is True but rope_interleave is True"),
    "use_sliding_window of text": (zlab(use_sliding_window="no"), dict, "use_sliding_window"),
    "max_window_layers of text": (
        zlab(use_sliding_window=True, sliding_window=6, max_window_layers="1"), dict, "max_window_layers"),
    "LiLiCorr by its config": (zlab(**nested(projector_type="lilicorr")), dict, "projector_type: a LiLiCorr draft"),
    "LiLiCorr by its name": (zlab(architectures=["LiLiCorrDraftModel"]), dict, "architectures: a LiLiCorr draft"),
    "LiLiCorr by its tensors": (zlab(), plus(lilicorr__in_proj__weight=TABLE), "a LiLiCorr draft"),
    "latent attention by its mode": (zlab(attention_mode="mla"), dict, "attention_mode: 'mla' is not supported"),
    "labels of the Domino projector": (zlab(**nested(shift_label=True)), dict, "shift_label"),
    "latent attention": (zlab(draft_attention_type="mla"), dict, "draft_attention_type"),
    "Muse without a window": (muse(sliding_window=None), dict, "sliding_window"),
    "logit_scale against output_multiplier": (
        zlab(logit_scale=2.0, **nested(output_multiplier=0.5)), dict, "logit_scale"),
    "a mask embedding of another width": (zlab(), plus(mask_embedding=mx.ones((32,))), "mask_embedding has shape [32]"),
}  # fmt: skip
