"""A stranger's folder: nothing outside it is opened, nothing of it runs, memory stays bounded, and the line is one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import draft_config, make_draft, save_draft

from dflash_mlx import DraftError, convert_draft, inspect_draft, load_draft
from dflash_mlx.checkpoint.folder import MAX_HEADER
from dflash_mlx.checkpoint.readers import file_headers, load_file, read_headers
from dflash_mlx.checkpoint.tensor_info import MAX_TENSORS, TensorInfo

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_draft(tmp_path / "draft", make_draft(), draft_config())


def header_file(file: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file of this header: an object, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(shape: Any, begin: Any = 0, stop: Any = 4, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


def refused(action: Callable[[], Any], says: str, where: str) -> None:
    with pytest.raises(DraftError, match=says) as caught:
        action()
    message = str(caught.value)
    assert where in message
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 600


# headers

MANY = "7" * 4000
HEADERS: dict[str, tuple[Any, str]] = {
    "two tensors of the same bytes": ({"a": entry([1]), "b": entry([1])}, "a and b overlap; the file is damaged"),
    "tensors that share some bytes": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "a and b overlap"),
    "a name twice": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', "names 'a' twice"),
    "a field twice": (b'{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', "names 'dtype' twice"),
    "a dimension below 0": ({"a": entry([-1, -1])}, "malformed header entry for 'a'"),
    "a dimension beyond counting": ({"a": entry([2**31])}, "malformed header entry"),
    "dimensions whose product wraps": ({"a": entry([2**31 - 1] * 8, 0, 0)}, "a has 0 bytes, its shape .* needs "),
    "a dimension of 4000 digits": (b'{"a":' + json.dumps(entry([7])).replace("7", MANY).encode() + b"}", "malformed"),
    "offsets of 4000 digits": (b'{"a":' + json.dumps(entry([1], 0, 7)).replace("7", MANY).encode() + b"}", "malformed"),
    "a thousand dimensions": ({"a": entry([1] * 1000)}, "malformed"),
    "true as a dimension": ({"a": entry([True])}, "malformed"),
    "a float as a dimension": ({"a": entry([1.0])}, "malformed"),
    "a shape of text": ({"a": entry("11")}, "malformed"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, "malformed"),
    "offsets backwards": ({"a": entry([1], 4, 0)}, "malformed"),
    "an offset below 0": ({"a": entry([1], -4, 0)}, "malformed"),
    "data beyond the file": ({"a": entry([2**20], 0, 2**22)}, "cut short: .*; download it again"),
    "a dtype that is not known": ({"a": entry([1], dtype="F4")}, "a has the dtype 'F4', which is not read"),
    "a dtype of a thousand letters": ({"a": entry([1], dtype="F" * 1000)}, "which is not read"),
    "a dtype that is a list": ({"a": entry([1], dtype=["F32"])}, "malformed"),
    "a name of several lines": ({"a\nb": entry([1])}, "is no tensor name"),
    "a name that clears the screen": ({"a\x1b[2J": entry([1])}, "is no tensor name"),
    "a name that reverses the line": ({"a\u202eb": entry([1])}, "is no tensor name"),
    "no name": ({"": entry([1])}, "is no tensor name"),
    "a name of a page": ({"a" * 5000: entry([1])}, "is no tensor name"),
    "text that is not UTF-8": (b'{"\xff": 1}', "its header is no JSON object"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "its header is no JSON object"),
    "objects nested for ever": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "its header is no JSON object"),
    "lists nested for ever": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "its header is no JSON object"),
    "lists nested deep": (b'{"a":' + b"[" * 400 + b"]" * 400 + b"}", "malformed header entry for 'a'"),
    "a string that does not end": (b'{"a', "its header is no JSON object"),
    "an entry of null": ({"a": None}, "malformed header entry for 'a': None"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_strange_header_is_one_line(folder, name):
    header, says = HEADERS[name]
    header_file(folder / FILE, header, bytes(64))
    refused(lambda: load_draft(folder), says, f"{folder / FILE}: ")


def test_bytes_between_tensors_do_no_harm(tmp_path):
    file = header_file(tmp_path / FILE, {"a": entry([1], 4, 8), "b": entry([0], 2, 2)}, struct.pack("<2f", 1, 2) + b"x")
    assert {name: array.tolist() for name, array in load_file(file).items()} == {"a": [2.0], "b": []}


def test_more_tensors_than_any_draft_has(tmp_path):
    names = MAX_TENSORS // 2 + 1
    for file in ("a", "b"):
        header_file(tmp_path / f"{file}.safetensors", {f"{file}{i}": entry([0], 0, 0) for i in range(names)})
    refused(lambda: read_headers(tmp_path), f"more than {MAX_TENSORS} tensors", str(tmp_path))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_header_is_read_or_refused(tmp_path, data):
    numbers = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**63, 2**70, 1.5, None, "4", True]))
    entries = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "BF16", "U8", "I64", "F4", 7]),
            "shape": st.one_of(st.lists(numbers, max_size=3), numbers),
            "data_offsets": st.one_of(st.lists(numbers, max_size=3), numbers),
        },
    )
    header = data.draw(st.dictionaries(st.text(max_size=3), st.one_of(entries, numbers), max_size=3))
    file = header_file(tmp_path / FILE, header, bytes(16))
    tensors: dict[str, TensorInfo] = {}
    with contextlib.suppress(DraftError):
        tensors = file_headers(file)
    size = file.stat().st_size
    spans = sorted((info.offset, info.offset + info.nbytes) for info in tensors.values())
    assert all(8 < begin <= stop <= size for begin, stop in spans)
    assert all(stop <= begin for (_, stop), (begin, _) in itertools.pairwise(spans))


# paths


def named(folder: Path, path: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": path}}))


def moved(folder: Path, name: str, to: Path) -> None:
    """Put a file elsewhere and a link in its place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    (folder / name).rename(to)
    (folder / name).symlink_to(to)


