"""Drafts of llama.cpp: GGUF files of its architecture `dflash`, as z-lab's config and tensor names.

Parsing and dequantising are the `gguf` package's; here are the names and the facts.

Source: llama.cpp, `src/models/dflash.cpp` and `conversion/qwen.py` (`DFlashModel`); the package (0.19.0) does not
list this architecture. Rotary pairs are halves there as in z-lab's (no permutation of q and k), norms are stored as
they are, and `dflash.target_layers` counts the input of a layer: one more than z-lab's `target_layer_ids`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import DraftError
from .fields import MAX_SIZE, brief
from .gguf_counts import check_counts
from .headers import FLOATS, MAX_DIMENSIONS, TensorInfo, regular_files

ARCHITECTURE = "dflash"
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


def config(file: Path) -> dict[str, Any]:
    """The facts of a draft as z-lab's `config.json` states them.

    Raises `DraftError` for another architecture, or a fact that is missing or contradicts another.
    """
    facts = _Facts(file)
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
        "dtype": {"F32": "float32", "BF16": "bfloat16"}[_dtype(facts.reader)],
        "dflash_config": {name: value for name, value in nested.items() if value is not None},
    }
    head = found["head_dim"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := facts.get(f"{ARCHITECTURE}.{key}", False)) not in (None, head):
            raise facts.error(
                f"{ARCHITECTURE}.{key}", f"{brief(size)} differs from key_length {head}, which is not read"
            )
    return {name: value for name, value in found.items() if value is not None}


def file_headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file under z-lab's names, in the dtype that `load_file` gives."""
    reader = _open(file)
    dtype = _dtype(reader)
    return {name: TensorInfo(dtype, _shape(tensor), file) for name, tensor in _tensors(file).items()}


def load_file(file: Path) -> Mapping[str, mx.array]:
    """The tensors of a file under z-lab's names, each dequantised when it is looked up."""
    return _GgufFile(_tensors(file), FLOATS[_dtype(_open(file))])


class _GgufFile(Mapping[str, mx.array]):
    def __init__(self, tensors: Mapping[str, Any], dtype: mx.Dtype):
        self.tensors, self.dtype = tensors, dtype

    def __getitem__(self, name: str) -> mx.array:
        import gguf

        tensor = self.tensors[name]
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        return mx.array(data).reshape(_shape(tensor)).astype(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class _Facts:
    """Typed look-ups in the metadata; every error names key and file."""

    def __init__(self, file: Path):
        self.file, self.reader = file, _open(file)

    def error(self, key: str, problem: str) -> DraftError:
        return DraftError(f"{self.file}: {key}: {problem}")

    def get(self, key: str, needed: bool = True) -> Any:
        field = self.reader.get_field(key)
        if field is not None:
            return field.contents()
        if needed:
            raise self.error(key, "missing; the draft can't be run without it")
        return None


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
    stated = facts.get(f"{ARCHITECTURE}.vocab_size", False)
    tokens = facts.reader.get_field("tokenizer.ggml.tokens")
    size = stated if stated is not None else len(tokens.data) if tokens is not None else None
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


def _tensors(file: Path) -> dict[str, Any]:
    """The package's tensors under z-lab's names; one without such a name is refused."""
    found = {}
    for tensor in _open(file).tensors:
        layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(.+)", tensor.name)
        name = LAYER_TENSORS.get(layer[2]) if layer else TENSORS.get(tensor.name)
        if name is None:
            other = next((what for part, what in OTHER_TENSORS.items() if part in tensor.name), None)
            raise DraftError(f"{file}: {other or 'not a draft that is read'} (it has {brief(tensor.name)})")
        found[f"layers.{layer[1]}.{name}" if layer else name] = tensor
    return found


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape.tolist()))


def _dtype(reader: Any) -> str:
    """bfloat16, as drafts are trained (float16 overflows in them), unless the file has the matrices in float32."""
    import gguf

    matrices = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) == 2}
    return "F32" if matrices == {gguf.GGMLQuantizationType.F32} else "BF16"


def _open(file: Path) -> Any:
    stat = file.stat()
    return _reader(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)  # parsing takes seconds where a tokenizer is in the file
def _reader(file: Path, *_stamp: int) -> Any:
    """The package's reader of a file that is a DFlash draft."""
    try:
        import gguf
    except ImportError:
        raise DraftError(f"{file}: GGUF needs the gguf package: pip install 'dflash-mlx[gguf]'") from None
    check_counts(file)
    try:
        reader = gguf.GGUFReader(file)
        names = {name: field.contents() for name in ("general.architecture", "split.count")
                 if (field := reader.get_field(name)) is not None}  # fmt: skip
    except Exception as error:  # a damaged file may raise anything that indexing can
        raise DraftError(f"{file}: not a GGUF file, or damaged ({type(error).__name__}: {brief(str(error))})") from None
    architecture = names.get("general.architecture")
    if architecture != ARCHITECTURE:
        what = FORKS.get(str(architecture), "not a DFlash draft; a target goes to --model, in mlx-lm's format")
        raise DraftError(f"{file}: general.architecture {brief(architecture)}: {what}")
    if names.get("split.count", 1) > 1:
        raise DraftError(f"{file}: one part of {names['split.count']}; merge them with llama-gguf-split")
    for tensor in reader.tensors:
        if len(tensor.shape) > MAX_DIMENSIONS or not all(0 < n <= MAX_SIZE for n in tensor.shape.tolist()):
            raise DraftError(f"{file}: {brief(tensor.name)} has an impossible shape; the file is damaged")
    return reader
