"""PyTorch's files (`pytorch_model.bin`, `*.pt`): the same view of names, dtypes and shapes as safetensors give.

Read through torch alone, with `weights_only`: a pickle that holds code is refused and nothing of it runs. Torch is
no dependency; without it a folder of such files is an error that says what to do. Knows no config and no draft.
"""

from __future__ import annotations

import functools
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import DraftError
from .fields import MAX_SIZE, brief
from .folder import indexed_files, refuse_outside, regular_files
from .tensor_info import MAX_DIMENSIONS, MAX_TENSORS, TensorInfo, refuse_name

SUFFIXES = (".bin", ".pt", ".pth")
INDEX = "pytorch_model.bin.index.json"
CHECKPOINT = "training_state.pt"  # SpecForge's, with the draft under `draft_state_dict` beside optimizer states
MASK_EMBEDDING = "mask_embedding.pt"
# Files that trainers leave beside the weights; none holds a draft.
OTHERS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", MASK_EMBEDDING)

# torch's dtypes by name -> as safetensors spells them
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
REAL = ("float64", "float32", "float16", "bfloat16")


def weight_files(folder: Path) -> list[Path]:
    """PyTorch's files that make up a checkpoint; none where a folder has no such files."""
    index = folder / INDEX
    if index.is_file():
        refuse_outside(index)
        return indexed_files(index)
    files = [file for suffix in SUFFIXES for file in regular_files(folder, f"*{suffix}") if file.name not in OTHERS]
    # a trainer's folder may hold the model and the state it came from: the model is what was meant to be used
    models = [file for file in files if file.name != CHECKPOINT]
    return models or files


def file_headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file; data stay on disk."""
    state = _tensors(file, *_stamp(file))
    return {name: TensorInfo(DTYPES[_dtype(tensor)], tuple(tensor.shape), file) for name, tensor in state.items()}


def load_file(file: Path) -> Mapping[str, mx.array]:
    """The tensors of one file, each read when it is looked up; fp8 as its bytes."""
    return _TorchFile(_tensors(file, *_stamp(file)))


def mask_embedding(folder: Path) -> tuple[mx.array, int | None] | None:
    """The row `[H]` that `mask_embedding.pt` gives the mask token, and that token's id if it says; None without it."""
    file = folder / MASK_EMBEDDING
    if not file.exists():
        return None
    regular_files(folder, MASK_EMBEDDING)
    import_torch(file)
    state = _load(file)
    token: Any = None
    if isinstance(state, Mapping):
        token, state = state.get("mask_token_id"), state.get("embedding")
    if _is_tensor(token):
        _refuse_strange(file, "mask_token_id", token)
        token = token.item() if token.numel() == 1 else token
    if _is_tensor(state):
        _refuse_strange(file, "embedding", state)
    if not _is_tensor(state) or not state.dim() or state.numel() != state.shape[-1] or _dtype(state) not in REAL:
        raise DraftError(f"{file}: expected one row of numbers, or an object with `embedding` and `mask_token_id`")
    if token is not None and (type(token) is not int or not 0 <= token <= MAX_SIZE):
        raise DraftError(f"{file}: mask_token_id: {brief(token)} is not a token id")
    return to_mlx(state.reshape(-1)), token


def import_torch(file: Path) -> Any:
    """torch, or a `DraftError` that says how to do without or get it."""
    try:
        import torch
    except ImportError:
        raise DraftError(
            f"{file}: no safetensors file but PyTorch's, which needs torch: pip install torch, "
            "or save the tensors as safetensors on a machine that has it"
        ) from None
    return torch


def to_mlx(tensor: Any) -> mx.array:
    """A torch tensor as an MLX array of the same bits; fp8 as its bytes, float64 as float32."""
    torch = import_torch(Path())
    tensor = tensor.detach().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.view(torch.uint8)
    return mx.array((tensor.float() if tensor.dtype == torch.float64 else tensor).numpy())


class _TorchFile(Mapping[str, mx.array]):
    def __init__(self, state: Mapping[str, Any]):
        self.state = state

    def __getitem__(self, name: str) -> mx.array:
        return to_mlx(self.state[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=4)  # headers and data come from one unpickling; the data are mapped, not held
def _tensors(file: Path, *_stamp: int) -> dict[str, Any]:
    """Names and tensors of a file's state dict."""
    import_torch(file)
    state = _load(file)
    for wrapper in ("draft_state_dict", "state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not state:
        raise DraftError(f"{file}: holds no tensors by name, so it is no draft")
    if len(state) > MAX_TENSORS:
        raise DraftError(f"{file}: {len(state)} tensors, {MAX_TENSORS} is the most; no draft has so many")
    for name, tensor in state.items():
        if not isinstance(name, str) or not _is_tensor(tensor):
            raise DraftError(f"{file}: {brief(name)} is no tensor; save the draft's state dict alone")
        refuse_name(file, name)
        _refuse_strange(file, name, tensor)
    return dict(state)


def _refuse_strange(file: Path, name: str, tensor: Any) -> None:
    """Raise `DraftError` for a tensor that is not just its bytes."""
    if tensor.layout != import_torch(file).strided or tensor.is_meta or tensor.is_quantized:
        raise DraftError(f"{file}: {name} is no plain tensor (sparse, quantised or without data)")
    if _dtype(tensor) not in DTYPES:
        raise DraftError(f"{file}: {name} has the dtype {_dtype(tensor)}, which is not read")
    # strides of 0 make a tensor of any size out of a few bytes
    if tensor.dim() > MAX_DIMENSIONS or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise DraftError(f"{file}: {name} has shape {list(tensor.shape)} but fewer bytes; the file is damaged")


def _load(file: Path) -> Any:
    torch = import_torch(file)
    _check_zip(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how the pickle was written
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = _refused(str(error))
        raise DraftError(f"{file}: {name}; only plain tensors are read, and nothing in the file was run") from None
    except Exception as error:  # a damaged file may raise anything that unpickling can
        raise DraftError(f"{file}: torch can't read it ({type(error).__name__}: {brief(str(error))})") from None


def _check_zip(file: Path) -> None:
    """Raise `DraftError` for what `torch.save` does not write: its form of before 2020, or compressed data."""
    try:
        with zipfile.ZipFile(file) as archive:
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):
        stored = False
    if not stored:
        raise DraftError(
            f"{file}: cut short, or not as torch.save writes it today; download it again, "
            "or save the tensors as safetensors on a machine that reads it"
        )


def _refused(error: str) -> str:
    """What torch met, from its message of many lines."""
    found = re.search(r"(?:GLOBAL |global |type |function |class )([\w.]+)", error)
    what = f"`{found.group(1)}`" if found else "something"
    return f"a pickle with {what} in it, which may be code"


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