PATHS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an absolute path": (lambda f: named(f, "/etc/passwd"), "weight_map must name files of this folder"),
    "a path upwards": (lambda f: named(f, "../secret.safetensors"), "weight_map must name files of this folder"),
    "the folder above": (lambda f: named(f, ".."), "named by model.safetensors.index.json but missing"),
    "a subfolder": (lambda f: named(f, "sub/model.safetensors"), "weight_map must name files of this folder"),
    "a path of Windows": (lambda f: named(f, "..\\secret.safetensors"), "but missing"),
    "a path with a zero": (lambda f: named(f, "a\0b"), "weight_map must name files of this folder"),
    "weights that are a link": (lambda f: moved(f, FILE, f.parent / "s.safetensors"), "leads out of the folder, to /"),
    "a config that is a link": (lambda f: moved(f, "config.json", f.parent / "c.json"), "leads out of the folder"),
    "an index that is a link": (
        lambda f: (named(f, FILE), moved(f, INDEX, f.parent / "i.json")),
        "leads out of the folder",
    ),
    "a link in a link": (
        lambda f: (moved(f, FILE, f.parent / "a" / "b"), moved(f.parent / "a", "b", f.parent / "c")),
        "leads out of the folder",
    ),
    "a card that is a link": (lambda f: (f / "README.md").symlink_to("/etc/passwd"), "leads out of the folder"),
    "a shard that is a link": (
        lambda f: (moved(f, FILE, f.parent / "s"), named(f, FILE)),
        "leads out of the folder",
    ),
    "a link to nothing": (
        lambda f: ((f / FILE).unlink(), (f / FILE).symlink_to(f / "gone")),
        "no regular file",
    ),
    "a link to itself": (lambda f: ((f / FILE).unlink(), (f / FILE).symlink_to(FILE)), "no regular file"),
    "a pipe": (lambda f: os.mkfifo(f / "x.safetensors"), "x.safetensors: no regular file; remove it or download"),
    "a device": (lambda f: (f / "x.safetensors").symlink_to("/dev/zero"), "no regular file"),
    "a folder": (lambda f: (f / "x.safetensors").mkdir(), "no regular file"),
    "a pipe as config": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
        "config.json: no such file",
    ),
    "a pipe of PyTorch": (lambda f: ((f / FILE).unlink(), os.mkfifo(f / "x.bin")), "x.bin: no regular file"),
    "a pipe of llama.cpp": (lambda f: ((f / FILE).unlink(), os.mkfifo(f / "x.gguf")), "x.gguf: no regular file"),
}  # fmt: skip


@pytest.fixture(scope="module")
def opened() -> list[str]:
    """Every file that is opened from now on."""
    files: list[str] = []
    sys.addaudithook(lambda event, args: files.append(str(args[0])) if event == "open" else None)
    return files


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", PATHS)
def test_nothing_outside_the_folder_is_opened(tmp_path, folder, name, opened):
    damage, says = PATHS[name]
    damage(folder)
    for action in (lambda: load_draft(folder), lambda: convert_draft(folder, tmp_path / "out")):
        opened.clear()
        refused(action, says, str(folder))
        outside = [file for file in opened if file.startswith((str(tmp_path), "/etc", "/dev"))]
        assert [file for file in outside if not file.startswith(f"{folder}/")] == []
    assert not (tmp_path / "out").exists()


def test_the_hubs_cache_and_links_within_a_folder_are_read(tmp_path):
    """The cache holds `snapshots/<commit>/<file>` as links to `blobs/<hash>` beside it."""
    repo = tmp_path / "hub" / "models--org--draft"
    snapshot = save_draft(repo / "snapshots" / "0123abc", make_draft(), draft_config())
    (repo / "blobs").mkdir()
    for name in (FILE, "config.json"):
        (snapshot / name).rename(repo / "blobs" / f"hash-of-{name}")
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / f"hash-of-{name}")
    assert load_draft(snapshot).config.block_size == 8
    (tmp_path / "link").symlink_to(snapshot)  # which the user named
    assert load_draft(tmp_path / "link").config.block_size == 8
    (snapshot / "again.safetensors").symlink_to(FILE)
    with pytest.raises(DraftError, match="is also in"):
        read_headers(snapshot)


