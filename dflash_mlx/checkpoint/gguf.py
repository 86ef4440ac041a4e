"""Drafts of llama.cpp: GGUF files of its architecture `dflash`, as z-lab's config and tensor names.

Names and facts; the file itself is `gguf_file`'s, dequantising the `gguf` package's.

Source: llama.cpp, `src/models/dflash.cpp` and `conversion/qwen.py` (`DFlashModel`); the package (0.19.0) does not
list this architecture. Rotary pairs are halves there as in z-lab's (no permutation of q and k), norms are stored as
they are, and `dflash.target_layers` counts the input of a layer: one more than z-lab's `target_layer_ids`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import DraftError
from .fields import MAX_SIZE, brief
from .folder import regular_files
from .gguf_file import GgufFile, Tensor, read
from .tensor_info import FLOATS, TensorInfo

SUFFIXES = (".gguf",)
ARCHITECTURE = "dflash"
F32 = 0  # as ggml numbers its types
FORKS = {
    name: f"`{name}` is the schema of a fork, which llama.cpp itself does not read; get the draft as `dflash`, "
    "or the original safetensors"
    for name in ("dflash-draft", "gemma4-dflash-draft", "qwen35-dflash-draft")
}
FORKS["dspark"] = "a DSpark draft of a fork; get the original safetensors"

TENSORS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
# What a tensor that no DFlash draft has tells about the file.
OTHER_TENSORS = {
    "markov_": "a DSpark draft in GGUF, which is not read; get the original safetensors",
    "conf_proj": "a DSpark draft in GGUF, which is not read; get the original safetensors",
    "log_snr": "a DSpark draft in GGUF, which is not read; get the original safetensors",
    "hc_": "a DeepSeek-V4 DSpark draft, which is not read",
    "attn_sinks": "a draft with attention sinks, which are not read from GGUF",
    "d2t": "a draft with a reduced vocabulary, which is not read from GGUF; get the original safetensors",
    "token_embd": "a draft with its own embedding, which is not read from GGUF; get the original safetensors",
    "output.weight": "a draft with its own head, which is not read from GGUF; get the original safetensors",
}

# z-lab's field -> key after the architecture, and whether a draft can do without
CONFIG: dict[str, tuple[str, bool]] = {
    "hidden_size": ("embedding_length", True),
    "num_hidden_layers": ("block_count", True),
    "num_attention_heads": ("attention.head_count", True),
    "num_key_value_heads": ("attention.head_count_kv", True),
    "head_dim": ("attention.key_length", False),
    "intermediate_size": ("feed_forward_length", True),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", True),
    "rope_theta": ("rope.freq_base", True),
    "max_position_embeddings": ("context_length", False),
    "target_hidden_size": ("target_hidden_size", False),
    "is_causal": ("attention.causal", False),
    "final_logit_softcapping": ("final_logit_softcapping", False),
}
NESTED: dict[str, tuple[str, bool]] = {
    "block_size": ("block_size", True),
    "output_multiplier": ("logit_scale", False),
    "conv_kernel_size": ("conv_kernel_size", False),
    "conv_group_size": ("conv_group_size", False),
    "selector_rank": ("selector_rank", False),
    "selector_top_k": ("selector_top_k", False),
}
MASK_KEYS = ("tokenizer.ggml.mask_token_id", f"{ARCHITECTURE}.mask_token_id")


def find(folder: Path) -> Path | None:
    """The one GGUF file of a folder, None where there is none."""
    files = regular_files(folder, "*.gguf")
    if len(files) > 1:
        raise DraftError(f"{folder}: {len(files)} GGUF files ({brief([f.name for f in files])}); keep one in a folder")
    return files[0] if files else None


def weight_files(folder: Path) -> list[Path]:
    """The one GGUF file of a folder, in a list; none where there is none."""
    return [file] if (file := find(folder)) else []


def config(path: Path) -> dict[str, Any]:
    """The facts of a draft as z-lab's `config.json` states them.

    Raises `DraftError` for another architecture, or a fact that is missing or contradicts another.
    """
    facts = _Facts(_open(path))
    found = {name: facts.get(f"{ARCHITECTURE}.{key}", needed) for name, (key, needed) in CONFIG.items()}
    nested = {name: facts.get(f"{ARCHITECTURE}.{key}", needed) for name, (key, needed) in NESTED.items()}
    nested["target_layer_ids"] = _taps(facts)
    nested["mask_token_id"] = _mask_token(facts)
    second = nested["selector_top_k"] is not None
    found |= _sliding(facts, found["num_hidden_layers"])
    found |= {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": _vocab_size(facts),
        "rope_scaling": _rope_scaling(facts),
        "dtype": {"F32": "float32", "BF16": "bfloat16"}[_dtype(facts.file)],
        "dflash_config": {name: value for name, value in nested.items() if value is not None},
    }
    head = found["head_dim"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := facts.get(f"{ARCHITECTURE}.{key}", False)) not in (None, head):
            raise facts.error(
                f"{ARCHITECTURE}.{key}", f"{brief(size)} differs from key_length {head}, which is not read"
            )
    return {name: value for name, value in found.items() if value is not None}


def file_headers(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file under z-lab's names, in the dtype that `load_file` gives."""
    file = _open(path)
    return {name: TensorInfo(_dtype(file), tensor.shape, path) for name, tensor in _tensors(file).items()}


