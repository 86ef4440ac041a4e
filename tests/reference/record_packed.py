"""Golden matrices of compressed-tensors: `PYTHONPATH=tests python -m reference.record_packed`.

Quantises a random matrix with each scheme through the library's own compressors, and writes what it stores and what
it gives back to `golden/packed.npz`. Recorded with compressed-tensors 0.20.1 and torch 2.13.

Needs torch and compressed-tensors; knows nothing of MLX.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range, generate_gparam

GOLDEN = Path(__file__).parent / "golden" / "packed.npz"
ROWS, COLUMNS = 70, 160  # blocks, and words of zero points, are cut off at the edge

INT: dict[str, Any] = {"type": "int", "symmetric": True}
FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
# name -> format, and the scheme of the weights as a config states it
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 tensor": ("float-quantized", {**FLOAT, "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {**FLOAT, "strategy": "channel"}),
    "fp8 block": ("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [32, 64]}),
    "w4a16 group": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4a16 group asymmetric": (
        "pack-quantized",
        {**INT, "symmetric": False, "num_bits": 4, "strategy": "group", "group_size": 32},
    ),
    "w4a16 channel": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "channel"}),
    "w4a16 channel asymmetric": (
        "pack-quantized",
        {**INT, "symmetric": False, "num_bits": 4, "strategy": "channel"},
    ),
    "w8a16 group": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "group", "group_size": 32}),
    "w8a16 channel": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "w8a8": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "w8a8 asymmetric": ("int-quantized", {**INT, "symmetric": False, "num_bits": 8, "strategy": "channel"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    ),
}
# torch's dtypes as safetensors spells them; npz has neither bfloat16 nor fp8, so those are kept as bytes
SPELLED = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32",
    torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def scales(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scales and zero points by the extremes of each group of numbers, as the library computes them."""
    groups = weight
    if args.block_structure:
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -COLUMNS % wide, 0, -ROWS % high))
        groups = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
    elif args.group_size:
        groups = weight.unflatten(1, (-1, args.group_size))
    elif args.strategy == "tensor":
        groups = weight.flatten()
    whole = generate_gparam(weight.min(), weight.max()) if args.strategy == "tensor_group" else None
    keep = args.strategy == "channel"
    low, high_ = groups.amin(-1, keepdim=keep), groups.amax(-1, keepdim=keep)
    scale, zero = calculate_qparams(low, high_, args, global_scale=whole)
    found = {"weight_scale": scale.reshape(1) if args.strategy == "tensor" else scale}
    if not args.symmetric:
        found["weight_zero_point"] = zero
    if whole is not None:
        found["weight_global_scale"] = whole.reshape(1)
    return found


def stored(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensor = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.uint16)
    return tensor.contiguous().numpy()


def main() -> int:
    torch.manual_seed(7)
    arrays: dict[str, np.ndarray] = {}
    configs: dict[str, Any] = {}
    for name, (layout, weights) in SCHEMES.items():
        args = QuantizationArgs(**weights)
        calculate_range(args, "cpu")  # refuses what the library can't quantise
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = torch.randn(ROWS, COLUMNS) * torch.linspace(0.2, 3, ROWS)[:, None]
        compressor = BaseCompressor.load_from_registry(layout)
        parts = compressor.compress({"weight": weight, **scales(weight, args)}, scheme)
        back = compressor.decompress(dict(parts), scheme)["weight"]
        assert back.shape == weight.shape
        assert (back.float() - weight).abs().max() < 2, name  # coarse, but not another matrix
        configs[name] = {
            "quant_method": "compressed-tensors", "format": layout,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}},
        }  # fmt: skip
        for kind, tensor in parts.items():
            arrays[f"{name}/{SPELLED[tensor.dtype]}/{kind}"] = stored(tensor.data)
        arrays[f"{name}//result"] = back.float().numpy().astype(np.float32)
    arrays["configs"] = np.frombuffer(json.dumps(configs).encode(), np.uint8)
    np.savez_compressed(GOLDEN, **arrays)
    print(f"{GOLDEN}: {len(SCHEMES)} schemes, {GOLDEN.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
