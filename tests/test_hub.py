"""`dflash_mlx.hub`: where files come from, and the one line for each way in which they can't be had."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub

from dflash_mlx import demo, hub
from dflash_mlx.checkpoint.readers import read_headers
from dflash_mlx.errors import DFlashError

OLD, NEW = "0" * 39 + "a", "1" * 39 + "b"
DRAFT, GATED, UPLOADED = "some-lab/draft", "some-lab/gated", "me/uploaded"
BESIDE = "some-lab/target-and-draft"

# Runs the calls of argv[1] in a process that has the fake hub for the hub; the outcomes are its whole stdout.
WORKER = """
import json, sys
from dflash_mlx import hub, loading
from dflash_mlx.errors import DFlashError
from huggingface_hub import HfApi

def upload(name, folder):
    HfApi().create_repo(name, exist_ok=True)
    return HfApi().upload_folder(repo_id=name, folder_path=folder).oid

def call(function, arguments):
    try:
        owner = loading if function == "fetch_draft" else hub
        value = upload(**arguments) if function == "upload" else getattr(owner, function)(**arguments)
    except DFlashError as error:
        return {"error": str(error)}
    if function == "fetch_draft":
        value = [str(path.relative_to(value)) for path in value.rglob("*")]
    if function == "remote_headers":
        value = {name: [info.dtype, info.shape] for name, info in value.items()}
    return {"value": value}

