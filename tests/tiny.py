"""Tiny real models: mlx-lm targets and random drafts for them, small enough to run by the dozen on a CPU."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.draft import DFlash2DraftModel, DFlashDraftModel

VOCAB = 256
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "qwen3-untied": {"head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": False},
    "qwen3-wide": {"head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": False, "num_experts": 8,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def target_config(family: str, layers: int = 4, vocab: int = VOCAB, hidden: int = 64) -> dict[str, Any]:
    """A `config.json` of an mlx-lm target."""
    return {
        "model_type": family.partition("-")[0], "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "vocab_size": vocab, "rope_theta": 10000.0, **TARGETS[family],
    }  # fmt: skip


# Families whose caches are more than rows of keys and values, by mlx-lm module.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
            "vocab_size": 256, "rope_theta": 10000.0, "max_position_embeddings": 4096, "full_attention_interval": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
            "partial_rotary_factor": 0.5, "num_experts": 0, "num_experts_per_tok": 0,
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 24,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 256,
        "rope_theta": 10000.0, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def make_hybrid(module: str, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """A random target of one of `HYBRIDS`."""
    source = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(seed)
    return randomised(source.Model(source.ModelArgs.from_dict(copy.deepcopy(HYBRIDS[module]))), dtype)


def make_target(family: str = "qwen3", dtype: mx.Dtype = mx.float32, seed: int = 0, **sizes: int) -> nn.Module:
    """A random target with logits that differ enough to have a clear best token."""
    config = target_config(family, **sizes)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    return randomised(model, dtype)


def draft_config(**changes: Any) -> dict[str, Any]:
    """A draft's `config.json` for the tiny targets; a value of None removes the key."""
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "block_size": 8, "num_target_layers": 4, "attention_bias": False, "hidden_act": "silu",
        "dtype": "float32", "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 255},
    }  # fmt: skip
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def make_draft(dtype: mx.Dtype = mx.float32, seed: int = 1, **changes: Any) -> DFlashDraftModel:
    """A random draft."""
    mx.random.seed(seed)
    return randomised(DFlashDraftModel(parse_config(draft_config(**changes))), dtype)


def draft2_config(kernel: int = 2, group: int = 16, rank: int = 8, top_k: int = 12, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a DFlash 2 draft for the tiny targets."""
    sizes = {"conv_kernel_size": kernel, "conv_group_size": group, "selector_rank": rank, "selector_top_k": top_k}
    config = draft_config(architectures=["DFlash2DraftModel"], **changes)
    return config | {"dflash_config": config["dflash_config"] | sizes}


def make_draft2(dtype: mx.Dtype = mx.float32, seed: int = 1, **changes: Any) -> DFlash2DraftModel:
    """A random DFlash 2 draft."""
    mx.random.seed(seed)
    return randomised(DFlash2DraftModel(parse_config(draft2_config(**changes))), dtype)


def save_draft(folder: Path, draft: DFlashDraftModel, config: dict[str, Any] | None = None) -> Path:
    """Write a draft as z-lab publishes it."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(draft.parameters())), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or draft.config.to_dict()))
    return folder


def save_target(folder: Path, model: nn.Module, config: dict[str, Any]) -> Path:
    """Write a target in mlx-lm's format, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def randomised(model: Any, dtype: mx.Dtype) -> Any:
    """Weights of a size at which every layer matters; norms near one."""
    weights = []
    for name, array in tree_flatten(model.parameters()):
        noise = mx.random.normal(array.shape)
        weights.append((name, 1 + 0.1 * noise if array.ndim == 1 else noise * array.shape[-1] ** -0.5 * 1.5))
    model.load_weights(weights)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model
