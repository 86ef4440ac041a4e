"""The converter (C18): MLX and back bit by bit, quantised forms, the card, and a result that is whole or not there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fake_hub import FakeHub
from mlx.utils import tree_flatten
from tiny import draft_config, make_draft, save_draft, save_target

from dflash_mlx import DFlashError, DraftError, convert_draft, demo, inspect_draft, load_draft
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.fields import read_json
from dflash_mlx.checkpoint.readers import read_headers
from dflash_mlx.checkpoint.weights import MODES, expected_shapes
from dflash_mlx.draft import DraftConfig

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
# Every fact that a config can state, none of them a default.
FULL_CONFIG = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "is_causal": False,
    "rope_scaling": YARN, "block_size": 4, "final_logit_softcapping": 30.0, "attention_bias": True,
    "dflash_config": {
        "target_layer_ids": [3, 0], "mask_token_id": 7, "input_embedding_scale": 8.0, "output_multiplier": 0.5,
    },
}  # fmt: skip

Cli = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A draft of two layers in bfloat16; the columns of its matrices are 64, 96 (down_proj) and 128 (fc)."""
    return published(tmp_path / "draft")


def published(folder: Path, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A random draft as z-lab publishes it."""
    config = draft_config(dtype=dtype, **changes)
    return save_draft(folder, make_draft(DTYPES[dtype], **changes), config)


def tensors(folder: Path) -> dict[str, mx.array]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in mx.load(str(file)).items()}


def write(folder: Path, arrays: dict[str, mx.array], file: str = "model.safetensors") -> None:
    mx.eval(arrays)  # they may come from the file itself
    mx.save_safetensors(str(folder / file), arrays)


def config(folder: Path) -> DraftConfig:
    return parse_config(read_json(folder / "config.json"))


def assert_same_tensors(a: dict[str, mx.array], b: dict[str, mx.array]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert mx.array_equal(a[name], b[name]), name


def block_logits(folder: Path) -> mx.array:
    draft = load_draft(folder)
    mx.random.seed(5)
    context = draft.context_feature(mx.random.normal((1, 20, 128)))
    table = mx.random.normal((256, 64))
    ids = mx.array([[4] + [draft.config.mask_token_id] * 3])
    logits = draft.logits(ids, context, draft.make_cache(), embed=lambda i: table[i], head=lambda h: h @ table.T)
    return logits.astype(mx.float32)


def relative_error(a: mx.array, b: mx.array) -> float:
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


# unquantised


@pytest.mark.parametrize("dtype", DTYPES)
def test_unquantised_conversion_is_bit_equal(tmp_path, dtype):
    source = published(tmp_path / "draft", dtype, **FULL_CONFIG)
    result = convert_draft(source, tmp_path / "out")
    assert_same_tensors(tensors(tmp_path / "out"), tensors(source))
    assert config(tmp_path / "out") == config(source) == result.config
    assert mx.array_equal(block_logits(tmp_path / "out"), block_logits(source))
    assert result.tensors == len(tensors(source))
    assert result.nbytes == sum(array.nbytes for array in tensors(source).values())


def test_to_mlx_and_back_is_bit_equal_both_ways(tmp_path):
    source = published(tmp_path / "draft", **FULL_CONFIG)
    convert_draft(source, tmp_path / "mlx")
    convert_draft(tmp_path / "mlx", tmp_path / "hf", to_hf=True)
    convert_draft(tmp_path / "hf", tmp_path / "mlx2")
    for name in ("mlx", "hf", "mlx2"):
        assert_same_tensors(tensors(tmp_path / name), tensors(source))
        assert config(tmp_path / name) == config(source)
    written = {
        name: mx.load(str(tmp_path / name / "model.safetensors"), return_metadata=True)[1] for name in ("mlx", "hf")
    }
    assert written == {"mlx": {"format": "mlx"}, "hf": {"format": "pt"}}


def test_to_hf_writes_what_z_lab_publishes(tmp_path, folder):
    convert_draft(folder, tmp_path / "hf", to_hf=True)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["dflash_config"] == {"target_layer_ids": [0, 2], "mask_token_id": 255}
    assert "quantization" not in written
    assert sorted(tensors(tmp_path / "hf")) == sorted(expected_shapes(config(folder)))


@pytest.mark.parametrize("index", [True, False])
def test_sharded_input(tmp_path, folder, index):
    whole, logits = tensors(folder), block_logits(folder)
    mx.eval(whole)
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        write(folder, {name: whole[name] for name in part}, file)
    if index:
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert_draft(folder, tmp_path / "out")
    assert_same_tensors(tensors(tmp_path / "out"), whole)
    assert mx.array_equal(block_logits(tmp_path / "out"), logits)
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    convert_draft(folder, tmp_path / "q", quantize=True, q_group_size=32)
    assert relative_error(block_logits(tmp_path / "q"), logits) < 0.5


@pytest.mark.parametrize("quantize", [True, False])
def test_sharded_output(tmp_path, folder, monkeypatch, quantize):
    convert_draft(folder, tmp_path / "one", quantize=quantize, q_group_size=32 if quantize else None)
    monkeypatch.setattr("dflash_mlx.convert.writer.SHARD_BYTES", 20_000)
    convert_draft(folder, tmp_path / "many", quantize=quantize, q_group_size=32 if quantize else None)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same_tensors(tensors(tmp_path / "many"), tensors(tmp_path / "one"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    headers = read_headers(tmp_path / "many")
    assert index["weight_map"] == {name: info.file.name for name, info in headers.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in headers.values())
    assert mx.array_equal(block_logits(tmp_path / "many"), block_logits(tmp_path / "one"))
    convert_draft(tmp_path / "many", tmp_path / "back", to_hf=True)  # from many files into many
    convert_draft(tmp_path / "one", tmp_path / "back from one", to_hf=True)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same_tensors(tensors(tmp_path / "back"), tensors(tmp_path / "back from one"))


def test_peak_memory_is_about_one_shard(tmp_path, monkeypatch):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
    source = published(tmp_path / "draft", "float32", **sizes)
    total = inspect_draft(source).nbytes
    shard = total // 6
    monkeypatch.setattr("dflash_mlx.convert.writer.SHARD_BYTES", shard)
    for name, options in {"mlx": {}, "q": {"quantize": True}, "half": {"dtype": "bfloat16"}}.items():
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        convert_draft(source, tmp_path / name, **options)
        assert mx.get_peak_memory() - before < 1.5 * shard, name
    assert len(list((tmp_path / "mlx").glob("*.safetensors"))) >= 6


@pytest.mark.reference
def test_the_reference_loads_what_to_hf_writes(tmp_path):
    torch = pytest.importorskip("torch")
    model_class = pytest.importorskip("dflash.model").DFlashDraftModel
    source = published(tmp_path / "draft")
    convert_draft(source, tmp_path / "q", quantize=True, q_bits=8, q_group_size=32)
    for name, path in {"hf": source, "dequantised": tmp_path / "q"}.items():
        convert_draft(path, tmp_path / name, to_hf=True)
        model, report = model_class.from_pretrained(tmp_path / name, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        theirs, ours = model.state_dict(), tensors(tmp_path / name)
        assert theirs.keys() == ours.keys()
        for key, array in ours.items():
            assert theirs[key].float().tolist() == array.astype(mx.float32).tolist(), key
        assert model.block_size == 8
        assert model.target_layer_ids == [0, 2]


# quantised


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_drafts_have_the_bits_they_say(tmp_path, bits, group_size, dtype):
    source = published(tmp_path / "draft", dtype)
    result = convert_draft(source, tmp_path / "q", quantize=True, q_bits=bits, q_group_size=group_size)
    draft = load_draft(tmp_path / "q")
    gate = draft.layers[0].mlp.gate_proj
    assert (gate.bits, gate.group_size, gate.mode) == (bits, group_size, "affine")
    assert gate.weight.shape == (96, 64 * bits // 32)
    assert gate.scales.dtype == draft.fc.weight.dtype == draft.norm.weight.dtype == DTYPES[dtype]
    assert draft.config.quantization == {"bits": bits, "group_size": group_size, "mode": "affine"}
    assert draft.config.dtype == dtype
    error = relative_error(block_logits(tmp_path / "q"), block_logits(source))
    assert 0 < error < {4: 0.35, 8: 0.06 if dtype == "bfloat16" else 0.03}[bits]
    # 96 columns of down_proj in groups of 64 stay as they are; so does fc, always
    kept = ["fc.weight"] + [f"layers.{i}.mlp.down_proj.weight" for i in range(2) if group_size == 64]
    assert [name.split()[0] for name in result.kept] == kept
    assert result.quantized == 2 * 7 + 1 - len(kept)
    same = {name: array for name, array in tensors(source).items() if name in kept or array.ndim == 1}
    assert_same_tensors({name: tensors(tmp_path / "q")[name] for name in same}, same)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_modes_of_floating_point(tmp_path, mode, dtype):
    source = published(tmp_path / "draft", dtype)
    convert_draft(source, tmp_path / "q", quantize=True, q_mode=mode)
    up = load_draft(tmp_path / "q").layers[1].mlp.up_proj
    (bits,), (group_size,) = MODES[mode]
    assert (up.mode, up.bits, up.group_size) == (mode, bits, group_size)
    assert "biases" not in up
    assert relative_error(block_logits(tmp_path / "q"), block_logits(source)) < {4: 0.45, 8: 0.15}[bits]
    convert_draft(tmp_path / "q", tmp_path / "hf", to_hf=True)
    back = tensors(tmp_path / "hf")
    assert {array.dtype for array in back.values()} == {DTYPES[dtype]}
    assert inspect_draft(tmp_path / "hf").problem is None
    expected = mx.dequantize(up.weight, up.scales, None, group_size, bits, mode=mode).astype(DTYPES[dtype])
    assert mx.array_equal(back["layers.1.mlp.up_proj.weight"], expected)


def test_columns_that_no_group_divides_are_kept_and_listed(tmp_path, cli):
    source = published(tmp_path / "draft", intermediate_size=48)
    done = cli("convert", "--hf-path", source, "--mlx-path", tmp_path / "q", "-q", "--q-group-size", "32")
    assert done.code == 0
    for i in range(2):
        name = f"layers.{i}.mlp.down_proj.weight"
        assert f"kept unquantised: {name} (48 columns, no multiple of 32)\n" in done.err
        assert mx.array_equal(tensors(tmp_path / "q")[name], tensors(source)[name])
    assert "kept unquantised: fc.weight" in done.err
    assert done.out == f"{tmp_path / 'q'}: {25 + 2 * 12} tensors, 0.1 MB, 12 matrices quantised\n"
    assert relative_error(block_logits(tmp_path / "q"), block_logits(source)) < 0.5


def mixed(tmp_path: Path, source: Path) -> Path:
    """A quantised draft whose layer 1 is partly in full precision, partly in 8 bits, while its config says 4."""
    full = tensors(source)
    for name, bits in (("q4", 4), ("q8", 8)):
        convert_draft(source, tmp_path / name, quantize=True, q_bits=bits, q_group_size=32)
    arrays, eight = tensors(tmp_path / "q4"), tensors(tmp_path / "q8")
    for name in [name for name in arrays if name.startswith("layers.1.self_attn.") and name.split(".")[3] in MATRICES]:
        del arrays[name]
    arrays |= {f"layers.1.self_attn.{name}.weight": full[f"layers.1.self_attn.{name}.weight"] for name in MATRICES}
    arrays |= {name: array for name, array in eight.items() if name.startswith("layers.1.mlp.")}
    write(tmp_path / "q4", arrays)
    return tmp_path / "q4"


MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_a_draft_loads_by_what_each_tensor_is(tmp_path, folder):
    draft = load_draft(mixed(tmp_path, folder))
    bits = {
        path: getattr(module, "bits", None)
        for path, module in draft.named_modules()
        if path.endswith("_proj") and path.startswith("layers.")
    }
    assert bits == {
        f"layers.{i}.{part}": 4 if i == 0 else 8 if part.startswith("mlp") else None
        for i in range(2)
        for part in (
            *(f"self_attn.{name}" for name in MATRICES), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    }  # fmt: skip


def test_mixed_precision_survives_a_conversion_and_goes_back(tmp_path, folder):
    source = mixed(tmp_path, folder)
    convert_draft(source, tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "again"), tensors(source))
    assert config(tmp_path / "again") == config(source)
    result = convert_draft(source, tmp_path / "hf", to_hf=True)
    assert len([note for note in result.notes if "dequantised from 4 bits" in note]) == 7
    assert len([note for note in result.notes if "dequantised from 8 bits" in note]) == 3
    back, full = tensors(tmp_path / "hf"), tensors(folder)
    for name in full:
        exact = name == "fc.weight" or full[name].ndim == 1 or name.startswith("layers.1.self_attn.")
        assert mx.array_equal(back[name], full[name]) == exact, name


def test_to_hf_dequantises_and_says_so(tmp_path, folder, cli):
    convert_draft(folder, tmp_path / "q", quantize=True, q_bits=8, q_group_size=32)
    done = cli("convert", "--hf-path", tmp_path / "q", "--mlx-path", tmp_path / "hf", "--to-hf")
    assert done.code == 0
    assert "layers.0.self_attn.q_proj dequantised from 8 bits\n" in done.err
    assert config(tmp_path / "hf") == config(folder)
    stored, back, full = tensors(tmp_path / "q"), tensors(tmp_path / "hf"), tensors(folder)
    assert {name: array.shape for name, array in back.items()} == {name: array.shape for name, array in full.items()}
    assert {array.dtype for array in back.values()} == {mx.bfloat16}
    path = "layers.0.self_attn.q_proj"
    parts = [stored[f"{path}.{part}"] for part in ("weight", "scales", "biases")]
    assert mx.array_equal(back[f"{path}.weight"], mx.dequantize(*parts, 32, 8))
    assert relative_error(block_logits(tmp_path / "hf"), block_logits(folder)) < 0.06


def test_what_is_dequantised_may_be_given_a_dtype(tmp_path, folder):
    convert_draft(folder, tmp_path / "q", quantize=True, q_bits=8, q_group_size=32)
    convert_draft(tmp_path / "q", tmp_path / "hf", to_hf=True, dtype="float32")
    assert {array.dtype for array in tensors(tmp_path / "hf").values()} == {mx.float32}
    assert config(tmp_path / "hf").dtype == "float32"


def test_an_attention_bias_stays_with_its_matrix(tmp_path):
    source = published(tmp_path / "draft", "float32", attention_bias=True)
    convert_draft(source, tmp_path / "q", quantize=True, q_bits=8, q_group_size=32)
    convert_draft(tmp_path / "q", tmp_path / "hf", to_hf=True)
    for name in ("q", "hf"):
        assert relative_error(block_logits(tmp_path / name), block_logits(source)) < 0.03
        bias = "layers.1.self_attn.k_proj.bias"
        assert mx.array_equal(tensors(tmp_path / name)[bias], tensors(source)[bias])


def test_converting_twice_changes_nothing(tmp_path, folder):
    for name, options in {"plain": {}, "4": {"quantize": True}, "mx": {"quantize": True, "q_mode": "mxfp8"}}.items():
        convert_draft(folder, tmp_path / name, **options)
        convert_draft(tmp_path / name, tmp_path / f"{name} again")
        assert_same_tensors(tensors(tmp_path / f"{name} again"), tensors(tmp_path / name))
        assert config(tmp_path / f"{name} again") == config(tmp_path / name)


def test_quantising_twice_is_refused(tmp_path, folder):
    convert_draft(folder, tmp_path / "q", quantize=True)
    with pytest.raises(DraftError, match="quantised already; quantise the original"):
        convert_draft(tmp_path / "q", tmp_path / "qq", quantize=True, q_bits=8)
    with pytest.raises(DFlashError, match="--dtype can't change a quantised draft"):
        convert_draft(tmp_path / "q", tmp_path / "qq", dtype="float32")
    assert not (tmp_path / "qq").exists()


# dtype


@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_changes_only_when_told(tmp_path, dtype, wanted):
    source = published(tmp_path / "draft", dtype)
    convert_draft(source, tmp_path / "out", dtype=wanted)
    expected = {name: array.astype(DTYPES[wanted]) for name, array in tensors(source).items()}
    assert_same_tensors(tensors(tmp_path / "out"), expected)
    assert config(tmp_path / "out").dtype == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("flags", [[], ["-q"], ["--to-hf"]])
def test_float16_needs_force(tmp_path, cli, dtype, flags):
    source = published(tmp_path / "draft", dtype)
    convert = ("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "--dtype", "float16", *flags)
    done = cli(*convert)
    assert done.code == 1
    assert "--dtype float16 overflows in DFlash drafts" in done.err
    assert "--force" in done.err
    assert not (tmp_path / "out").exists()
    assert cli(*convert, "--force").code == 0
    assert config(tmp_path / "out").dtype == "float16"
    assert tensors(tmp_path / "out")["norm.weight"].dtype == mx.float16


def test_a_wrong_dtype_in_the_config_does_not_hide_bfloat16_tensors(tmp_path, folder):
    (folder / "config.json").write_text(json.dumps(draft_config(dtype="float16")))
    with pytest.raises(DFlashError, match="float16 overflows"):
        convert_draft(folder, tmp_path / "out", dtype="float16")


def test_float16_drafts_stay_float16(tmp_path):
    source = published(tmp_path / "draft", "float16")
    convert_draft(source, tmp_path / "out", dtype="float16")
    assert_same_tensors(tensors(tmp_path / "out"), tensors(source))


# the card


def card(folder: Path) -> tuple[dict[str, Any], str]:
    from huggingface_hub import ModelCard

    loaded = ModelCard.load(folder / "README.md")
    return loaded.data.to_dict(), loaded.text


def test_the_card_names_source_and_licence(tmp_path, folder):
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-4B\n---\n# Draft\n")
    convert_draft(folder, tmp_path / "out-8bit", quantize=True, q_bits=8)
    data, text = card(tmp_path / "out-8bit")
    assert data["license"] == "apache-2.0"
    assert data["base_model"] == "Qwen/Qwen3-4B"
    assert data["library_name"] == "mlx"
    assert "# out-8bit" in text
    assert "draft [draft](.), quantised to 8 bits" in text
    assert "Licence: apache-2.0." in text
    convert_draft(tmp_path / "out-8bit", tmp_path / "back", to_hf=True)
    data, text = card(tmp_path / "back")
    assert data["license"] == "apache-2.0", "it stays with the draft"
    assert "draft [out-8bit](.), in bfloat16" in text


@pytest.mark.parametrize(
    "readme",
    [
        None,
        "# no front matter",
        "---\nlicense: [\n---\n",
        "---\nx: " + "[" * 5000 + "\n---\n",
        "---\n- a list\n---\n",
        b"---\nlicense: \xff\n---\n",
    ],
)
def test_a_source_without_a_licence_is_said_so(tmp_path, folder, monkeypatch, readme):
    if readme is not None:
        (folder / "README.md").write_bytes(readme if isinstance(readme, bytes) else readme.encode())
    monkeypatch.chdir(folder)
    result = convert_draft(".", tmp_path / "out")
    data, text = card(tmp_path / "out")
    assert "license" not in data
    assert "Licence: not stated by the source; ask its authors" in text
    assert "draft [draft](.)" in text
    broken = readme is not None and not str(readme).startswith("#")
    assert any("front matter can't be read" in note for note in result.notes) == broken


def test_only_the_folders_own_licence_files_are_copied(tmp_path, folder):
    (tmp_path / "secret").write_text("secret")
    (folder / "LICENSE").write_text("MIT")
    (folder / "LICENSE.link").symlink_to(tmp_path / "secret")
    (folder / "LICENSE.loop").symlink_to("LICENSE.loop")
    (folder / "LICENSES").mkdir()
    os.mkfifo(folder / "NOTICE")
    (folder / "NOTICE.big").write_bytes(bytes(2**20 + 1))
    result = convert_draft(folder, tmp_path / "out")
    assert left(tmp_path / "out") == ["LICENSE", "README.md", "config.json", "model.safetensors"]
    for name in ("LICENSE.link: a link that", "LICENSE.loop: no", "LICENSES: no", "NOTICE: no", "NOTICE.big: 1048577"):
        assert any(note.startswith(f"not copied: {folder / name}") for note in result.notes), name


# whole or not at all


def left(folder: Path, *known: str) -> list[str]:
    """What lies in a folder, hidden files included, besides what was there."""
    return sorted(p.name for p in folder.iterdir() if p.name not in known)


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "dangling link", "the source"])
def test_nothing_is_overwritten(tmp_path, folder, cli, kind):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "dangling link":
        out.symlink_to(tmp_path / "nowhere")
    elif kind == "the source":
        out = folder
    else:
        out.mkdir()
        if kind == "folder":
            (out / "config.json").write_text("mine")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    done = cli("convert", "--hf-path", folder, "--mlx-path", out)
    assert done.code == 1
    assert f"{out} exists already; remove it or choose another --mlx-path" in done.err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert left(tmp_path, "draft", "out") == []


@pytest.fixture
def interrupted(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """Has something happen when the second of several files is about to be written."""

    def at_second_file(happen: Callable[[], None]) -> None:
        save = mx.save_safetensors
        calls = []

        def counted(*args: Any, **options: Any) -> None:
            calls.append(args)
            if len(calls) == 2:
                happen()
            save(*args, **options)

        monkeypatch.setattr("dflash_mlx.convert.writer.SHARD_BYTES", 20_000)
        monkeypatch.setattr(mx, "save_safetensors", counted)

    return at_second_file


def test_an_exception_in_the_middle_leaves_nothing(tmp_path, folder, interrupted):
    def fail() -> None:
        assert [p for p in left(tmp_path / "a" / "b") if p.startswith(".out.")], "it writes beside the destination"
        assert not (tmp_path / "a" / "b" / "out").exists()
        raise ZeroDivisionError

    interrupted(fail)
    with pytest.raises(ZeroDivisionError):
        convert_draft(folder, tmp_path / "a" / "b" / "out")
    assert left(tmp_path) == ["draft"]


@pytest.fixture
def obeyed():
    """Ctrl-C interrupts, also where the suite was started under nohup and inherits that it is ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path, folder, cli, interrupted, number, code, obeyed):
    interrupted(lambda: os.kill(os.getpid(), number))
    done = cli("convert", "--hf-path", folder, "--mlx-path", tmp_path / "out")
    assert done.code == code
    assert done.out == ""
    assert left(tmp_path) == ["draft"]


