"""GGUF drafts: the same draft as the safetensors it was made from, or one line that says why not."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import draft_config, make_draft, save_draft

from dflash_mlx import DraftError, convert_draft, inspect_draft, load_draft
from dflash_mlx.checkpoint import gguf as reading
from dflash_mlx.checkpoint.readers import load_file, read_headers
from dflash_mlx.checkpoint.weights import folder_facts
from dflash_mlx.draft import DFlashDraftModel

gguf = pytest.importorskip("gguf")
Types = gguf.GGMLQuantizationType
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
CHANGES = {**SLIDING, "is_causal": False, "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 255}}
NAMES = {name: key for key, name in reading.TENSORS.items()}
LAYER_NAMES = {name: key for key, name in reading.LAYER_TENSORS.items()}


def llama_name(name: str) -> str:
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest]}"


def write(
    file: Path,
    draft: DFlashDraftModel,
    kind: Any = Types.BF16,
    keys: dict[str, Any] | None = None,
    architecture: str = "dflash",
    tokens: int | None = 256,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A draft as llama.cpp's converter writes it: norms in float32, matrices of a kind; a key of None is left out."""
    c = draft.config
    stated: dict[str, Any] = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps), "rope.freq_base": float(c.rope_theta),
        "block_size": c.block_size, "target_layers": [i + 1 for i in c.target_layer_ids],
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c.layer_types],
        "attention.causal": c.is_causal, "tokenizer.ggml.mask_token_id": c.mask_token_id, **(keys or {}),
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in stated.items():
        name = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            add[type(value)](name, value)
    if tokens is not None:
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(tokens)])
    for name, array in tree_flatten(draft.parameters()):
        values = np.array(array.astype(mx.float32))
        dtype = Types.F32 if values.ndim == 1 else kind
        data = values if dtype == Types.F32 else gguf.quantize(values, dtype)
        writer.add_tensor(llama_name(name), data, raw_dtype=dtype)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def draft() -> DFlashDraftModel:
    """A random draft of bfloat16 values; its columns are multiples of 32."""
    return make_draft(mx.bfloat16, **CHANGES)


def test_the_same_draft_as_its_safetensors(tmp_path, draft):
    source = save_draft(tmp_path / "z-lab", draft, draft_config(dtype="bfloat16", **CHANGES))
    write(tmp_path / "gguf" / "draft.gguf", draft)
    one, two = load_draft(source), load_draft(tmp_path / "gguf")
    assert two.config == replace(one.config, num_target_layers=None)  # which the file does not say
    for (name, a), (other, b) in zip(tree_flatten(one.parameters()), tree_flatten(two.parameters()), strict=True):
        assert name == other
        assert a.dtype == b.dtype == mx.bfloat16
        assert mx.array_equal(a, b), name


def test_headers_are_those_of_the_arrays(tmp_path, draft):
    file = write(tmp_path / "draft.gguf", draft, Types.Q8_0)
    headers, arrays = read_headers(tmp_path), load_file(file)
    assert set(headers) == set(arrays) == {name for name, _ in tree_flatten(draft.parameters())}
    for name, info in headers.items():
        assert info.shape == arrays[name].shape
        assert (info.dtype, arrays[name].dtype) == ("BF16", mx.bfloat16)


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Types.F32, 0), (Types.F16, 2**-8), (Types.BF16, 0), (Types.Q8_0, 0.01), (Types.Q5_1, 0.05), (Types.Q4_0, 0.12)],
)
def test_matrices_of_every_kind(tmp_path, draft, kind, error):
    arrays = load_file(write(tmp_path / "draft.gguf", draft, kind))
    for name, expected in tree_flatten(draft.parameters()):
        assert arrays[name].dtype == (mx.float32 if kind == Types.F32 else mx.bfloat16)
        difference = mx.linalg.norm((arrays[name] - expected).astype(mx.float32))
        assert difference <= error * mx.linalg.norm(expected.astype(mx.float32)), name


def test_a_gguf_converts_to_safetensors(tmp_path, draft):
    write(tmp_path / "gguf" / "draft.gguf", draft)
    result = convert_draft(tmp_path / "gguf", tmp_path / "out")
    assert inspect_draft(tmp_path / "gguf").problem is None
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert set(written) == {name for name, _ in tree_flatten(draft.parameters())}
    assert load_draft(tmp_path / "out").config == result.config


def test_the_facts_are_z_labs(tmp_path, draft):
    yarn = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024,
        "final_logit_softcapping": 30.0, "logit_scale": 0.5, "tokenizer.ggml.mask_token_id": None, "mask_token_id": 9,
    }  # fmt: skip
    write(tmp_path / "draft.gguf", draft, keys=yarn)
    facts, source = folder_facts(tmp_path)
    assert source == str(tmp_path / "draft.gguf")
    assert facts["dflash_config"] == {
        "target_layer_ids": [0, 2], "mask_token_id": 9, "block_size": 8, "output_multiplier": 0.5,
    }  # fmt: skip
    assert facts["rope_scaling"]["original_max_position_embeddings"] == 1024
    assert facts["layer_types"] == SLIDING["layer_types"]
    assert (facts["vocab_size"], facts["is_causal"], facts["final_logit_softcapping"]) == (256, False, 30.0)
    assert facts["architectures"] == ["DFlashDraftModel"]