print(json.dumps({case: call(*what) for case, what in json.loads(sys.argv[1]).items()}, default=str))
"""


def run_calls(calls: dict[str, Any], env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Outcome by case: {"value": ...} or {"error": the text of the DFlashError}."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(calls)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("old")
    (folder / "config.json").write_text('{"generation": "old"}')
    with FakeHub() as server:
        server.add_repo(DRAFT, folder, revision_sha=OLD)
        server.add_repo(DRAFT, demo.DRAFT, revision_sha=NEW)
        server.add_repo(GATED, folder, gated=True)
        both = tmp_path_factory.mktemp("both")
        (both / "config.json").write_text("{}")
        (both / "model.safetensors").write_bytes(b"a whole target")
        shutil.copytree(demo.DRAFT, both / "dflash")
        server.add_repo(BESIDE, both)
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf_home")


@pytest.fixture(scope="module")
def online(fake: FakeHub, home: Path) -> dict[str, dict[str, Any]]:
    calls = {
        "headers": ["remote_headers", {"name": DRAFT}],
        "no headers": ["remote_headers", {"name": DRAFT, "revision": OLD}],
        "old": ["peek_config", {"name": DRAFT, "revision": OLD}],
        "abbreviated": ["fetch", {"name": DRAFT, "revision": OLD[:12]}],
        "all": ["fetch", {"name": DRAFT, "revision": NEW}],
        "beside": ["fetch_draft", {"name": BESIDE}],
        "headers beside": ["remote_headers", {"name": BESIDE, "subfolder": "dflash"}],
        "gated": ["fetch", {"name": GATED, "what": "draft"}],
        "missing": ["fetch", {"name": "some-lab/nothing", "what": "target"}],
        "no revision": ["fetch", {"name": DRAFT, "revision": "nowhere"}],
        "upload": ["upload", {"name": UPLOADED, "folder": str(demo.DRAFT)}],
        "uploaded": ["fetch", {"name": UPLOADED}],
    }
    return run_calls(calls, fake.env(home))


def test_downloads_what_is_asked_for(online: dict[str, Any]) -> None:
    folder = Path(online["all"]["value"])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in demo.DRAFT.glob("*.*")
    }


def test_revision_is_passed_on(fake: FakeHub, online: dict[str, Any]) -> None:
    folder, config = online["old"]["value"]
    assert config == {"generation": "old"}
    assert Path(folder).name == OLD
    assert ("GET", f"/{DRAFT}/resolve/{OLD}/config.json") in fake.requests


def test_abbreviated_commit_is_resolved_by_the_hub(online: dict[str, Any]) -> None:
    assert Path(online["abbreviated"]["value"]).name == OLD


def test_remote_headers_equal_local_ones(online: dict[str, Any]) -> None:
    local = {name: [info.dtype, list(info.shape)] for name, info in read_headers(demo.DRAFT).items()}
    assert online["headers"]["value"] == local


def test_a_draft_beside_its_target_comes_without_the_target(fake: FakeHub, online: dict[str, Any]) -> None:
    assert sorted(online["beside"]["value"]) == ["config.json", "model.safetensors"]
    assert online["headers beside"]["value"] == online["headers"]["value"]
    weights = [path for _, path in fake.requests if path.startswith(f"/{BESIDE}/") and path.endswith(".safetensors")]
    assert weights
    assert all("/dflash/" in path for path in weights)


def test_upload_arrives_and_can_be_downloaded(fake: FakeHub, online: dict[str, Any]) -> None:
    files = {p.name: p.read_bytes() for p in demo.DRAFT.glob("*.*")}
    assert fake.uploads[UPLOADED] == files
    assert {p.name: p.read_bytes() for p in Path(online["uploaded"]["value"]).iterdir()} == files


@pytest.mark.parametrize(
    ("case", "start", "advice"),
    [
        ("gated", f"draft {GATED}: gated", "run `hf auth login`"),
        ("missing", "target some-lab/nothing: no such folder and no such repo", "check the name"),
        ("no revision", f"model {DRAFT}: ", "the repo has no revision nowhere"),
        ("no headers", f"draft {DRAFT}: ", "the repo holds no model.safetensors"),
    ],
)
def test_refusal_of_the_hub_is_one_line(online: dict[str, Any], case: str, start: str, advice: str) -> None:
    text = online[case]["error"]
    assert text.startswith(start)
    assert advice in text
    assert "\n" not in text


def test_gated_names_the_page_to_accept_the_terms_on(fake: FakeHub, online: dict[str, Any]) -> None:
    assert f"{fake.url}/{GATED}" in online["gated"]["error"]


def test_without_the_hub_the_cache_serves_what_it_holds(fake: FakeHub, home: Path, online: dict[str, Any]) -> None:
    calls = {
        "cached": ["fetch", {"name": DRAFT, "revision": NEW}],
        "uncached": ["fetch", {"name": "some-lab/other"}],
    }
    before = len(fake.requests)
    offline = run_calls(calls, fake.env(home, HF_HUB_OFFLINE="1"))
    assert fake.requests[before:] == []
    assert offline["cached"] == online["all"]
    assert offline["uncached"]["error"].startswith("model some-lab/other: not in the cache")
    assert "HF_HUB_OFFLINE is set" in offline["uncached"]["error"]


def test_config_comes_without_weights_and_does_not_pass_for_the_whole(fake: FakeHub, tmp_path: Path) -> None:
    before = len(fake.requests)
    config = run_calls({"it": ["peek_config", {"name": DRAFT}]}, fake.env(tmp_path))["it"]["value"][1]
    assert config == json.loads((demo.DRAFT / "config.json").read_text())
    files = {path for _, path in fake.requests[before:] if "/resolve/" in path}
    assert files == {f"/{DRAFT}/resolve/{NEW}/config.json"}
    whole = run_calls({"it": ["fetch", {"name": DRAFT}]}, fake.env(tmp_path, HF_HUB_OFFLINE="1"))
    assert "not in the cache as a whole" in whole["it"]["error"]


def test_unreachable_hub(fake: FakeHub, tmp_path: Path) -> None:
    with FakeHub() as gone:
        pass
    outcome = run_calls({"it": ["fetch", {"name": DRAFT}]}, gone.env(tmp_path))
    assert f"{gone.url} can't be reached; check the connection" in outcome["it"]["error"]


@pytest.mark.parametrize(("status", "advice"), [(503, "try again later"), (403, "run `hf auth login`")])
def test_status_of_a_broken_hub_is_named(tmp_path: Path, status: int, advice: str) -> None:
    with FakeHub() as broken:
        broken.status = status
        outcome = run_calls({"it": ["fetch", {"name": DRAFT}]}, broken.env(tmp_path))
    assert outcome["it"]["error"].endswith(f"refused the download (HTTP {status}); {advice}")


def test_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "blob")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(DFlashError, match=r"^model some-lab/x: the disk is full; free some space"):
        hub.fetch("some-lab/x")


def test_local_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some-lab" / "draft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.fetch(DRAFT) == Path(DRAFT)
    assert hub.fetch("~/some-lab/draft") == tmp_path / "some-lab" / "draft"


@pytest.mark.parametrize(
    "name", ["./draft", "../draft", "/no/where", "~/no-such-draft", "a/b/c", "C:\\models\\x", "a\\b"]
)
def test_missing_folder_is_no_repo(name: str) -> None:
    with pytest.raises(DFlashError, match="no such folder") as caught:
        hub.fetch(name, what="draft")
    assert "\n" not in str(caught.value)


def test_no_name() -> None:
    with pytest.raises(DFlashError, match=r"^draft '': no such folder"):
        hub.fetch("", what="draft")


def test_file_instead_of_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(DFlashError, match="is a file; give the folder that holds it"):
        hub.fetch(str(file))


@pytest.mark.parametrize("name", ["a b", "org/na me", "double--dash", "org/x.git", "draft/"])
def test_invalid_name(name: str) -> None:
    with pytest.raises(DFlashError, match=r"neither a folder nor a valid repo name \(org/name\)$"):
        hub.fetch(name)


def test_peek_config_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match=r"no config\.json in"):
        hub.peek_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DFlashError, match=r"config\.json: holds a JSON list"):
        hub.peek_config(str(tmp_path))


def test_the_hubs_library_loads_only_when_needed() -> None:
    code = (
        "import sys; from dflash_mlx import hub; from dflash_mlx.pairs import registry; registry.resolve('x'); "
        "print('huggingface_hub' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False\n"