def load_file(path: Path) -> Mapping[str, mx.array]:
    """The tensors of a file under z-lab's names, each dequantised when it is looked up."""
    return _Arrays(_open(path))


class _Arrays(Mapping[str, mx.array]):
    def __init__(self, file: GgufFile):
        self.file, self.tensors, self.dtype = file, _tensors(file), FLOATS[_dtype(file)]

    def __getitem__(self, name: str) -> mx.array:
        return mx.array(self.file.numbers(self.tensors[name])).astype(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class _Facts:
    """Look-ups in the metadata; every error names key and file."""

    def __init__(self, file: GgufFile):
        self.file = file

    def error(self, key: str, problem: str) -> DraftError:
        return DraftError(f"{self.file.path}: {key}: {problem}")

    def get(self, key: str, needed: bool = True) -> Any:
        if needed and key not in self.file.keys:
            raise self.error(key, "missing; the draft can't be run without it")
        return self.file.keys.get(key)


def _taps(facts: _Facts) -> list[int]:
    key = f"{ARCHITECTURE}.target_layers"
    layers = facts.get(key)
    if not isinstance(layers, list) or not all(type(layer) is int and 0 < layer < MAX_SIZE for layer in layers):
        raise facts.error(key, f"{brief(layers)} is not a list of layer numbers from 1")
    return [layer - 1 for layer in layers]


def _mask_token(facts: _Facts) -> int:
    found = {key: value for key in MASK_KEYS if (value := facts.get(key, False)) is not None}
    if len(set(found.values())) > 1:
        raise facts.error(MASK_KEYS[0], f"conflicting values {found}; keep the one the draft was trained with")
    return next(iter(found.values())) if found else facts.get(MASK_KEYS[0])


def _vocab_size(facts: _Facts) -> int:
    """There is no embedding in the file: the size is stated, or that of the target's tokenizer that was copied in."""
    size = facts.get(f"{ARCHITECTURE}.vocab_size", False) or facts.file.lengths.get("tokenizer.ggml.tokens")
    if size is None:
        raise facts.error(
            "tokenizer.ggml.tokens",
            "missing, so the size of the vocabulary is unknown; convert the draft with its target's tokenizer "
            "(--target-model-dir), or get the original safetensors",
        )
    return size


def _sliding(facts: _Facts, layers: int) -> dict[str, Any]:
    window = facts.get(f"{ARCHITECTURE}.attention.sliding_window", False)
    if not window:
        return {}
    key = f"{ARCHITECTURE}.attention.sliding_window_pattern"
    pattern = facts.get(key)
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise facts.error(key, f"expected one entry for each of {brief(layers)} layers, found {brief(pattern)}")
    types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"sliding_window": window, "layer_types": types}


def _rope_scaling(facts: _Facts) -> dict[str, Any] | None:
    prefix = f"{ARCHITECTURE}.rope.scaling"
    kind = facts.get(f"{prefix}.type", False)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise facts.error(f"{prefix}.type", f"{brief(kind)} is not read (known: none, linear, yarn)")
    found = {"rope_type": kind, "factor": facts.get(f"{prefix}.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = facts.get(f"{prefix}.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            found[name] = facts.get(f"{prefix}.yarn_{name}", False)
    return found


def _tensors(file: GgufFile) -> dict[str, Tensor]:
    """The tensors under z-lab's names; one without such a name is refused."""
    found = {}
    for tensor in file.tensors:
        layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(.+)", tensor.name)
        name = LAYER_TENSORS.get(layer[2]) if layer else TENSORS.get(tensor.name)
        if name is None:
            other = next((what for part, what in OTHER_TENSORS.items() if part in tensor.name), None)
            raise DraftError(f"{file.path}: {other or 'not a draft that is read'} (it has {brief(tensor.name)})")
        found[f"layers.{layer[1]}.{name}" if layer else name] = tensor
    return found


def _dtype(file: GgufFile) -> str:
    """bfloat16, as drafts are trained (float16 overflows in them), unless the file has the matrices in float32."""
    return "F32" if {tensor.kind for tensor in file.tensors if len(tensor.shape) == 2} == {F32} else "BF16"


def _open(path: Path) -> GgufFile:
    """A file that is a DFlash draft, whole."""
    file = read(path)
    architecture = file.keys.get("general.architecture")
    if architecture != ARCHITECTURE:
        what = FORKS.get(str(architecture), "not a DFlash draft; a target goes to --model, in mlx-lm's format")
        raise DraftError(f"{path}: general.architecture {brief(architecture)}: {what}")
    if (parts := file.keys.get("split.count", 1)) != 1:
        raise DraftError(f"{path}: one part of {brief(parts)}; merge them with llama-gguf-split")
    return file
