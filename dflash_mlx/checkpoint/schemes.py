"""What the quantisation tools of others write into configs and names, and which of their schemes are read.

Tables and look-ups; knows no array and opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftError
from .fields import brief

# Kinds of tensors that scale activations or cached keys and values: what they are for, and why they can go.
UNUSED = {
    **dict.fromkeys(
        ("input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point", "input_amax"),
        "scales activations, which are not quantised here",
    ),
    **dict.fromkeys(
        ("k_scale", "v_scale", "q_scale", "prob_output_scale", "k_zero_point", "v_zero_point", "k_global_scale"),
        "scales cached keys and values, which are not quantised here",
    ),
}

# Kinds of tensors of schemes that are not read -> what they are.
UNREAD = {
    "pre_quant_scale": "AWQ of nvidia-modelopt (scaled inputs)", "svdquant_lora_a": "SVDQuant",
    "qweight": "GPTQ or AWQ", "absmax": "bitsandbytes", "quant_state": "bitsandbytes", "SCB": "bitsandbytes",
    "W_q": "HQQ", "bitmask": "2:4 sparse",
}  # fmt: skip

# `quant_method` -> its field that names the scheme, and the schemes of it that are read.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compressed-tensors": (
        "format",
        ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
         "mixed-precision", "dense"),
    ),
    "modelopt": ("quant_algo", ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4",
                                "W4A16_NVFP4", "MIXED_PRECISION")),
    "fp8": ("fmt", ("e4m3", "e5m2", "float8_e4m3fn")),
}  # fmt: skip

BLOCK = (128, 128)  # of fp8 with scales by block, where the config states none
PACKED_BITS = (2, 4, 8)  # those that never straddle a word


@dataclass(frozen=True)
class Group:
    """What the config says of some matrices: `size` columns share a scale, None for a whole row."""

    bits: int
    size: int | None
    symmetric: bool


def refuse_scheme(config: Mapping[str, Any], source: Path) -> None:
    """Raise `DraftError` for a scheme whose tensors could pass for another's."""
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    if method is None:
        return
    if not isinstance(method, str) or method not in METHODS:
        raise DraftError(
            f"{source}: quant_method {brief(method)} is not read (known: {', '.join(METHODS)}); "
            "use an unquantised draft"
        )
    name, known = METHODS[method]
    schemes = [config.get(name)]
    if isinstance(groups := config.get("config_groups"), Mapping):
        schemes += [group.get(name) for group in groups.values() if isinstance(group, Mapping)]
    for scheme in schemes:
        if scheme is not None and scheme not in known:
            raise DraftError(
                f"{source}: {name} {brief(scheme)} of {method} is not read (known: {', '.join(known)}); "
                "use an unquantised draft"
            )


def groups(config: Mapping[str, Any], source: Path) -> tuple[Group, ...]:
    """The forms of packed integers that the config states; which matrix has which is told by shapes."""
    found = []
    stated = config.get("config_groups")
    for group in stated.values() if isinstance(stated, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type", "int") != "int":
            continue
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if bits not in PACKED_BITS or not (size is None or (type(size) is int and (size > 0 or size == -1))):
            raise DraftError(
                f"{source}: integers of num_bits {brief(bits)} with group_size {brief(size)} are not read "
                f"(bits: {', '.join(map(str, PACKED_BITS))})"
            )
        found.append(Group(bits, None if size == -1 else size, weights.get("symmetric", True) is not False))
    return tuple(found)


def block(config: Mapping[str, Any], source: Path) -> tuple[int, int]:
    stated = config.get("weight_block_size")
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        stated = stated or (weights.get("block_structure") if isinstance(weights, Mapping) else None)
    if stated is None:
        return BLOCK
    if not isinstance(stated, list) or len(stated) != 2 or not all(type(n) is int and n > 0 for n in stated):
        raise DraftError(f"{source}: a block of {brief(stated)} is not two sizes")
    return stated[0], stated[1]
