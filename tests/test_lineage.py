"""From a target to its draft with `--draft-model auto`: cards, local and on a hub, tables, and what is said of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub
from tiny import draft_config, make_draft, save_draft, target_config

from dflash_mlx.pairs.lineage import HOPS, Ancestor, Lineage, bases_of

QWEN_8B, QWEN_8B_COMMIT = "z-lab/Qwen3-8B-DFlash-b16", "5adfac36a234741b344cd906ca3fc6a94d7d5955"
QWEN_4B = "z-lab/Qwen3.5-4B-DFlash"
RETRAIN, ORIGINAL = "9a1996ccf887b79ab3af4fcbf8c1d1f4b5658bcf", "96899cc270945f554998309580b08a04a05a3187"

# Plans the pairs of argv[1] in a process that has the fake hub for the hub; the outcomes are its whole stdout.
WORKER = """
import json, sys
from dflash_mlx import DFlashError
from dflash_mlx.loading import plan

def outcome(arguments):
    try:
        result = plan(**arguments)
    except DFlashError as error:
        return {"error": str(error)}
    return {"draft": result.draft, "block": result.block_size, "notes": result.notes}

print(json.dumps({case: outcome(arguments) for case, arguments in json.loads(sys.argv[1]).items()}))
"""


def plans(calls: dict[str, dict[str, Any]], env: dict[str, str]) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(calls)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def card(*bases: str, relation: str = "") -> str:
    stated = f"base_model_relation: {relation}\n" if relation else ""
    return f"---\nbase_model: {json.dumps(list(bases))}\n{stated}---\n"


def model(folder: Path, readme: str = "", **config: Any) -> Path:
    """A target as far as planning looks at it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**target_config("qwen3"), **config}))
    if readme:
        (folder / "README.md").write_text(readme)
    return folder


# cards, without a hub


CARDS = {
    "---\nbase_model: Qwen/Qwen3-8B\n---\ntext": ["Qwen/Qwen3-8B"],
    "---\nbase_model: [Qwen/Qwen3-8B, a/b]\nbase_model_relation: merge\n---\n": ["Qwen/Qwen3-8B", "a/b"],
    "---\nbase_model: {a: 1}\n---\n": [],
    "---\nbase_model: [1, null, '']\n---\n": [],
    "---\nlicense: mit\n---\n": [],
    "---\n[not: yaml\n---\n": [],
    "---\n- a list\n---\n": [],
    "---\n---\n": [],
    "no front matter": [],
}


