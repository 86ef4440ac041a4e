"""Matrices quantised by other tools: equal to what those tools give back, and to the formula computed apart."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import draft_config, make_draft

from dflash_mlx import DraftError, convert_draft, inspect_draft, load_draft
from dflash_mlx.checkpoint.packed import from_e2m1, from_e4m3, from_e5m2, recipes
from dflash_mlx.checkpoint.readers import load_file, read_headers
from dflash_mlx.checkpoint.schemes import UNUSED
from dflash_mlx.checkpoint.tensor_info import TensorInfo
from dflash_mlx.draft import DFlashDraftModel

GOLDEN = np.load(Path(__file__).parent / "reference" / "golden" / "packed.npz")
CONFIGS = json.loads(GOLDEN["configs"].tobytes())
PATH = "layers.0.mlp.up_proj"
NORM = "layers.0.input_layernorm.weight"
Parts = dict[str, tuple[str, np.ndarray]]  # kind -> dtype as safetensors spells it, and the numbers or their bytes


def write(folder: Path, parts: Parts, norm: str = "F32") -> dict[str, TensorInfo]:
    """A safetensors file of one matrix's tensors and a norm, of dtypes that `mx.save_safetensors` may not know."""
    norms = {"F32": np.ones(4, np.float32), "F16": np.ones(4, np.float16), "BF16": np.full(4, 0x3F80, np.uint16)}
    return write_tensors(folder, {f"{PATH}.{kind}": part for kind, part in parts.items()} | {NORM: (norm, norms[norm])})


