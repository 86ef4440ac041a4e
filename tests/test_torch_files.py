"""PyTorch's files: the same draft as its safetensors, through torch alone, and no code of a file ever runs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import draft_config, make_draft, save_draft

from dflash_mlx import DraftError, convert_draft, inspect_draft, load_draft
from dflash_mlx.checkpoint.readers import load_file, read_headers
from dflash_mlx.checkpoint.torch_files import mask_embedding
from dflash_mlx.draft import DFlashDraftModel

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = [pytest.mark.reference, pytest.mark.skipif(torch is None, reason="needs torch")]


def with_torch(test: Any) -> Any:
    for mark in needs_torch:
        test = mark(test)
    return test


@pytest.fixture
def draft() -> DFlashDraftModel:
    return make_draft(mx.bfloat16)


def state_of(draft: DFlashDraftModel, prefix: str = "") -> dict[str, Any]:
    return {
        prefix + name: torch.from_numpy(np.array(array.astype(mx.float32))).to(torch.bfloat16)
        for name, array in tree_flatten(draft.parameters())
    }


def published(folder: Path, draft: DFlashDraftModel, file: str = "pytorch_model.bin", state: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config(dtype="bfloat16")))
    torch.save(state_of(draft) if state is None else state, folder / file)
    return folder


def assert_same(folder: Path, draft: DFlashDraftModel) -> None:
    headers = read_headers(folder)
    expected = dict(tree_flatten(draft.parameters()))
    assert set(headers) == set(expected)
    for name, info in headers.items():
        assert (info.dtype, info.shape) == ("BF16", expected[name].shape)
        assert mx.array_equal(load_file(info.file)[name], expected[name])
    loaded = dict(tree_flatten(load_draft(folder).parameters()))
    assert all(loaded[name].dtype == mx.bfloat16 and mx.array_equal(loaded[name], expected[name]) for name in expected)


@with_torch
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "draft.pth"])
def test_a_file_is_the_draft_it_holds(tmp_path, draft, file):
    assert_same(published(tmp_path, draft, file), draft)


@with_torch
@pytest.mark.parametrize("key", ["draft_state_dict", "state_dict"])
def test_a_trainers_checkpoint_holds_the_draft_beside_other_things(tmp_path, draft, key):
    state = {key: state_of(draft), "epoch": 3, "optimizer": {"step": torch.ones(2)}}
    assert_same(published(tmp_path, draft, "training_state.pt", state), draft)


@with_torch
def test_the_model_is_taken_where_a_trainer_left_its_state_too(tmp_path, draft):
    published(tmp_path, draft)
    torch.save({"draft_state_dict": {"norm.weight": torch.ones(3)}}, tmp_path / "training_state.pt")
    for other in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
        (tmp_path / other).write_bytes(b"not read")
    assert_same(tmp_path, draft)


@with_torch
def test_shards_by_their_index(tmp_path, draft):
    state = state_of(draft)
    names = sorted(state)
    files = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(names)}
    published(tmp_path, draft, "unused.bin", {"x": torch.ones(1)})
    for file in set(files.values()):
        torch.save({name: state[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert_same(tmp_path, draft)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(DraftError, match="weight_map must name files of this folder"):
        read_headers(tmp_path)


@with_torch
def test_safetensors_win(tmp_path, draft):
    published(tmp_path, draft)
    save_draft(tmp_path, make_draft(mx.float32, seed=5))
    assert {info.file.name for info in read_headers(tmp_path).values()} == {"model.safetensors"}


@with_torch
def test_every_dtype_is_read(tmp_path):
    values = {
        "a": torch.tensor([1.5, -2]), "b": torch.tensor([1.5, -2], dtype=torch.float16),
        "c": torch.tensor([1.5, -2], dtype=torch.float64), "d": torch.tensor([1, 2**40]),
        "e": torch.tensor([True, False]), "f": torch.tensor([1.5, -2]).to(torch.float8_e4m3fn),
        "g": torch.arange(6.0).reshape(2, 3).T,
    }  # fmt: skip
    torch.save(values, tmp_path / "m.bin")
    headers, arrays = read_headers(tmp_path), load_file(tmp_path / "m.bin")
    assert [headers[name].dtype for name in "abcdefg"] == ["F32", "F16", "F64", "I64", "BOOL", "F8_E4M3", "F32"]
    for name in "abcde":
        assert arrays[name].tolist() == values[name].tolist()
    assert mx.from_fp8(arrays["f"], dtype=mx.float32).tolist() == [1.5, -2]
    assert arrays["g"].tolist() == values["g"].tolist()


@with_torch
def test_a_draft_of_pytorch_converts(tmp_path, draft):
    published(tmp_path / "draft", draft)
    convert_draft(tmp_path / "draft", tmp_path / "out")
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name, array in tree_flatten(draft.parameters()):
        assert mx.array_equal(written[name], array)
    assert inspect_draft(tmp_path / "draft").problem is None


# the row of the mask token


@with_torch
@pytest.mark.parametrize(
    ("state", "token"),
    [
        (lambda row: row, None),
        (lambda row: row[None], None),
        (lambda row: {"embedding": row, "mask_token_id": 7}, 7),
        (lambda row: {"embedding": row[None], "mask_token_id": torch.tensor([7])}, 7),
        (lambda row: {"embedding": row}, None),
    ],
)
def test_the_mask_embedding_is_a_row_and_may_name_its_token(tmp_path, state, token):
    row = torch.arange(8).to(torch.bfloat16)
    torch.save(state(row), tmp_path / "mask_embedding.pt")
    found = mask_embedding(tmp_path)
    assert found is not None
    assert found[0].dtype == mx.bfloat16
    assert found[0].tolist() == row.tolist()
    assert found[1] == token


def test_most_drafts_have_no_mask_embedding(tmp_path):
    assert mask_embedding(tmp_path) is None


def named(token: Any) -> Any:
    return {"embedding": torch.ones(8), "mask_token_id": torch.tensor(token)}


@with_torch
@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"weight": [1, 2]}, "expected one row of numbers"),
        (torch.ones((2, 8)) if torch else None, "expected one row of numbers"),
        (torch.ones(8, dtype=torch.int64) if torch else None, "expected one row of numbers"),
        ({"embedding": torch.ones(8), "mask_token_id": -1} if torch else None, "mask_token_id: -1 is not a token id"),
        ({"embedding": torch.ones(8), "mask_token_id": "7"} if torch else None, "mask_token_id: '7' is not a token id"),
        (torch.tensor(1.0) if torch else None, "expected one row of numbers"),
        (torch.ones(8).to(torch.float8_e4m3fn) if torch else None, "expected one row of numbers"),
        (torch.zeros(1).expand(2**33) if torch else None, "embedding has shape .8589934592. but fewer bytes"),
        (torch.ones(8).to_sparse() if torch else None, "embedding is no plain tensor"),
        (torch.ones(8, device="meta") if torch else None, "embedding is no plain tensor"),
        (torch.ones(8, dtype=torch.complex64) if torch else None, "embedding has the dtype complex64"),
        *((named(token), "mask_token_id") for token in (float("inf"), float("nan"), 7.0, 1j, True) if torch),
    ],
)
def test_a_mask_embedding_of_another_form_is_refused(tmp_path, state, says):
    torch.save(state, tmp_path / "mask_embedding.pt")
    with pytest.raises(DraftError, match=says) as caught:
        mask_embedding(tmp_path)
    assert "\n" not in str(caught.value)


@with_torch
def test_a_tensor_stored_as_the_negative_of_another_is_read(tmp_path):
    torch.save({"norm.weight": torch._neg_view(torch.ones(2))}, tmp_path / "m.bin")
    assert load_file(tmp_path / "m.bin")["norm.weight"].tolist() == [-1.0, -1.0]


# strange files


class Code:
    """Unpickling this runs a command."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@with_torch
