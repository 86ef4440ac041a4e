"""The tensors of a draft folder: headers first, checked against the config, then loaded.

Headers alone answer every question about names, shapes and sizes, so a wrong or broken folder is refused
before anything heavy is read. Knows z-lab's layout and its MLX-quantised form; knows no hub and no target.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..errors import DraftError
from . import gguf
from .compute_dtype import compute_dtype
from .config import DraftConfig
from .fields import brief, read_json
from .headers import FLOATS, TensorInfo, check_folder, load_file, read_headers, weight_files
from .model import DFlashDraftModel

PACKED = ("U32", "U8")  # quantised matrices, and the scales of mxfp4 and its like

# MLX's quantisation modes -> their bits and group sizes; the first of each is mlx-lm's default
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}

# What a tensor name that no DFlash (v1) draft has tells about the folder, most telling first.
FOREIGN_TENSORS = {
    "candidate_selector.": "a DFlash 2 draft: only DFlash (v1) drafts are read yet",
    "attention_conv.": "a DFlash 2 draft: only DFlash (v1) drafts are read yet",
    "mlp_conv.": "a DFlash 2 draft: only DFlash (v1) drafts are read yet",
    "markov_head.": "a DSpark draft, which is not supported",
    "confidence_head.": "a DSpark draft, which is not supported",
    "d2t": "a `speculators` draft with a reduced vocabulary: this layout is not read yet",
    "t2d": "a `speculators` draft with a reduced vocabulary: this layout is not read yet",
    "g_proj": "a Laguna draft with gated attention: this layout is not read yet",
    "aux_hidden_norms.": "a Laguna draft: this layout is not read yet",
    "encoder.": "a Muse assistant draft: this layout is not read yet",
    "weight_scale": "a draft quantised by another tool (fp8, nvfp4 or compressed-tensors): not read yet",
    "lm_head.": "a draft with its own head: this layout is not read yet",
    "embed_tokens.": "a draft with its own embedding, or a target: neither is read as a draft",
}


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a draft of this config has, unquantised; nothing is allocated."""
    skeleton = DFlashDraftModel(config)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(skeleton.parameters()))
    return {name: tuple(array.shape) for name, array in parameters}


@dataclass(frozen=True)
class Quantized:
    """How one matrix is stored: bits and group size follow from the shapes, the mode from the config."""

    bits: int
    group_size: int
    mode: str


def check_tensors(
    config: DraftConfig, tensors: Mapping[str, TensorInfo], folder: Path
) -> tuple[DraftConfig, dict[str, Quantized]]:
    """Check names and shapes of a folder against its config.

    Returns:
        The config with `attention_bias` as the tensors have it, and the quantised modules by path.

    Raises:
        DraftError: a tensor is missing, unknown, of the wrong shape or of a dtype MLX can't read.
    """
    if not config.attention_bias or not any(name.endswith("_proj.bias") for name in tensors):
        config = config.with_bias(any(name.endswith("self_attn.q_proj.bias") for name in tensors))
    expected = expected_shapes(config)
    _refuse_foreign(tensors, expected)
    quantized: dict[str, Quantized] = {}
    seen = set()
    for name, info in tensors.items():
        path, _, kind = name.rpartition(".")
        if info.dtype not in (*FLOATS, *PACKED):
            raise DraftError(f"{info.file}: {name} is stored as {info.dtype}, which is not read yet")
        matrix = expected.get(f"{path}.weight", ())
        if f"{path}.scales" in tensors and len(matrix) == 2:
            if kind == "weight":
                quantized[path] = _quantized(config, tensors, path, matrix)
            elif kind not in ("scales", "biases"):
                _match(name, info, expected)
        else:
            _match(name, info, expected)
        seen.add(name)
    if missing := [name for name in expected if name not in seen]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DraftError(f"{folder}: tensor {missing[0]}{more} is missing; the download may be incomplete")
    return config, quantized


