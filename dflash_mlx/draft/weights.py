"""The tensors of a draft folder: headers first, checked against the config, then loaded.

Headers alone answer every question about names, shapes and sizes, so a wrong or broken folder is refused
before anything heavy is read. Knows z-lab's layout and its MLX-quantised form; knows no hub and no target.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..errors import DraftError
from .config import DraftConfig
from .dflash2 import DFlash2DraftModel
from .fields import brief, read_json
from .model import DFlashDraftModel

MODELS: dict[str, type[DFlashDraftModel]] = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel}  # by kind

MAX_HEADER = 100 * 2**20  # the format's own limit
FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
PACKED = ("U32", "U8")  # quantised matrices, and the scales of mxfp4 and its like
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip

# MLX's quantisation modes -> their bits and group sizes; the first of each is mlx-lm's default
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}

# What a tensor name that the draft should not have tells about the folder, most telling first.
FOREIGN_TENSORS = {
    "candidate_selector.": "a DFlash 2 draft, but config.json describes a DFlash (v1) draft",
    "attention_conv.": "a DFlash 2 draft, but config.json describes a DFlash (v1) draft",
    "mlp_conv.": "a DFlash 2 draft, but config.json describes a DFlash (v1) draft",
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


@dataclass(frozen=True)
class TensorInfo:
    """One tensor by its header: dtype as safetensors spells it, shape, and where it lies."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        size = ITEM_BYTES.get(self.dtype, 0)
        for n in self.shape:
            size *= n
        return size


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder, from the headers only.

    Raises `DraftError` when a file is missing, truncated, malformed, or the index names files elsewhere.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        for name, info in _file_header(file).items():
            if name in tensors:
                raise DraftError(f"{file}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = info
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(n, str) and n and Path(n).name == n for n in names):
            raise DraftError(f"{index}: weight_map must name files of this folder, found {brief(weight_map)}")
        files = [folder / name for name in sorted(set(names))]
        for file in files:
            if not file.is_file():
                raise DraftError(f"{file}: named by {index.name} but missing; download the draft again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"; it holds {', '.join(others)}, which is not read yet" if others else ""
        raise DraftError(f"{folder}: no safetensors file{found}")
    return files


def _file_header(file: Path) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise DraftError(f"{file}: not a safetensors file, or cut short ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise DraftError(f"{file}: not a safetensors file (its header is no JSON object)")
    tensors, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, begin, stop = _header_entry(file, name, entry)
        if info.dtype in ITEM_BYTES and stop - begin != info.nbytes:
            raise DraftError(
                f"{file}: {name} has {stop - begin} bytes, its shape {list(info.shape)} needs {info.nbytes}"
            )
        tensors[canonical(name)], end = info, max(end, stop)
    if 8 + length + end > size:
        raise DraftError(f"{file}: cut short: {size} bytes, {8 + length + end} expected; download it again")
    return tensors


def canonical(name: str) -> str:
    """A tensor's name as our modules have it: some files call a codebook, a plain array, a weight."""
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def _header_entry(file: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """One tensor of a header, and where its bytes begin and stop."""
    try:
        dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        dtype = None
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, stop)) or begin > stop:
        raise DraftError(f"{file}: malformed header entry for {brief(name)}: {brief(entry)}")
    return TensorInfo(dtype, shape, file), begin, stop


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a draft of this config has, unquantised; nothing is allocated."""
    skeleton = MODELS[config.kind](config)
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
    packed = [f"{name.removesuffix('.weight')}.{part}" for name in expected for part in ("scales", "biases")]
    unknown = [name for name in tensors if name not in {*expected, *packed}]
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
    """A draft from a local folder, in the dtype its tensors have unless `dtype` is given.

    Raises:
        DraftError: see `DraftConfig.from_dict`, `read_headers`, `check_tensors`; or a weight is not finite.
    """
    config, quantized = check_draft_folder(folder)
    model = MODELS[config.kind](config, attn_implementation)
    if quantized:
        nn.quantize(model, class_predicate=lambda path, _: vars(quantized[path]) if path in quantized else False)
    weights: dict[str, mx.array] = {}
    for file in weight_files(folder):
        weights.update(load_file(file))
    refuse_non_finite(weights, folder)
    model.load_weights(list(weights.items()))
    if dtype is not None:
        model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def load_file(file: Path) -> dict[str, mx.array]:
    """The tensors of one file; their data is read when it is evaluated.

    Raises `DraftError` for a file that MLX does not take although its header looks right.
    """
    try:
        return {canonical(name): array for name, array in cast(dict[str, mx.array], mx.load(str(file))).items()}
    except (RuntimeError, ValueError) as error:
        raise DraftError(f"{file}: MLX can't read it ({error})") from None


def check_draft_folder(folder: Path) -> tuple[DraftConfig, dict[str, Quantized]]:
    """Config and quantised modules of a folder, by config and headers only."""
    if not folder.is_dir():
        raise DraftError(f"{folder}: no such folder")
    config = DraftConfig.from_file(folder / "config.json")
    return check_tensors(config, read_headers(folder), folder)


def refuse_non_finite(weights: Mapping[str, mx.array], source: Path) -> None:
    """Raise `DraftError` naming the first tensor with a NaN or infinite value."""
    floats = {name: array for name, array in weights.items() if mx.issubdtype(array.dtype, mx.floating)}
    # one at a time: together their intermediate results would take as much memory as the weights
    if broken := [name for name, array in floats.items() if not mx.isfinite(array).all().item()]:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise DraftError(f"{source}: {broken[0]}{more} holds NaN or infinite values; the file is damaged")