@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "training_state.pt", "mask_embedding.pt"])
def test_code_in_a_file_does_not_run(tmp_path, draft, form, file):
    proof, folder = tmp_path / "it-ran", tmp_path / "draft"
    published(folder, draft)
    code = {"norm.weight": torch.ones(3), "x": Code(f"touch {proof}")}
    if form == "pickle":
        (folder / file).write_bytes(pickle.dumps(code))
    else:
        torch.save(code, folder / file, _use_new_zipfile_serialization=form == "zip")
    if file == "training_state.pt":
        (folder / "pytorch_model.bin").unlink()
    says = "`posix.system`.*nothing in the file was run" if form == "zip" else "not as torch.save writes it today"
    with pytest.raises(DraftError, match=f"{file}: .*" + says) as caught:
        mask_embedding(folder) if file == "mask_embedding.pt" else load_draft(folder)
    assert "\n" not in str(caught.value)
    assert not proof.exists()
    os.system(f"touch {proof}")  # the command itself works
    assert proof.exists()


@with_torch
@pytest.mark.parametrize(
    ("state", "says"),
    [
        (lambda: [torch.ones(2)], "holds no tensors by name"),
        (lambda: {}, "holds no tensors by name"),
        (lambda: {"a": 1}, "'a' is no tensor; save the draft's state dict alone"),
        (lambda: {1: torch.ones(2)}, "1 is no tensor"),
        (lambda: {"a\nb": torch.ones(2)}, "is no tensor name"),
        (lambda: {"a": torch.ones((2, 2)).to_sparse()}, "a is no plain tensor"),
        (lambda: {"a": torch.ones(2, device="meta")}, "a is no plain tensor"),
        (lambda: {"a": torch.ones(1).expand(10**6, 10**6)}, "fewer bytes; the file is damaged"),
        (lambda: {"a": torch.ones(2, dtype=torch.complex64)}, "dtype complex64, which is not read"),
    ],
)
def test_what_is_no_draft_is_refused(tmp_path, state, says):
    torch.save(state(), tmp_path / "m.bin")
    with pytest.raises(DraftError, match=says) as caught:
        read_headers(tmp_path)
    assert "\n" not in str(caught.value)


@with_torch
@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:200], lambda d: d[: len(d) // 2], lambda d: b"x" * 999])
def test_a_damaged_file_is_one_line(tmp_path, draft, damage):
    file = published(tmp_path, draft) / "pytorch_model.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DraftError, match=r"pytorch_model\.bin: ") as caught:
        load_draft(tmp_path)
    assert "\n" not in str(caught.value)


@with_torch
def test_compressed_data_are_refused(tmp_path, draft):
    """A few kB could become as many GB."""
    file = published(tmp_path, draft) / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(DraftError, match=r"not as torch\.save writes it today"):
        read_headers(tmp_path)


def test_without_torch_it_is_said_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(draft_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"any")
    code = f"""
        import sys
        sys.modules["torch"] = None
        import dflash_mlx
        try:
            dflash_mlx.load_draft({str(tmp_path)!r})
        except dflash_mlx.DraftError as error:
            print(error)
    """
    out = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True, timeout=60)
    assert out.startswith(f"{tmp_path}/pytorch_model.bin: no safetensors file but PyTorch's, which needs torch: pip ")
    assert "save the tensors as safetensors on a machine that has it" in out
    assert out.count("\n") == 1