def _refuse_foreign(tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> None:
    unknown = [name for name in tensors if name not in expected]
    for part, meaning in FOREIGN_TENSORS.items():
        if name := next((name for name in unknown if part in name), None):
            raise DraftError(f"{tensors[name].file}: this is {meaning} (it has {brief(name)})")


def _match(name: str, info: TensorInfo, expected: Mapping[str, tuple[int, ...]]) -> None:
    if name not in expected:
        raise DraftError(f"{info.file}: unknown tensor {brief(name)}; this is not a draft of the z-lab layout")
    if info.dtype not in FLOATS:
        raise DraftError(
            f"{info.file}: {name} is stored as {info.dtype}, without the scales that a quantised matrix needs"
        )
    if info.shape != expected[name]:
        raise DraftError(
            f"{info.file}: {name} has shape {list(info.shape)}, config.json asks for {list(expected[name])}"
        )


def _quantized(config: DraftConfig, tensors: Mapping[str, TensorInfo], path: str, shape: tuple[int, ...]) -> Quantized:
    weight, scales, biases = (tensors.get(f"{path}.{kind}") for kind in ("weight", "scales", "biases"))
    assert weight is not None
    assert scales is not None
    section = config.quantization or {}
    own = section.get(path)
    mode = (own if isinstance(own, Mapping) else section).get("mode") or ("affine" if biases else None)
    if mode is None:
        raise DraftError(f"{weight.file}: {path} has no biases and config.json no quantization mode")
    if not isinstance(mode, str) or mode not in MODES:
        raise DraftError(f"{weight.file}: {path}: quantization mode {brief(mode)} is not one of {', '.join(MODES)}")
    rows, columns = shape
    for bits, group_size in itertools.product(*MODES[mode]):
        if columns % group_size or weight.dtype != "U32" or weight.shape != (rows, columns * bits // 32):
            continue
        if scales.shape != (rows, columns // group_size) or (scales.dtype in FLOATS) != (mode == "affine"):
            continue
        if (mode == "affine" and biases and biases.shape == scales.shape) or (mode != "affine" and not biases):
            return Quantized(bits, group_size, mode)
    raise DraftError(
        f"{weight.file}: {path}.weight {list(weight.shape)} with scales {list(scales.shape)} "
        f"is no {mode} form of {list(shape)}"
    )


def load_draft_folder(
    folder: Path, dtype: mx.Dtype | None = None, attn_implementation: str = "sdpa"
) -> DFlashDraftModel:
    """A draft from a local folder; `dtype` overrides what `compute_dtype` chooses for this machine.

    Raises:
        DraftError: see `DraftConfig.from_dict`, `read_headers`, `check_tensors`; or a weight is not finite.
    """
    config, quantized = check_draft_folder(folder)
    model = DFlashDraftModel(config, attn_implementation)
    if quantized:
        nn.quantize(model, class_predicate=lambda path, _: vars(quantized[path]) if path in quantized else False)
    weights: dict[str, mx.array] = {}
    for file in weight_files(folder):
        weights.update(load_file(file))
    refuse_non_finite(weights, folder)
    model.load_weights(list(weights.items()))
    stored = model.norm.weight.dtype
    chosen, note = compute_dtype(stored, bool(quantized), dtype)
    if dtype is not None or chosen != stored:
        model.set_dtype(chosen)
    if note:
        warnings.warn(f"{folder}: {note}", RuntimeWarning, stacklevel=2)
    model.eval()
    mx.eval(model.parameters())
    return model


def check_draft_folder(folder: Path) -> tuple[DraftConfig, dict[str, Quantized]]:
    """Config and quantised modules of a folder, by config and headers only."""
    if not folder.is_dir():
        raise DraftError(f"{folder}: no such folder")
    return check_tensors(folder_config(folder), read_headers(folder), folder)


def folder_config(folder: Path) -> DraftConfig:
    """The validated config of a folder; raises as `folder_facts` and `DraftConfig.from_dict`."""
    return DraftConfig.from_dict(*folder_facts(folder))


def folder_facts(folder: Path) -> tuple[dict[str, Any], str]:
    """What a folder says of its draft, and the file that says it.

    That is `config.json`, or a GGUF file that has none beside it. Raises `DraftError` when neither can be read.
    """
    check_folder(folder)
    file = folder / "config.json"
    if not file.exists() and (one := gguf.find(folder)):
        return gguf.config(one), str(one)
    return read_json(file), str(file)


def refuse_non_finite(weights: Mapping[str, mx.array], source: Path) -> None:
    """Raise `DraftError` naming the first tensor with a NaN or infinite value."""
    floats = {name: array for name, array in weights.items() if mx.issubdtype(array.dtype, mx.floating)}
    # one at a time: together their intermediate results would take as much memory as the weights
    if broken := [name for name, array in floats.items() if not mx.isfinite(array).all().item()]:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise DraftError(f"{source}: {broken[0]}{more} holds NaN or infinite values; the file is damaged")