def test_another_repos_blobs_are_outside(tmp_path):
    hub = tmp_path / "hub"
    snapshot = save_draft(hub / "models--org--draft" / "snapshots" / "0123abc", make_draft(), draft_config())
    moved(snapshot, FILE, hub / "models--org--private" / "blobs" / "hash")
    refused(lambda: load_draft(snapshot), "leads out of the folder", str(snapshot / FILE))


# code

CODE = "raise SystemExit('the code of the checkpoint ran')"


def test_no_code_of_a_checkpoint_runs(tmp_path, folder, monkeypatch):
    """`dflash.py` and `trust_remote_code` are of PyTorch's world; a chat template is a program too."""
    for name in ("dflash.py", "config.py", "sitecustomize.py", "mlx.py", "model.py"):
        (folder / name).write_text(CODE)
    changes = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "trust_remote_code": True, "custom_code": True}
    (folder / "config.json").write_text(json.dumps(draft_config(**changes)))
    (folder / "chat_template.jinja").write_text("{% for a in range(10**9) %}{{ a }}{% endfor %}")
    monkeypatch.chdir(folder)
    assert load_draft(folder).config.block_size == 8
    assert inspect_draft(folder).problem is None
    convert_draft(folder, tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"README.md", "config.json", FILE}
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text()


# memory


def large_header(folder: Path) -> None:
    header_file(folder / FILE, b'{"a":[' + b"[]," * (64 * 2**20 // 3) + b"[]]}")


def most_of_a_header(folder: Path) -> None:
    header_file(folder / FILE, b'{"a":[' + b"[]," * ((MAX_HEADER - 100) // 3) + b"[]]}")


def large_index(folder: Path) -> None:
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {f"layers.{i}.mlp.up_proj.weight": FILE for i in range(10**6)}})
    )


def large_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": [' + "[]," * 10**7 + "[]]}")


def sparse_header(folder: Path) -> None:
    """A terabyte that takes no room on the disk."""
    with (folder / FILE).open("wb") as stream:
        stream.write(struct.pack("<Q", 2**39))
        stream.truncate(2**40)


def configured(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(draft_config(**changes))) and None


def taps(count: int) -> Callable[[Path], None]:
    nested = {"target_layer_ids": list(range(count)), "mask_token_id": 255}
    return configured(num_target_layers=None, dflash_config=nested)


MEMORY: dict[str, tuple[Callable[[Path], None], str]] = {
    "a header of 64 MB": (large_header, "a header of .* bytes, .* is the most"),
    "a header as large as may be": (most_of_a_header, "malformed header entry for 'a'"),
    "an index of a million": (large_index, "index.json: .* bytes, .* is the most"),
    "a config of 30 MB": (large_config, "config.json: .* bytes, .* is the most"),
    "a header of half a terabyte": (sparse_header, "a header of 549755813888 bytes"),
    "a million layers": (configured(num_hidden_layers=10**6), "num_hidden_layers: 1000000 is out of range"),
    "a hundred thousand taps": (taps(10**5), "fc.weight has shape"),
    "a million taps": (taps(10**6), "config.json: .* bytes, .* is the most"),
    "the widest matrices": (configured(intermediate_size=2**31 - 1), "config.json asks for"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_bounded(folder, name):
    """Within 1 GB of address space beyond what the imports take."""
    damage, says = MEMORY[name]
    damage(folder)
    code = f"""
        import resource
        import dflash_mlx
        from dflash_mlx.checkpoint import weights
        from dflash_mlx import load_draft, DraftError
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, now + 2**30))
        try:
            load_draft({str(folder)!r})
        except DraftError as error:
            print(error)
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused(lambda: (_ for _ in ()).throw(DraftError(done.stdout.rstrip("\n"))), says, str(folder))


def test_the_limit_would_be_met(folder):
    """The harness itself: a gigabyte is not there."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        bytes(2**31)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert "MemoryError" in done.stderr


# numbers that `mx.load` does not take


def test_a_file_with_fp8_of_the_other_kind_is_read_tensor_by_tensor(tmp_path):
    data = (
        bytes([0x3C, 0xC0]) + struct.pack("<2f", 1.5, -2) + struct.pack("<2H", 0x3FC0, 0xC000) + struct.pack("<d", 0.5)
    )
    header = {
        "a": entry([2], 0, 2, "F8_E5M2"), "b": entry([2, 1], 2, 10), "c": entry([2], 10, 14, "BF16"),
        "d": entry([], 14, 22, "F64"), "e": entry([0, 3], 22, 22),
    }  # fmt: skip
    arrays = load_file(header_file(tmp_path / FILE, header, data))
    with pytest.raises(RuntimeError, match="F8_E5M2"):
        mx.load(str(tmp_path / FILE))
    assert list(arrays) == list("abcde")
    assert arrays["a"].tolist() == [0x3C, 0xC0]
    assert arrays["b"].tolist() == [[1.5], [-2.0]]
    assert (arrays["c"].dtype, arrays["c"].tolist()) == (mx.bfloat16, [1.5, -2.0])
    assert (arrays["d"].dtype, arrays["d"].tolist()) == (mx.float32, 0.5)
    assert arrays["e"].shape == (0, 3)
