"""The facts of a draft from its published config, of any layout, validated.

A layout is brought into z-lab's by `layouts.py`, each fact is read by `reading.py`. Knows no tensor, no target and no
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..draft.config import FULL, SLIDING, DraftConfig
from . import reading
from .fields import MAX_SIZE, Fields
from .layouts import in_zlab
from .ropes import SECTIONS, read_ropes

MAX_LAYERS = 1024  # far beyond any draft; a damaged count must not build layers for ever


def parse_config(config: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
    """Read a published config of any layout; `source` is the file named in errors.

    Raises:
        DraftError: a fact is missing, contradicts itself, is out of range, or belongs to another method.
    """
    read = Fields(*in_zlab(config, source))
    reading.refuse_foreign(read)
    hidden = read.positive("hidden_size")
    layers = read.positive("num_hidden_layers", MAX_LAYERS)
    heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_key_value_heads")
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = reading.head_dim(read, hidden, heads)
    layer_types, window, causal = reading.attention(read, layers)
    rope, sliding_rope = read_ropes(read, layer_types, FULL, SLIDING, head_dim)
    vocab = read.positive("vocab_size")
    target_layers = read.optional_int("num_target_layers")
    target_hidden = read.optional_int("target_hidden_size")
    taps = reading.taps(read, target_layers)
    if len(taps) * (target_hidden or hidden) > MAX_SIZE:
        raise read.error("target_layer_ids", f"{len(taps)} taps of width {target_hidden or hidden} are too many")
    from_anchor = read.flag("sample_from_anchor")
    gating, activation = reading.gate(read)
    bias = read.flag("attention_bias")
    return DraftConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        vocab_size=vocab,
        rms_norm_eps=read.number("rms_norm_eps"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        partial_rotary_factor=rope.partial,
        sliding_rope=None if sliding_rope == rope else sliding_rope,
        is_neox_style=read.flag("is_neox_style", True, *SECTIONS),
        block_size=reading.block_size(read, from_anchor),
        mask_token_id=reading.mask_token(read, vocab),
        target_layer_ids=taps,
        layer_types=layer_types,
        sliding_window=window,
        is_causal=causal,
        max_position_embeddings=read.optional_int("max_position_embeddings"),
        num_target_layers=target_layers,
        target_hidden_size=target_hidden,
        attention_bias=bias,
        attention_output_bias=read.flag("attention_output_bias", bias),
        final_logit_softcapping=read.optional_number("final_logit_softcapping", zero_is_off=True),
        input_embedding_scale=read.optional_number("input_embedding_scale") or 1.0,
        output_multiplier=read.optional_number("output_multiplier") or 1.0,
        draft_vocab_size=reading.draft_vocab(read, vocab),
        sample_from_anchor=from_anchor,
        taps_before_norm=reading.taps_before_norm(read, taps, target_layers),
        attention_sink_layers=reading.sinks(read, layers),
        attention_value_scale=read.optional_number("attention_value_scale") or 1.0,
        qk_norm=reading.qk_norm(read),
        gating=gating,
        gate_activation=activation,
        aux_hidden_norms=read.flag("aux_hidden_norms"),
        context_layernorm=read.flag("context_layernorm"),
        has_embed_tokens=read.flag("has_embed_tokens"),
        has_lm_head=read.flag("has_lm_head"),
        mask_embedding=read.flag("mask_embedding"),
        offset_norms=reading.offset_norms(read),
        **reading.dflash2(read, hidden, vocab),
        dtype=reading.dtype(read),
        quantization=read.optional("quantization", dict) or read.optional("quantization_config", dict),
    )