@pytest.mark.parametrize(("text", "names"), CARDS.items())
def test_base_models_of_a_card(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert [base.name for base in bases_of(Ancestor("me/mine", False), tmp_path)] == names


@pytest.mark.parametrize(
    ("child", "readme", "changed"),
    [
        ("mlx-community/Qwen3-8B-4bit", card("Qwen/Qwen3-8B"), False),
        ("me/mine", card("Qwen/Qwen3-8B"), True),
        ("me/mine-4bit", card("Qwen/Qwen3-8B", relation="quantized"), False),
        ("me/Qwen3-8B", card("Qwen/Qwen3-8B", relation="finetune"), True),
        ("me/Qwen3-8B", card("Qwen/Qwen3-8B", relation="adapter"), True),
        ("me/Qwen3-8B", card("Qwen/Qwen3-8B", "a/b"), True),
    ],
)
def test_a_step_that_is_no_quantisation_changes_the_model(
    tmp_path: Path, child: str, readme: str, changed: bool
) -> None:
    (tmp_path / "README.md").write_text(readme)
    assert bases_of(Ancestor(child, False), tmp_path)[0] == Ancestor("Qwen/Qwen3-8B", changed)
    assert bases_of(Ancestor(child, True), tmp_path)[0].changed, "once changed, always changed"


def test_the_card_comes_before_the_config(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [base.name for base in bases_of(Ancestor("me/mine", False), tmp_path)]

    assert names() == []
    (tmp_path / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3-8B"}')
    assert names() == ["Qwen/Qwen3-8B"]
    (tmp_path / "README.md").write_text(card("me/tuned"))
    assert names() == ["me/tuned", "Qwen/Qwen3-8B"]


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"_name_or_path": 3}', b"\xff\xfe", b'{"_name_or_path": ""}'])
def test_broken_card_and_config_say_nothing(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    for card in (b"\xff\xfe---\n", b"---\nx: " + b"[" * 1000 + b"\n---\n", b'---\nbase_model: "a\\e/b"\n---\n'):
        (tmp_path / "README.md").write_bytes(card)
        assert bases_of(Ancestor("me/mine", False), tmp_path) == []


def cards_from(monkeypatch: pytest.MonkeyPatch, folder: Path, cards: dict[str, str]) -> list[str]:
    """Serves these cards for the hub's; the names that were asked for, in order."""
    from dflash_mlx import hub

    asked: list[str] = []

    def fetch(name: str, **options: Any) -> Path:
        asked.append(name)
        place = folder / name.replace("/", "--")
        place.mkdir(exist_ok=True)
        (place / "README.md").write_text(cards.get(name, ""))
        return place

    monkeypatch.setattr(hub, "fetch", fetch)
    return asked


def test_a_chain_is_followed_for_three_hops_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cards_from(monkeypatch, tmp_path, {f"a/{n}": card(f"a/{n + 1}") for n in range(9)})
    start = model(tmp_path / "start", card("a/1"))
    assert [base.name for base in Lineage("a/0", start)] == ["a/1", "a/2", "a/3"]
    assert len(asked) == HOPS - 1


def test_cards_are_read_only_as_far_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cards_from(monkeypatch, tmp_path, {})
    bases = iter(Lineage("a/0", model(tmp_path / "start", card("a/1"))))
    assert next(bases).name == "a/1"
    assert asked == []


def test_a_cycle_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cards_from(monkeypatch, tmp_path, {"a/1": card("a/0", "a/1", "a/2"), "a/2": card("a/1")})
    start = model(tmp_path / "start", card("a/0", "a/1"))
    assert [base.name for base in Lineage("a/0", start)] == ["a/1", "a/2"]
    assert asked == ["a/1", "a/2"]


def test_a_card_that_lists_many_bases_costs_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cards_from(monkeypatch, tmp_path, {})
    start = model(tmp_path / "start", card(*(f"a/{n}" for n in range(1, 50)), "/a/local/path"))
    assert len(list(Lineage("a/0", start))) == 50
    assert len(asked) == 8


# the whole way, with a hub


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def online(work: Path) -> dict[str, dict[str, Any]]:
    draft = save_draft(work / "draft", make_draft(), draft_config())
    wide = save_draft(work / "wide", make_draft(hidden_size=128), draft_config(hidden_size=128))
    own = work / "own.json"
    own.write_text(json.dumps([{"targets": ["me/listed"], "drafts": [{"repo": str(draft)}]}]))
    remote = {
        "mlx-community/mine-4bit": card("me/mine", relation="quantized"),
        "me/mine": card("Qwen/Qwen3-8B", relation="finetune"),
        "me/loop": card("me/pool"),
        "me/pool": card("me/loop", "me/pool"),
        "me/merged": card("me/unheard-of", "Qwen/Qwen3-8B"),
        "me/unheard-of": "",
        "mlx-community/Qwen3.5-4B-4bit": "",
        "mlx-community/Qwen3-80B-4bit": "",
        "mlx-community/Qwen3-8B-Coder-4bit": "",
        "mlx-community/Qwen3-8B-assistant": "",
        "me/listed": card("Qwen/Qwen3-8B"),
        "me/of-gated": card("me/gated"),
    }
    calls: dict[str, dict[str, Any]] = {name: {"model": name} for name in remote}
    calls["older generation"] = {"model": "Qwen/Qwen3.5-4B", "draft_revision": ORIGINAL[:12]}
    calls["no such revision"] = {"model": "Qwen/Qwen3.5-4B", "draft_revision": "0" * 40}
    calls["local"] = {"model": str(model(work / "Qwen3-8B-8bit"))}
    calls["local and quantised"] = {"model": str(model(work / "q" / "Qwen3-8B-4bit", quantization={"bits": 4}))}
    calls["local, other geometry"] = {"model": str(model(work / "odd" / "Qwen3-8B", num_hidden_layers=5))}
    calls["explicit"] = {"model": str(work / "Qwen3-8B-8bit"), "draft_model": "me/nothing"}
    with FakeHub() as hub:
        for name, readme in {**remote, "Qwen/Qwen3.5-4B": ""}.items():
            hub.add_repo(name, model(work / "repos" / name, readme))
        hub.add_repo("me/gated", work / "repos" / "me" / "mine", gated=True)
        hub.add_repo(QWEN_8B, draft, revision_sha=QWEN_8B_COMMIT)
        hub.add_repo(QWEN_4B, draft, revision_sha=ORIGINAL)
        hub.add_repo(QWEN_4B, wide, revision_sha=RETRAIN)
        return plans(calls, hub.env(work / "home", DFLASH_MLX_PAIRS=str(own)))


FAMILY = "a family match: this model was made from Qwen/Qwen3-8B, acceptance may be lower"
THINKING = "trained with thinking off"


@pytest.mark.parametrize(
    ("case", "note"),
    [
        ("mlx-community/mine-4bit", f"published for Qwen/Qwen3-8B, {FAMILY}; {THINKING}"),
        ("me/merged", f"published for Qwen/Qwen3-8B, {FAMILY}; {THINKING}"),
        ("local", f"published for Qwen/Qwen3-8B; {THINKING}"),
        ("local and quantised", f"published for Qwen/Qwen3-8B; {THINKING}"),
    ],
)
def test_auto_says_in_one_line_what_it_picked_and_why(online: dict[str, Any], case: str, note: str) -> None:
    assert online[case] == {
        "draft": QWEN_8B,
        "block": 8,
        "notes": [f"draft {QWEN_8B}@{QWEN_8B_COMMIT[:12]}: {note}"],
    }


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("mlx-community/Qwen3-80B-4bit", "no published draft is known for mlx-community/Qwen3-80B-4bit;"),
        ("mlx-community/Qwen3-8B-Coder-4bit", "no published draft is known for mlx-community/Qwen3-8B-Coder-4bit;"),
        ("mlx-community/Qwen3-8B-assistant", "no published draft is known for mlx-community/Qwen3-8B-assistant;"),
        ("me/loop", "no published draft is known for me/loop or what it was made from (me/pool);"),
        ("me/of-gated", "(me/gated); card of me/gated: gated; accept its terms at "),
        ("local, other geometry", f"draft {QWEN_8B} does not fit "),
        ("local, other geometry", ": num_target_layers 4 against 5;"),
        ("no such revision", f"{QWEN_4B}: the repo has no revision {'0' * 40};"),
    ],
)
def test_auto_without_a_draft_says_why_in_one_line(online: dict[str, Any], case: str, reason: str) -> None:
    outcome = online[case]
    assert outcome["draft"] is None
    (note,) = outcome["notes"]
    assert note.startswith("no draft: ")
    assert note.endswith("; decoding plainly")
    assert reason in note
    if "is known for" in note:
        assert "; name one with --draft-model or in " in note


def test_the_users_table_comes_before_the_card(online: dict[str, Any], work: Path) -> None:
    assert online["me/listed"]["draft"] == str(work / "draft")
    assert online["me/listed"]["notes"] == [f"draft {work / 'draft'}: named by {work / 'own.json'}"]


def test_a_draft_that_does_not_fit_gives_way_to_the_next(online: dict[str, Any]) -> None:
    outcome = online["mlx-community/Qwen3.5-4B-4bit"]
    assert outcome["draft"] == QWEN_4B
    (note,) = outcome["notes"]
    assert note.startswith(f"draft {QWEN_4B}@{ORIGINAL[:12]}: published for Qwen/Qwen3.5-4B; ")
    assert "instead of: draft " in note
    assert "hidden_size 128 against 64" in note


def test_an_older_generation_is_had_by_its_commit(online: dict[str, Any]) -> None:
    (note,) = online["older generation"]["notes"]
    assert note.startswith(f"draft {QWEN_4B}@{ORIGINAL[:12]}: published for Qwen/Qwen3.5-4B")
    assert "instead of" not in note


def test_an_explicit_draft_that_can_not_be_had_is_an_error(online: dict[str, Any]) -> None:
    assert "draft me/nothing: no such folder and no such repo" in online["explicit"]["error"]


def test_offline_says_what_could_not_be_asked(online: dict[str, Any], work: Path) -> None:
    """With an empty cache nothing but the local card is known; with a full one everything is as online."""
    local = model(work / "offline" / "mine", card("me/mine", relation="quantized"))
    calls = {"chain": {"model": str(local)}, "name": {"model": str(work / "Qwen3-8B-8bit")}}
    with FakeHub() as hub:
        pass
    empty = plans(calls, hub.env(work / "empty", HF_HUB_OFFLINE="1"))
    (note,) = empty["chain"]["notes"]
    assert "made from (me/mine); card of me/mine: not in the cache" in note
    assert "HF_HUB_OFFLINE is set" in note
    (note,) = empty["name"]["notes"]
    assert note.startswith(f"no draft: draft {QWEN_8B}: not in the cache")
    full = plans(calls, hub.env(work / "home", HF_HUB_OFFLINE="1"))
    assert full["name"] == online["local"]
    assert full["chain"]["draft"] == QWEN_8B