def write_tensors(folder: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> dict[str, TensorInfo]:
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return read_headers(folder)


def unpack(folder: Path, parts: Parts, config: dict[str, Any] | None = None, norm: str = "F32") -> mx.array:
    """The matrix, its recipe checked against what comes out."""
    tensors = write(folder, parts, norm)
    found = recipes(tensors, config)
    assert list(found) == [f"{PATH}.weight"]
    recipe = found[f"{PATH}.weight"]
    assert set(recipe.sources) == {f"{PATH}.{kind}" for kind in parts if kind not in UNUSED}
    arrays = load_file(folder / "model.safetensors")
    result = recipe.make([arrays[name] for name in recipe.sources])
    assert result.shape == recipe.shape
    assert result.dtype == {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[recipe.dtype]
    return result


def stored(scheme: str) -> Parts:
    parts = [name.split("/") for name in GOLDEN.files if name.startswith(f"{scheme}/") and not name.endswith("result")]
    return {kind: (dtype, GOLDEN[f"{scheme}/{dtype}/{kind}"]) for _, dtype, kind in parts}


@pytest.mark.parametrize("scheme", CONFIGS)
def test_compressed_tensors_gives_back_the_same(tmp_path, scheme):
    result = unpack(tmp_path, stored(scheme), CONFIGS[scheme])
    rtol = 2**-8 if scheme == "nvfp4" else 1e-6  # which the library unpacks in bfloat16
    np.testing.assert_allclose(np.array(result), GOLDEN[f"{scheme}//result"], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("norm", ["BF16", "F16"])
def test_the_result_has_the_dtype_of_the_norms(tmp_path, norm):
    result = unpack(tmp_path, stored("fp8 channel"), CONFIGS["fp8 channel"], norm)
    np.testing.assert_allclose(
        np.array(result.astype(mx.float32)), GOLDEN["fp8 channel//result"], rtol={"BF16": 2**-8, "F16": 2**-10}[norm]
    )


# the numbers of 8 and 4 bits, by their definition


def float_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A small float of no infinities, computed from its fields."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    return sign * (fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))


E4M3 = np.array([float_of(code, 4, 3) for code in range(256)], np.float32)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = np.array([float_of(code, 5, 2) for code in range(256)], np.float32)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[*range(0x7D, 0x80), *range(0xFD, 0x100)]] = np.nan
E2M1 = np.array([float_of(code, 2, 1) for code in range(16)], np.float32)
CODES = np.arange(256, dtype=np.uint8)


def test_every_number_of_8_and_4_bits():
    np.testing.assert_array_equal(np.array(from_e4m3(mx.array(CODES))), E4M3)
    np.testing.assert_array_equal(np.array(from_e5m2(mx.array(CODES))), E5M2)
    np.testing.assert_array_equal(
        np.array(from_e2m1(mx.array(CODES[None]))).reshape(-1, 2), np.stack([E2M1[CODES & 15], E2M1[CODES >> 4]], 1)
    )


@pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(("dtype", "table"), [("F8_E4M3", E4M3), ("F8_E5M2", E5M2)])
def test_fp8_by_blocks_of_128(tmp_path, kind, dtype, table):
    """Both names of the scale multiply; the last blocks are cut off."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 0x70, (200, 300), dtype=np.uint8)
    scale = random.uniform(0.5, 2, (2, 3)).astype(np.float32)
    expected = table[codes] * np.kron(scale, np.ones((128, 128), np.float32))[:200, :300]
    result = unpack(tmp_path, {"weight": (dtype, codes), kind: ("F32", scale)}, {"quant_method": "fp8"})
    np.testing.assert_allclose(np.array(result), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (6, 1), (1, 1, 1, 1)])
def test_scales_of_every_shape_that_tools_write(tmp_path, shape):
    """modelopt writes a number, a row of them, or blocks in four dimensions; compressed-tensors columns."""
    codes = np.random.default_rng(1).integers(0, 0x70, (6, 32), dtype=np.uint8)
    scale = np.linspace(0.5, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    parts: Parts = {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scale)}
    parts["input_scale"] = ("F32", np.float32([0.1]))
    result = unpack(tmp_path, parts, {"quant_method": "modelopt", "quant_algo": "FP8"})
    np.testing.assert_allclose(np.array(result), E4M3[codes] * scale.reshape(-1, 1), rtol=1e-6)


def nvfp4(rows: int = 6, columns: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales in fp8, and the numbers they make before the scale of the whole matrix."""
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = random.integers(0x20, 0x70, (rows, columns // 16), dtype=np.uint8)
    return codes[:, 1::2] << 4 | codes[:, ::2], scales, E2M1[codes] * np.repeat(E4M3[scales], 16, 1)


@pytest.mark.parametrize("whole", [0.25, 3.0])
def test_the_second_scale_of_nvfp4_multiplies_in_modelopt_and_divides_in_compressed_tensors(tmp_path, whole):
    packed, scales, numbers = nvfp4()
    modelopt: Parts = {
        "weight": ("U8", packed), "weight_scale": ("F8_E4M3", scales), "weight_scale_2": ("F32", np.float32(whole)),
    }  # fmt: skip
    other: Parts = {
        "weight_packed": ("U8", packed), "weight_scale": ("F8_E4M3", scales),
        "weight_global_scale": ("F32", np.float32([whole])),
    }  # fmt: skip
    result = unpack(tmp_path / "modelopt", modelopt, {"quant_algo": "NVFP4"})
    np.testing.assert_allclose(np.array(result), numbers * whole, rtol=1e-6)
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    result = unpack(tmp_path / "other", other, config)
    np.testing.assert_allclose(np.array(result), numbers / np.float32(whole), rtol=1e-6)


def packed_config(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    stated = {str(i): {"targets": ["re:(a+)+$"], "weights": weights} for i, weights in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": stated, **more}


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Signed integers `[rows, n]` in words of 32 bits, bit by bit."""
    rows = []
    for row in numbers.astype(np.int64) + (1 << (bits - 1)):
        stream = [number >> i & 1 for number in row for i in range(bits)]
        stream += [0] * (-len(stream) % 32)
        rows.append([sum(bit << i for i, bit in enumerate(stream[at : at + 32])) for at in range(0, len(stream), 32)])
    return np.array(rows, np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_by_definition(tmp_path, bits, symmetric):
    random, low = np.random.default_rng(3), -(1 << (bits - 1))
    numbers, zeros = random.integers(low, -low, (11, 64)), random.integers(low, -low, (11, 2))
    scale = random.uniform(0.1, 1, (11, 2)).astype(np.float32)
    parts: Parts = {
        "weight_packed": ("I32", words(numbers, bits)), "weight_scale": ("F32", scale),
        "weight_shape": ("I64", np.array([11, 64])), "weight_g_idx": ("I32", np.arange(64, dtype=np.int32) // 32),
    }  # fmt: skip
    if not symmetric:
        parts["weight_zero_point"] = ("I32", np.ascontiguousarray(words(zeros.T, bits).T))
    config = packed_config({"num_bits": bits, "group_size": 32, "symmetric": symmetric})
    expected = (numbers - (0 if symmetric else np.repeat(zeros, 32, 1))) * np.repeat(scale, 32, 1)
    np.testing.assert_allclose(np.array(unpack(tmp_path, parts, config)), expected, rtol=1e-5, atol=1e-6)


def test_two_groups_in_one_config_are_told_apart_by_shapes(tmp_path):
    four, eight = {"num_bits": 4, "group_size": 32}, {"num_bits": 8, "group_size": 64}
    numbers = np.random.default_rng(4).integers(-8, 8, (4, 64))
    for bits, size in ((4, 32), (8, 64)):
        scale = np.full((4, 64 // size), 0.5, np.float32)
        parts: Parts = {"weight_packed": ("I32", words(numbers, bits)), "weight_scale": ("F32", scale)}
        result = unpack(tmp_path, parts, packed_config(four, eight))
        np.testing.assert_array_equal(np.array(result), numbers * 0.5)


def test_unquantised_drafts_have_no_such_matrices(tmp_path):
    info = TensorInfo("BF16", (4, 4), tmp_path / "model.safetensors")
    assert recipes({f"{PATH}.weight": info}, {"quant_method": "no such"}) == {}


# a whole draft


def quantise(draft: DFlashDraftModel) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, mx.array]]:
    """Its matrices in fp8 by rows, with scales of activations and keys beside, and what the numbers mean."""
    stored: dict[str, tuple[str, np.ndarray]] = {}
    meant: dict[str, mx.array] = {}
    for name, array in tree_flatten(draft.parameters()):
        meant[name] = array
        if array.ndim == 1 or name == "fc.weight":
            stored[name] = "BF16", np.array(array.view(mx.uint16))
            continue
        path = name.removesuffix(".weight")
        scale = mx.abs(array.astype(mx.float32)).max(axis=1, keepdims=True) / 448
        codes = mx.to_fp8(array.astype(mx.float32) / scale)
        stored[name] = "F8_E4M3", np.array(codes)
        stored[f"{path}.weight_scale"] = "F32", np.array(scale)
        stored[f"{path}.input_scale"] = "F32", np.ones((), np.float32)
        if path.endswith("k_proj"):
            stored[f"{path}.k_scale"] = "F32", np.ones((), np.float32)
        meant[name] = (mx.array(E4M3[np.array(codes)]) * scale).astype(mx.bfloat16)
    return stored, meant


@pytest.mark.parametrize("beside", [True, False])
def test_a_draft_of_fp8_loads_and_converts(tmp_path, beside):
    draft = make_draft(mx.bfloat16)
    stored, meant = quantise(draft)
    stated = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_scheme": {"num_bits": 8}}
    write_tensors(tmp_path / "draft", stored)
    config = draft_config(dtype="bfloat16", quantization_config=None if beside else stated)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    if beside:
        (tmp_path / "draft" / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    for name, array in tree_flatten(load_draft(tmp_path / "draft").parameters()):
        assert array.dtype == mx.bfloat16
        assert mx.array_equal(array, meant[name]), name
    assert inspect_draft(tmp_path / "draft").problem is None
    result = convert_draft(tmp_path / "draft", tmp_path / "out", quantize=True, q_group_size=32)
    assert result.config.quantization == {"bits": 4, "group_size": 32, "mode": "affine"}
    assert "layers.0.mlp.up_proj.input_scale left out: scales activations, which are not quantised here" in result.notes
    assert any(
        note.startswith("layers.1.self_attn.k_proj.k_scale left out: scales cached keys") for note in result.notes
    )
    gate = load_draft(tmp_path / "out").layers[0].mlp.gate_proj
    expected = mx.quantize(meant["layers.0.mlp.gate_proj.weight"], 32, 4)
    assert all(mx.array_equal(a, b) for a, b in zip((gate.weight, gate.scales, gate.biases), expected, strict=True))


def test_nan_in_fp8_is_found(tmp_path):
    stored, _ = quantise(make_draft(mx.bfloat16))
    stored["layers.0.mlp.up_proj.weight"][1][0, 0] = 0x7F
    write_tensors(tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps(draft_config(dtype="bfloat16")))
    with pytest.raises(DraftError, match=r"up_proj\.weight holds NaN"):
        load_draft(tmp_path)


@pytest.mark.parametrize("key", ["quant_method", "quant_algo"])
def test_a_scheme_that_is_not_read_is_refused_before_anything_loads(tmp_path, key):
    stored, _ = quantise(make_draft(mx.bfloat16))
    write_tensors(tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps(draft_config(quantization_config={key: "spinquant"})))
    with pytest.raises(DraftError, match=f"config.json: {key} 'spinquant'.* is not read"):
        load_draft(tmp_path)


# what is refused

FP8: Parts = {"weight": ("F8_E4M3", np.zeros((6, 32), np.uint8)), "weight_scale": ("F32", np.ones((6, 1), np.float32))}
W4: Parts = {
    "weight_packed": ("I32", np.zeros((6, 8), np.int32)), "weight_scale": ("F32", np.ones((6, 2), np.float32)),
}  # fmt: skip
W4_CONFIG = packed_config({"num_bits": 4, "group_size": 32})
PACKED4, SCALES4, _ = nvfp4()
NVFP4: Parts = {
    "weight": ("U8", PACKED4), "weight_scale": ("F8_E4M3", SCALES4), "weight_scale_2": ("F32", np.float32(1)),
}  # fmt: skip


def one(dtype: str = "F32", *shape: int) -> tuple[str, np.ndarray]:
    return dtype, np.ones(shape, {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8}[dtype])


REFUSED: dict[str, tuple[Parts, Any, str]] = {
    "a method": (FP8, {"quant_method": "gptq"}, r"quant_method 'gptq' is not read \(known: compressed-tensors, "),
    "a method of no name": (FP8, {"quant_method": [1]}, r"quant_method \[1\] is not read"),
    "a format": (
        FP8,
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        r"format 'marlin-24' of compressed-tensors is not read .* use an unquantised draft",
    ),
    "a format of a group": (
        FP8,
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "mxfp4-pack-quantized"}}},
        "format 'mxfp4-pack-quantized'",
    ),
    "an algorithm": (FP8, {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ' of modelopt is not read"),
    "GPTQ's tensors": ({"qweight": one("I32", 4, 4), **FP8}, None, "quantised by GPTQ or AWQ"),
    "scaled inputs": ({**FP8, "pre_quant_scale": one("F32", 32)}, None, "AWQ of nvidia-modelopt"),
    "scales of another shape": ({**FP8, "weight_scale": one("F32", 5, 1)}, None, r"scales \[5, 1\] don't fit 6 x 32"),
    "scales of another dtype": ({**FP8, "weight_scale": one("U8", 6, 1)}, None, "scales of dtype U8"),
    "no scale": ({"weight": FP8["weight"], "weight_shape": one("I64", 2)}, None, "weight_scale or weight_scale_inv is"),
    "no weight": ({"weight_scale": one("F32", 1)}, None, "weight_packed or weight is missing"),
    "a scale on an unquantised matrix": (
        {"weight": one("F32", 6, 32), "weight_scale": one("F32", 6, 1)},
        None,
        "weight of dtype F32 with weight, weight_scale is a scheme that is not read",
    ),
    "a vector": ({**FP8, "weight": ("F8_E4M3", np.zeros(6, np.uint8))}, None, r"of shape \[6\] is no matrix"),
    "one tensor too many": ({**FP8, "weight_extra": one("F32", 1)}, None, "weight_extra belongs to a scheme"),
    "nvfp4 in groups of 32": (
        {**NVFP4, "weight_scale": ("F8_E4M3", SCALES4[:, ::2])},
        None,
        r"nvfp4 of 6 x 64 numbers does not fit weight_scale F8_E4M3 \[6, 2\]",
    ),
    "nvfp4 with a scale a row": ({**NVFP4, "weight_scale_2": one("F32", 6)}, None, r"weight_scale_2 is F32 \[6\]"),
    "nvfp4 without its second scale": (
        {kind: part for kind, part in NVFP4.items() if kind != "weight_scale_2"},
        None,
        "weight_scale_2 is missing",
    ),
    "packed without a config": (W4, None, "fits none of the config_groups"),
    "packed in other groups": (W4, packed_config({"num_bits": 4, "group_size": 64}), "fits none"),
    "packed with zero points that the config lacks": (
        {**W4, "weight_zero_point": one("I32", 1, 2)},
        W4_CONFIG,
        "fits none",
    ),
    "packed with two readings": (
        {**W4, "weight_scale": one("F32", 6, 1)},
        packed_config({"num_bits": 4, "group_size": None}, {"num_bits": 8, "group_size": None}),
        "fits several",
    ),
    "packed in 3 bits": (W4, packed_config({"num_bits": 3, "group_size": 32}), "num_bits 3 with group_size 32"),
    "packed in groups of text": (W4, packed_config({"num_bits": 4, "group_size": "32"}), "group_size '32'"),
    "zero points of another size": (
        {**W4, "weight_zero_point": one("I32", 3, 2)},
        packed_config({"num_bits": 4, "group_size": 32, "symmetric": False}),
        r"weight_zero_point I32 \[3, 2\] does not fit 6 rows",
    ),
    "a block of text": (FP8, {"quant_method": "fp8", "weight_block_size": "128"}, "a block of '128' is not two sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path, name):
    parts, config, says = REFUSED[name]
    with pytest.raises(DraftError, match=says) as caught:
        recipes(write(tmp_path, parts), config)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "part", "says"),
    [
        ("weight_shape", ("I64", np.array([6, 63])), r"weight_shape says \[6, 63\], its tensors are of \[6, 64\]"),
        ("weight_g_idx", ("I32", np.arange(64, dtype=np.int32) % 2), "weight_g_idx reorders the columns"),
        ("weight_g_idx", ("I32", np.zeros(3, np.int32)), "weight_g_idx reorders the columns"),
    ],
)
def test_what_only_the_data_tell_is_refused_when_they_are_read(tmp_path, kind, part, says):
    with pytest.raises(DraftError, match=says):
        unpack(tmp_path, {**W4, kind: part}, W4_CONFIG)


def test_any_mix_of_tensors_is_read_or_refused_in_one_line(tmp_path):
    """Whatever kinds stand together, it is refused, or every one of them is used."""
    kinds: Parts = {
        "weight": FP8["weight"], "weight_packed": W4["weight_packed"], "weight_scale": one("F32", 6, 1),
        "weight_scale_2": one("F32"), "weight_zero_point": one("I32", 1, 1), "weight_g_idx": one("I32", 64),
    }  # fmt: skip
    for count in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, count):
            tensors = write(tmp_path, {kind: kinds[kind] for kind in chosen})
            with contextlib.suppress(DraftError):
                for recipe in recipes(tensors, W4_CONFIG).values():
                    assert {f"{PATH}.{kind}" for kind in chosen if kind.startswith("weight_")} <= set(recipe.sources)