def test_a_killed_run_leaves_no_destination(tmp_path, folder):
    code = (
        "import os, sys, mlx.core as mx; from dflash_mlx.cli import main\n"
        "save = mx.save_safetensors\n"
        "mx.save_safetensors = lambda *a, **k: (save(*a, **k), os.kill(os.getpid(), 9))\n"
        "main(['convert', '--hf-path', sys.argv[1], '--mlx-path', sys.argv[2]])"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, tmp_path / "out"], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert [name for name in left(tmp_path, "draft") if not name.startswith(".out.")] == []
    (dead,) = left(tmp_path, "draft")
    others = [tmp_path / ".out.original", tmp_path / ".output.dflash-mlx-abcdefgh", tmp_path / ".out.dflash-mlx-link"]
    for other in others[:2]:
        other.mkdir()
    others[2].symlink_to(folder)
    result = convert_draft(folder, tmp_path / "out")
    assert f"{tmp_path / dead} was removed: left by a killed conversion" in result.notes
    assert sorted(left(tmp_path, "draft", "out")) == sorted(other.name for other in others)
    assert_same_tensors(tensors(tmp_path / "out"), tensors(folder))


@pytest.mark.parametrize("late", [False, True])
def test_a_conversion_at_work_is_left_alone(tmp_path, folder, late):
    """Another process writes to the same place and goes on when ours is done."""
    code = (
        "import sys, mlx.core as mx; from dflash_mlx.cli import main\n"
        "save = mx.save_safetensors\n"
        "mx.save_safetensors = lambda *a, **k: (save(*a, **k), print('at work', flush=True), sys.stdin.readline())\n"
        "sys.exit(main(['convert', '--hf-path', sys.argv[1], '--mlx-path', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, folder, tmp_path / "out"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        assert other.stdout.readline() == "at work\n"
        (theirs,) = left(tmp_path, "draft")
        result = convert_draft(folder, tmp_path / "out")
        assert not any("killed" in note for note in result.notes)
        assert left(tmp_path, "draft", "out") == [theirs]
        if late:
            assert "was made by somebody else meanwhile" in other.communicate("go on\n", timeout=60)[1]
        else:
            shutil.move(tmp_path / "out", tmp_path / "ours")
            assert other.communicate("go on\n", timeout=60)[1] == ""
            assert_same_tensors(tensors(tmp_path / "out"), tensors(tmp_path / "ours"))
    assert left(tmp_path, "draft", "ours") == ["out"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, folder, cli):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        done = cli("convert", "--hf-path", folder, "--mlx-path", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert f"{tmp_path / 'out'}: can't be written" in done.err
    assert "is the disk full?" in done.err
    assert left(tmp_path) == ["draft"]


def test_the_result_can_be_read_by_others(tmp_path, folder):
    convert_draft(folder, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


# --inspect


def test_inspect_says_what_a_draft_is(folder, cli):
    done = cli("convert", "--hf-path", folder, "--inspect")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    numbers = sum(array.size for array in tensors(folder).values())
    assert lines[0] == f"{folder}: DFlash draft"
    assert lines[1] == f"tensors: {len(tensors(folder))}, parameters: {numbers:,}, {2 * numbers / 1e6:.1f} MB"
    assert lines[2] == f"  BF16: {len(tensors(folder))} tensors, {numbers:,} numbers, {2 * numbers / 1e6:.1f} MB"
    for line in ("block_size: 8", "target_layer_ids: (0, 2)", "mask_token_id: 255", "rope_theta: 10000.0"):
        assert line in lines
    assert lines[-1] == "fits targets with: hidden_size 64, vocab_size 256, num_hidden_layers 4"


def test_inspect_as_json(tmp_path, folder, cli):
    convert_draft(folder, tmp_path / "q", quantize=True, q_group_size=32)
    done = cli("convert", "--hf-path", tmp_path / "q", "--inspect", "--json")
    facts = json.loads(done.out)
    assert (done.code, done.err, facts["problem"]) == (0, "", None)
    assert facts["kind"] == "DFlash draft"
    assert facts["quantized"] == 14
    assert facts["config"]["block_size"] == 8
    assert facts["config"]["quantization"] == {"bits": 4, "group_size": 32, "mode": "affine"}
    assert facts["census"]["U32"]["tensors"] == 14
    assert facts["census"]["BF16"]["tensors"] == 2 * 14 + 2 + 1 + 2 * 4
    assert facts["nbytes"] == sum(array.nbytes for array in tensors(tmp_path / "q").values())
    assert facts["fits"] == {"hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 4, "base_model": None}
    text = cli("convert", "--hf-path", tmp_path / "q", "--inspect").out
    assert "  quantised matrices: 14\n" in text


def test_inspect_names_a_target_of_another_width_and_unknown_depth(tmp_path):
    source = save_draft(
        tmp_path / "wide",
        make_draft(target_hidden_size=128),
        draft_config(target_hidden_size=128, num_target_layers=None),
    )
    assert inspect_draft(source).fits == {
        "hidden_size": 128, "vocab_size": 256, "num_hidden_layers": "more than 2", "base_model": None,
    }  # fmt: skip


# extra tensors, extra config -> kind, what the problem says
OTHERS = {
    "DFlash 2": (["candidate_selector.weight"], {}, "DFlash 2 draft", "config.json describes a DFlash (v1) draft"),
    "DSpark": (["markov_head.weight"], {}, "DSpark draft", "DSpark"),
    "Laguna": (["layers.0.self_attn.g_proj.weight"], {}, "DFlash draft", "gated attention"),
    "Muse": (["encoder.fc.weight"], {}, "DFlash draft", "are both fc.weight"),
    "own head": (["lm_head.weight", "d2t"], {}, "DFlash draft", "reduced vocabulary"),
    "speculators": (
        [],
        {"transformer_layer_config": {}},
        "DFlash draft in the `speculators` layout",
        "transformer_layer_config: missing",
    ),
    "fp8": (["layers.0.mlp.up_proj.weight_scale"], {}, "DFlash draft", "is a scheme that is not read"),
    "unheard of": (["layers.0.surprise"], {}, "DFlash draft", "unknown tensor 'layers.0.surprise'"),
    "no rope": ([], {"rope_theta": None}, "DFlash draft", "rope_theta"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_inspect_names_drafts_that_cannot_be_run(folder, cli, name):
    extra, changes, kind, problem = OTHERS[name]
    write(folder, {**tensors(folder), **{tensor: mx.zeros((8, 8)) for tensor in extra}})
    (folder / "config.json").write_text(json.dumps(draft_config(**changes)))
    done = cli("convert", "--hf-path", folder, "--inspect")
    assert (done.code, done.err) == (0, "")
    first, second = done.out.splitlines()[:2]
    assert first == f"{folder}: {kind}"
    assert second.startswith("can't be run: ")
    assert problem in second
    facts = json.loads(cli("convert", "--hf-path", folder, "--inspect", "--json").out)
    assert (facts["kind"], problem in facts["problem"]) == (kind, True)


def test_inspect_of_a_target(tmp_path, cli):
    from tiny import make_target, target_config

    save_target(tmp_path / "target", make_target(), target_config("qwen3"))
    done = cli("convert", "--hf-path", tmp_path / "target", "--inspect")
    assert done.code == 0
    assert done.out.startswith(f"{tmp_path / 'target'}: target, or a draft with its own embedding\ncan't be run: ")


def test_inspect_reads_headers_only(tmp_path, cli, monkeypatch):
    """A file of 5 GB without a byte of data on the disk."""
    facts = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 7,
    }  # fmt: skip
    source = tmp_path / "large"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(draft_config(**facts)))
    header, place = {}, 0
    for name, shape in expected_shapes(config(source)).items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + place)
    for module, name in ((mx, "load"), (np, "fromfile")):
        monkeypatch.setattr(module, name, None)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    done = cli("convert", "--hf-path", source, "--inspect")
    assert mx.get_peak_memory() - before < 2**20
    assert done.code == 0
    assert f"{place / 1e6:.1f} MB" in done.out
    assert place > 5e9
    assert "can't be run" not in done.out


def test_inspect_does_not_mind_what_the_data_are(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    data[start:] = b"\xff" * (len(data) - start)  # NaN
    file.write_bytes(data)
    assert inspect_draft(folder).problem is None


# the hub, and the other way to start it

HUB_WORKER = """
import contextlib, io, json, sys
from dflash_mlx.cli import main
outcomes = {}
for case, argv in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    outcomes[case] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(outcomes))
"""


def run_with_hub(hub: FakeHub, home: Path, calls: dict[str, list[str]]) -> dict[str, tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", HUB_WORKER, json.dumps(calls)],
        env=hub.env(home, HF_HUB_DISABLE_PROGRESS_BARS="1"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {case: tuple(outcome) for case, outcome in json.loads(done.stdout.splitlines()[-1]).items()}


def test_repos_of_the_hub(tmp_path, folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    old = published(tmp_path / "old", block_size=4)
    home, out = tmp_path / "home", tmp_path / "out"
    with FakeHub() as hub:
        sha = hub.add_repo("some-lab/draft", old)
        hub.add_repo("some-lab/draft", folder)
        hub.add_repo("some-lab/locked", folder, gated=True)
        looked = run_with_hub(
            hub, home, {"inspect": ["convert", "--hf-path", "some-lab/draft", "--inspect", "--json"]}
        )["inspect"]
        assert looked[0] == 0, looked
        assert list(home.rglob("*.safetensors")) == [], "no weights were downloaded"
        convert = ["convert", "--hf-path", "some-lab/draft", "--mlx-path"]
        done = run_with_hub(
            hub,
            home,
            {
                "new": [*convert, str(out / "new"), "--upload-repo", "me/new"],
                "old": [*convert, str(out / "old"), "--revision", sha],
                "no right": [*convert, str(out / "kept"), "--upload-repo", "some-lab/locked"],
                "no name": [*convert, str(out / "none"), "--upload-repo", "not a name"],
                "gated": ["convert", "--hf-path", "some-lab/locked", "--mlx-path", str(out / "none")],
            },
        )
    facts = json.loads(looked[1])
    assert facts["source"] == "some-lab/draft"
    assert facts["config"]["block_size"] == 8
    assert facts["nbytes"] == inspect_draft(folder).nbytes
    assert [done[case][0] for case in ("new", "old", "no right", "no name", "gated")] == [0, 0, 1, 1, 1], done
    assert_same_tensors(tensors(out / "new"), tensors(folder))
    assert hub.uploads["me/new"] == {p.name: p.read_bytes() for p in (out / "new").iterdir()}
    assert sorted(hub.uploads["me/new"]) == ["README.md", "config.json", "model.safetensors"]
    data, text = card(out / "new")
    assert data["license"] == "mit"
    assert "[some-lab/draft](https://huggingface.co/some-lab/draft), in bfloat16" in text
    assert config(out / "old").block_size == 4
    assert f"[some-lab/draft](https://huggingface.co/some-lab/draft) at revision {sha}" in card(out / "old")[1]
    refused = {case: done[case][2] for case in ("no right", "no name", "gated")}
    assert all(err.count("\n") == 1 for err in refused.values()), refused
    assert "some-lab/locked: upload failed" in refused["no right"]
    assert f"the result is in {out / 'kept'}" in refused["no right"]
    assert_same_tensors(tensors(out / "kept"), tensors(folder))
    assert "--upload-repo 'not a name' is no valid repo name" in refused["no name"]
    assert "gated" in refused["gated"]
    assert left(out) == ["kept", "new", "old"]


def test_an_upload_without_a_hub_keeps_the_result(tmp_path, folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    with FakeHub() as gone:
        pass
    argv = ["convert", "--hf-path", str(folder), "--mlx-path", str(tmp_path / "out"), "--upload-repo", "me/x"]
    code, out, err = run_with_hub(gone, tmp_path / "home", {"it": argv})["it"]
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "me/x: upload failed" in err
    assert_same_tensors(tensors(tmp_path / "out"), tensors(folder))


def test_the_module_is_the_same_command(cli):
    argv = ["--hf-path", "demo", "--inspect"]
    done = subprocess.run(
        [sys.executable, "-m", "dflash_mlx.convert", *argv], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == cli("convert", *argv).out
    assert done.stdout.startswith("demo: DFlash draft\n")


def test_the_demo_draft_converts(tmp_path, cli, demo_pair):
    assert cli("convert", "--hf-path", "demo", "--mlx-path", tmp_path / "out", "-q", "--q-bits", "8").code == 0
    target, draft, _ = demo_pair
    quantized = load_draft(tmp_path / "out", target)
    assert quantized.config.block_size == draft.config.block_size
    assert len(tree_flatten(quantized.parameters())) > len(tree_flatten(draft.parameters()))
    assert read_headers(demo.DRAFT)["norm.weight"].dtype == read_headers(tmp_path / "out")["norm.weight"].dtype
