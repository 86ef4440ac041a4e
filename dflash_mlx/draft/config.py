"""The facts of one DFlash draft, typed.

Knows how z-lab's layout spells them, which is what it writes; `checkpoint/facts.py` reads them.
Knows no tensor and no target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
PER_HEAD, PER_ELEMENT = "per-head", "per-element"
GATE_ACTIVATIONS = ("softplus", "sigmoid")
# What a DFlash 2 draft has besides; a draft with one of them needs all.
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Of the fields that `to_dict` writes where they are unusual, those that z-lab's own code passes over.
READ_HERE_ONLY = (
    "draft_vocab_size", "partial_rotary_factor", "is_neox_style", "swa_rope_parameters", "use_gemma_norm",
    "sample_from_anchor", "attention_value_scale", "attention_output_bias", "attention_sink_layers", "qk_norm",
    "gating", "aux_hidden_norms", "context_layernorm", "has_embed_tokens", "has_lm_head", "mask_embedding",
)  # fmt: skip


@dataclass(frozen=True)
class DraftConfig:
    """One draft. Sizes are in elements, positions and windows in tokens.

    Source of the first fields: z-lab's DFlash `config.json`; `to_dict` writes that layout. What that layout has no word
    for, from `attention_output_bias` on, stands in its `dflash_config` under these names.

    Attributes:
        block_size: slots of a block as trained, the anchor first.
        sample_from_anchor: whether slot i predicts the token after it, so that the anchor's slot predicts as well;
            otherwise it predicts the token at it and the anchor's slot predicts nothing.
        taps_before_norm: whether a tap of the target's last layer is that layer's own output (vLLM, `speculators`);
            otherwise it is the normed one, as in transformers' hidden states. False where no tap can be the last layer.
        sliding_rope: rope of the sliding layers where it differs from the full layers'.
        is_neox_style: whether rope rotates halves of a head; otherwise neighbours.
        draft_vocab_size: rows of the draft's own head where it knows fewer tokens than the target.
        has_embed_tokens, has_lm_head: whether the draft has its own instead of the target's.
        mask_embedding: whether the mask token has an embedding of its own.
        qk_norm, attention_bias, attention_output_bias: what attention has; the bias of the latter is `o_proj`'s.
        attention_sink_layers: layers whose softmax has one more, learnt, entry a head.
        attention_value_scale: what values are multiplied with.
        gating: width of a gate on attention's output, "per-head" or "per-element"; gate_activation: its function.
        aux_hidden_norms: whether each tap is normed before `fc`.
        context_layernorm: whether a layer norms the context feature with its `input_layernorm` too.
        offset_norms: whether the files hold norm weights minus one; None: only the tensors can tell.
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
    partial_rotary_factor: float = 1.0
    sliding_rope: Rope | None = None
    is_neox_style: bool = True
    max_position_embeddings: int | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    taps_before_norm: bool = False
    attention_sink_layers: tuple[int, ...] = ()
    attention_value_scale: float = 1.0
    attention_output_bias: bool = False
    qk_norm: bool = True
    gating: str | None = None
    gate_activation: str = "softplus"
    aux_hidden_norms: bool = False
    context_layernorm: bool = False
    has_embed_tokens: bool = False
    has_lm_head: bool = False
    mask_embedding: bool = False
    offset_norms: bool | None = False
    conv_kernel_size: int = 0  # this and the next three: 0 in a DFlash (v1) draft
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    dtype: str | None = None
    quantization: dict[str, Any] | None = None

    @property
    def context_width(self) -> int:
        """Columns of `fc`: taps times the width of the target's hidden state."""
        return len(self.target_layer_ids) * self.tap_size

    @property
    def tap_size(self) -> int:
        """Width of the target's hidden state."""
        return self.target_hidden_size or self.hidden_size

    @property
    def widest_block(self) -> int:
        """Slots of the widest block that the target verifies: the anchor and all proposals."""
        return self.block_size + self.sample_from_anchor

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

    @property
    def rope(self) -> Rope:
        """Rope of the layers that have none of their own."""
        return Rope(self.rope_theta, self.rope_scaling, self.partial_rotary_factor)

    def to_dict(self) -> dict[str, Any]:
        """The draft in z-lab's own layout (plus mlx-lm's `quantization`), which every DFlash engine reads.

        Facts that few drafts have are written only where they differ from the rest.
        """
        config: dict[str, Any] = {
            "architectures": ["DFlash2DraftModel" if self.kind == "dflash2" else "DFlashDraftModel"],
            "model_type": "qwen3_5" if self.offset_norms is None else "qwen3",
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
        config["use_sliding_window"] = self.sliding_window is not None  # without it transformers drops the window
        for name in (
            "rope_scaling", "max_position_embeddings", "num_target_layers", "target_hidden_size", "is_causal",
            "dtype", "final_logit_softcapping", "quantization", "draft_vocab_size",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                config[name] = getattr(self, name)
        usual: dict[str, Any] = {"partial_rotary_factor": 1.0, "is_neox_style": True}
        config.update({name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value})
        if self.sliding_rope is not None:
            config["swa_rope_parameters"] = self.sliding_rope.to_dict()
        if self.offset_norms:
            config["use_gemma_norm"] = True
        nested: dict[str, Any] = {
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
        }
        usual = {
            "input_embedding_scale": 1.0, "output_multiplier": 1.0, "sample_from_anchor": False,
            "taps_before_norm": False, "attention_value_scale": 1.0, "attention_output_bias": self.attention_bias,
            "qk_norm": True, "gating": None, "gate_activation": "softplus", "aux_hidden_norms": False,
            "context_layernorm": False, "has_embed_tokens": False, "has_lm_head": False, "mask_embedding": False,
        }  # fmt: skip
        nested.update({name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value})
        if self.kind == "dflash2":
            nested.update({name: getattr(self, name) for name in DFLASH2_FIELDS})
        if self.attention_sink_layers:
            nested["attention_sink_bias"] = True
            nested["attention_sink_layers"] = list(self.attention_sink_layers)
        config["dflash_config"] = nested
        if self.quantization is not None:
            config["quantization_config"] = self.quantization  # the hub's model tree reads this spelling
        return config