def test_the_second_generation_is_said_to_be_one(tmp_path, draft):
    keys = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    extra = {
        "blk.0.attn_conv_base": np.zeros((2, 2, 64), np.float32), "selector_successor.weight": np.zeros((256, 8)),
    }  # fmt: skip
    write(tmp_path / "draft.gguf", draft, keys=keys, extra={n: a.astype(np.float32) for n, a in extra.items()})
    facts, _ = folder_facts(tmp_path)
    assert facts["architectures"] == ["DFlash2DraftModel"]
    assert keys.items() <= facts["dflash_config"].items()
    headers = read_headers(tmp_path)
    assert headers["layers.0.attention_conv.base_kernel"].shape == (2, 2, 64)
    assert headers["candidate_selector.successor_codebook"].shape == (256, 8)


def test_safetensors_win(tmp_path, draft):
    save_draft(tmp_path, draft)
    write(tmp_path / "draft.gguf", draft, keys={"block_size": 4})
    assert load_draft(tmp_path).config.block_size == 8
    assert {info.file.name for info in read_headers(tmp_path).values()} == {"model.safetensors"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{fork: ({"architecture": fork}, f"`{fork}` is the schema of a fork") for fork in list(reading.FORKS)[:3]},
    "a fork's DSpark": ({"architecture": "dspark"}, "a DSpark draft of a fork"),
    "a target": ({"architecture": "qwen3"}, "general.architecture 'qwen3': not a DFlash draft; a target goes to"),
    "a part": ({"keys": {"split.count": 2}}, "one part of 2; merge them"),
    "DSpark": ({"extra": {"markov_w1.weight": np.ones((4, 4), np.float32)}}, "a DSpark draft in GGUF"),
    "attention sinks": ({"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "attention sinks"),
    "its own vocabulary": ({"extra": {"d2t": np.ones(4, np.float32)}}, "a reduced vocabulary"),
    "its own embedding": ({"extra": {"token_embd.weight": np.ones((4, 4), np.float32)}}, "its own embedding"),
    "an unknown tensor": ({"extra": {"blk.0.x": np.ones(4, np.float32)}}, r"not a draft that is read \(it has 'blk.0"),
    "no vocabulary": ({"tokens": None}, "tokenizer.ggml.tokens: missing, so the size of the vocabulary is unknown"),
    "no block size": ({"keys": {"block_size": None}}, "dflash.block_size: missing"),
    "no mask token": ({"keys": {"tokenizer.ggml.mask_token_id": None}}, "tokenizer.ggml.mask_token_id: missing"),
    "two mask tokens": ({"keys": {"mask_token_id": 3}}, "mask_token_id: conflicting values"),
    "no taps": ({"keys": {"target_layers": None}}, "dflash.target_layers: missing"),
    "the embedding as a tap": ({"keys": {"target_layers": [0, 3]}}, r"target_layers: \[0, 3\] is not a list of layer"),
    "a window without its layers": (
        {"keys": {"attention.sliding_window_pattern": None}},
        "sliding_window_pattern: missing",
    ),
    "a window of too many layers": (
        {"keys": {"attention.sliding_window_pattern": [True]}},
        r"expected one entry for each of 2 layers, found \[True\]",
    ),
    "values of another width": ({"keys": {"attention.value_length": 8}}, "value_length: 8 differs from key_length 16"),
    "half a rotation": ({"keys": {"rope.dimension_count": 8}}, "rope.dimension_count: 8 differs from key_length 16"),
    "long rope": ({"keys": {"rope.scaling.type": "longrope"}}, "'longrope' is not read"),
    "a width of text": ({"keys": {"embedding_length": "wide"}}, "hidden_size: 'wide' is not a positive whole number"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_another_file_is_refused_by_name(tmp_path, draft, name):
    how, says = REFUSED[name]
    write(tmp_path / "draft.gguf", draft, **how)
    with pytest.raises(DraftError, match=says) as caught:
        load_draft(tmp_path)
    assert "draft.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def listed(count: int, kind: int = 0) -> bytes:
    """A file whose one key is a list of so many elements."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, kind, count) + bytes(1 << 20)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "another format": lambda data: b"GGML" + data[4:],
    "version 9": lambda data: data[:4] + struct.pack("<I", 9) + data[8:],
    "tensors without end": lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:],
    "keys without end": lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:],
    "more keys than there are": lambda data: data[:16] + struct.pack("<Q", 4000) + data[24:],
    "more tensors than there are": lambda data: data[:8] + struct.pack("<Q", 4000) + data[16:],
    "cut in the metadata": lambda data: data[:500],
    "cut in the data": lambda data: data[:-1000],
    "a list without end": lambda data: listed(2**62),
    "a list of ten million": lambda data: listed(10**7),
    "texts without end": lambda data: listed(3 * 10**6, 8),
    "a list of lists": lambda data: listed(10, 9),
    "values of no type": lambda data: listed(10, 77),
    "garbage": lambda data: data[:24] + bytes(range(256)) * 40,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line_and_takes_no_memory(tmp_path, draft, name):
    file = write(tmp_path / "draft.gguf", draft)
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    with pytest.raises(DraftError, match=r"draft\.gguf") as caught:
        load_draft(tmp_path)
    assert "\n" not in str(caught.value)


def test_two_files_in_a_folder_are_refused(tmp_path, draft):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.gguf", draft)
    with pytest.raises(DraftError, match=r"2 GGUF files \(\['a.gguf', 'b.gguf'\]\); keep one"):
        load_draft(tmp_path)


def test_without_the_package_it_is_said_what_to_install(tmp_path, draft):
    write(tmp_path / "draft.gguf", draft)
    code = f"""
        import sys
        sys.modules["gguf"] = None
        import dflash_mlx
        try:
            dflash_mlx.load_draft({str(tmp_path)!r})
        except dflash_mlx.DraftError as error:
            print(error)
    """
    out = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True, timeout=60)
    assert out == f"{tmp_path}/draft.gguf: GGUF needs the gguf package: pip install 'dflash-mlx[gguf]'\n"
