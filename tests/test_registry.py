"""`dflash_mlx.pairs.registry`: which draft a target gets, by whole names, and the tables it is read from."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dflash_mlx import DFlashError
from dflash_mlx.loading import _advice
from dflash_mlx.pairs import registry
from dflash_mlx.pairs.fit import TargetFacts
from dflash_mlx.pairs.lineage import Ancestor
from dflash_mlx.pairs.names import normalise
from dflash_mlx.pairs.registry import KINDS, LAYOUTS, Pair, PublishedDraft, find_draft, pairs, resolve

QWEN_8B = "z-lab/Qwen3-8B-DFlash-b16"
REPO = r"[\w.-]+/[\w.-]+"

KEYS = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen3-8B": "qwen3-8b",
    "mlx-community/Qwen3-8B-4bit": "qwen3-8b",
    "mlx-community/Qwen3-8B-8bit": "qwen3-8b",
    "mlx-community/Qwen3-8B-6.5bit": "qwen3-8b",
    "Qwen/Qwen3-8B-MLX-4bit": "qwen3-8b",
    "Qwen/Qwen3-8B-MLX-bf16": "qwen3-8b",
    "mlx-community/Qwen3-8B-fp16": "qwen3-8b",
    "RedHatAI/Qwen3-8B-FP8-dynamic": "qwen3-8b",
    "RedHatAI/Qwen3-8B-quantized.w4a16": "qwen3-8b-quantized.w4a16",
    "someone/Qwen3-8B-w4a16": "qwen3-8b",
    "Qwen/Qwen3-8B-FP8": "qwen3-8b",
    "nvidia/Qwen3-8B-NVFP4": "qwen3-8b",
    "Qwen/Qwen3-8B-AWQ": "qwen3-8b",
    "Qwen/Qwen3-8B-GPTQ-Int4": "qwen3-8b",
    "someone/Qwen3-8B-4bit-gs32": "qwen3-8b",
    "someone/Qwen3-8B-q4-g64": "qwen3-8b",
    "someone/Qwen3-8B-Q4_K_M": "qwen3-8b",
    "mlx-community/Qwen3-8B-4bit-DWQ": "qwen3-8b",
    "mlx-community/Qwen3-8B-4bit-DWQ-053125": "qwen3-8b",
    "someone/Qwen3-8B-mixed-3-6bit": "qwen3-8b",
    "/models/Qwen3-8B-4bit/": "qwen3-8b",
    "./qwen3_8b_4bit": "qwen3-8b",
    "C:\\models\\Qwen3-8B-4bit": "qwen3-8b",
    "/home/me/hub/models--mlx-community--Qwen3-8B-4bit/snapshots/0123abc": "qwen3-8b",
    "lmstudio-community/Qwen3.6-27B-MLX-8bit": "qwen3.6-27b",
    "someone/Qwen3.6-27B-oQ4e": "qwen3.6-27b",
    "someone/Qwen3.6-27B-OptiQ-4bit": "qwen3.6-27b",
    "unsloth/Qwen3.6-27B-UD-MLX-4bit": "qwen3.6-27b",
    "someone/Qwen3.6-35B-A3B-MTP-4bit": "qwen3.6-35b-a3b",
    "mlx-community/Qwen3.5-9B-text-4bit": "qwen3.5-9b",
    "mlx-community/Qwen3-30B-A3B-3bit": "qwen3-30b-a3b",
    "mlx-community/gpt-oss-20b-MXFP4-Q8": "gpt-oss-20b",
    "google/gemma-4-31B-it": "gemma-4-31b-it",
    "mlx-community/gemma4-31b-it-4bit": "gemma-4-31b-it",
    "mlx-community/gemma-4-31b-it-qat-4bit": "gemma-4-31b-it",
    "mlx-community/gemma-4-31b-itqat-4bit": "gemma-4-31b-it",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b-instruct",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b-instruct",
    "mlx-community/LLaMA3.1-8B-Instruct-4bit": "llama-3.1-8b-instruct",
    # Not packaging: these are other models, and stay so.
    "mlx-community/Qwen3-8B-Coder-4bit": "qwen3-8b-coder",
    "Qwen/Qwen3-80B": "qwen3-80b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b-base",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3-4b-instruct-2507",
    "google/gemma-4-E2B-it": "gemma-4-e2b-it",
    "google/gemma-4-31B-it-assistant": "gemma-4-31b-it-assistant",
    "meta-models/Muse-Glimmer-30B-assistant": "muse-glimmer-30b-assistant",
    "4bit": "4bit",
    "": "",
}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_normalise(name: str, key: str) -> None:
    assert normalise(name) == key
    assert normalise(key) == key


@pytest.fixture(autouse=True)
def no_table_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's table would be; there is none."""
    monkeypatch.delenv(registry.PAIRS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "dflash-mlx" / "pairs.json"


def repos(target: str, ancestors: Iterable[Ancestor] = ()) -> list[str]:
    return [draft.repo for draft in resolve(target, ancestors).drafts]


# names


@pytest.mark.parametrize(
    ("target", "repo"),
    [
        ("Qwen/Qwen3-8B", QWEN_8B),
        ("mlx-community/Qwen3-8B-4bit", QWEN_8B),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit-dwq-v2", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/gemma-4-12b-it-8bit", "z-lab/gemma4-12B-it-DFlash"),
    ],
)
def test_resolves_by_name(target: str, repo: str) -> None:
    resolution = resolve(target)
    assert resolution.drafts[0].repo == repo
    assert resolution.reason.startswith("published for ")
    assert "family match" not in resolution.reason


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-80B",
        "Qwen/Qwen3-8B-Coder",
        "Qwen/Qwen3-8",
        "Qwen/3-8B",
        "my-Qwen3-8B",
        "Qwen/Qwen3-8B-Base",
        "mlx-community/gemma-4-31B-it-assistant-4bit",
        "meta-models/Muse-Glimmer-30B-assistant",
        "z-lab/Qwen3-8B-DFlash-b16",
        "",
        "x",
    ],
)
def test_keys_are_compared_whole(target: str) -> None:
    resolution = resolve(target)
    assert resolution.drafts == []
    assert resolution.reason == f"no published draft is known for {target}"


def test_base_model_comes_before_the_name() -> None:
    resolution = resolve("me/Qwen3-4B-4bit", [Ancestor("Qwen/Qwen3-8B", changed=True)])
    assert resolution.drafts[0].repo == QWEN_8B
    assert "a family match: this model was made from Qwen/Qwen3-8B, acceptance may be lower" in resolution.reason


def test_a_quantised_base_model_costs_nothing() -> None:
    resolution = resolve("me/mine", [Ancestor("Qwen/Qwen3-8B", changed=False)])
    assert resolution.reason == "published for Qwen/Qwen3-8B"


def test_exact_id_comes_before_the_base_model_and_asks_for_none() -> None:
    def ancestors() -> Iterator[Ancestor]:
        pytest.fail("a card was read")
        yield

    assert repos("Qwen/Qwen3-4B", ancestors())[0] == "z-lab/Qwen3-4B-DFlash-b16"


def test_unknown_base_models_leave_the_name_and_are_listed() -> None:
    unknown = [Ancestor("a/b", True), Ancestor("c/d", True)]
    resolution = resolve("Qwen/Qwen3-8B-AWQ", unknown)
    assert resolution.reason == "published for Qwen/Qwen3-8B"
    assert resolve("me/mine", unknown).reason == (
        "no published draft is known for me/mine or what it was made from (a/b, c/d)"
    )


# which of several drafts


def test_the_current_generation_comes_first_with_its_revision() -> None:
    first, *_, second = resolve("mlx-community/Qwen3.6-35B-A3B-4bit").drafts
    assert (first.generation, first.revision) == ("retrain", "f181eece646affea2c38b2765f1aaa01a9734ccd")
    assert (second.generation, second.revision) == ("original", "42d3b34d588423cdae7ba8f53a8cf7789346a719")


def test_a_revision_asks_for_the_older_generation() -> None:
    (draft,) = resolve("Qwen/Qwen3.5-4B", revision="96899cc27094").drafts
    assert (draft.generation, draft.taps) == ("original", [1, 8, 15, 22, 29])
    (draft,) = resolve("Qwen/Qwen3.5-4B", revision="main").drafts
    assert (draft.repo, draft.revision) == ("z-lab/Qwen3.5-4B-DFlash", "main")


def test_an_overwritten_generation_of_unknown_commit_is_never_picked() -> None:
    assert [d.generation for d in resolve("Qwen/Qwen3.5-9B").drafts] == ["retrain"]


@pytest.mark.parametrize(
    ("second", "first"),
    [
        ({"evidence": "config"}, True),
        ({"status": "loads"}, True),
        ({"evidence": "table"}, False),
        ({}, False),
    ],
)
def test_dflash_2_comes_first_once_its_config_is_known(
    monkeypatch: pytest.MonkeyPatch, second: dict[str, str], first: bool
) -> None:
    drafts = [
        PublishedDraft("a/original", revision="abcdef0", generation="original"),
        PublishedDraft("a/dspark", kind="dspark"),
        PublishedDraft("a/one"),
        PublishedDraft("a/two", kind="dflash2", **second),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(registry, "pairs", lambda: (Pair(["a/target"], drafts),))
    monkeypatch.setattr(registry, "RUNNABLE", {"dflash", "dflash2"})
    order = ["a/two", "a/one"] if first else ["a/one", "a/two"]
    assert repos("a/target") == [*order, "a/original"]


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7 is a DSpark draft"),
        (
            "Qwen/Qwen3-30B-A3B",
            "RedHatAI/Qwen3-30B-A3B-speculator.dflash is a DFlash draft in the `speculators` layout",
        ),
        ("mlx-community/GLM-5.3-Flash-4bit", "incoai/GLM-5.3-Flash-DFlash2 is a DFlash 2 draft"),
        ("meta-models/Muse-Glimmer-30B", "meta-models/Muse-Glimmer-30B-assistant is a Muse assistant draft"),
    ],
)
def test_kinds_that_can_not_be_run_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, target: str, kind: str
) -> None:
    monkeypatch.setattr(registry, "RUNNABLE", {"dflash"})
    monkeypatch.setattr(registry, "READABLE", {"z-lab"})
    resolution = resolve(target)
    assert resolution.drafts == []
    assert resolution.reason.startswith("what is published for ")
    assert " can't be run yet: " in resolution.reason
    assert kind in resolution.reason


def test_sizes_of_the_text_model_are_those_of_the_target() -> None:
    sizes = {"hidden_size": 10, "vocab_size": 20, "num_hidden_layers": 3}
    wrapper = {"hidden_size": 1, "vocab_size": 2, "num_hidden_layers": 1, "text_config": sizes}
    assert (
        TargetFacts.from_config("a/b", wrapper)
        == TargetFacts.from_config("a/b", sizes)
        == TargetFacts("a/b", 10, 20, 3)
    )


# the user's table

OWN = [
    {
        "targets": ["Qwen/Qwen3-8B"],
        "drafts": [
            {"repo": "me/second", "kind": "dflash"},
            {"repo": "~/drafts/mine", "kind": "dflash2", "evidence": "config"},
        ],
    },
    {"targets": ["me/unheard-of"], "vocab": None, "drafts": [{"repo": "me/draft", "block": 8, "thinking": True}]},
]


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("named", [True, False])
def test_the_users_table_comes_first(
    no_table_of_the_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    path = write(tmp_path / "mine.json" if named else no_table_of_the_user, OWN)
    if named:
        monkeypatch.setenv(registry.PAIRS_VARIABLE, str(path))
    for target in ("Qwen/Qwen3-8B", "mlx-community/Qwen3-8B-4bit"):
        assert repos(target) == ["me/second", "~/drafts/mine"]
        assert resolve(target).reason == f"named by {path}"
    assert repos("unheard-of-4bit") == ["me/draft"]
    assert repos("x", [Ancestor("me/unheard-of", changed=True)]) == ["me/draft"]
    assert repos("x", [Ancestor("Qwen/Qwen3-8B", changed=False)]) == ["me/second", "~/drafts/mine"], "before ours"
    assert repos("Qwen/Qwen3-4B")[0] == "z-lab/Qwen3-4B-DFlash-b16", "ours goes on"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "not valid JSON"),
        ("{}", "holds a JSON dict, expected a list of pairs"),
        ("[3]", "pair 0: expected an object, found 3"),
        ([{"targets": ["a/b"]}], "pair 0: drafts is missing"),
        ([{"targets": "a/b", "drafts": [{"repo": "c/d"}]}], "pair 0: targets: 'a/b' is not a list of names"),
        ([{"targets": ["a/b"], "drafts": []}], "pair 0: drafts: [] is not a list of drafts"),
        ([{"targets": ["a/b"], "drafts": [{"kind": "dflash"}]}], "pair 0: draft: repo is missing"),
        ([{"targets": ["a/b"], "drafts": [{"repo": None}]}], "pair 0: draft: repo: None is not text"),
        ([{"targets": ["a/b"], "drafts": [{"repo": "c/d", "kind": "eagle"}]}], "kind: 'eagle' is not one of dflash"),
        ([{"targets": ["a/b"], "drafts": [{"repo": "c/d", "bloc": 8}]}], "no such field 'bloc'; there are repo"),
        ([{"targets": ["a/b"], "drafts": [{"repo": "c/d", "block": True}]}], "block: True is not a whole number"),
    ],
)
def test_a_table_that_can_not_be_read_is_named(no_table_of_the_user: Path, content: object, says: str) -> None:
    write(no_table_of_the_user, content)
    with pytest.raises(DFlashError) as error:
        resolve("a/b")
    assert str(error.value).startswith(str(no_table_of_the_user))
    assert says in str(error.value)


def test_a_table_that_is_named_but_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.PAIRS_VARIABLE, str(tmp_path / "gone.json"))
    with pytest.raises(DFlashError, match=f"{registry.PAIRS_VARIABLE}: .*gone.json: no such file"):
        resolve("a/b")


# our table against the published facts

# Every DFlash and DFlash 2 draft of the survey: block size (0: not stated) and number of taps (0: not stated).
PUBLISHED = {
    "z-lab": {
        "Qwen3-4B-DFlash-b16": (16, 5), "Qwen3-8B-DFlash-b16": (16, 5),
        "LLaMA3.1-8B-Instruct-DFlash-UltraChat": (10, 5),
        "Qwen3-Coder-30B-A3B-DFlash": (16, 5), "Qwen3-Coder-Next-DFlash": (16, 5), "gpt-oss-20b-DFlash": (8, 5),
        "gpt-oss-120b-DFlash": (10, 5), "Kimi-K2.5-DFlash": (8, 6), "gemma-4-26B-A4B-it-DFlash": (16, 6),
        "gemma-4-31B-it-DFlash": (16, 6), "gemma4-12B-it-DFlash": (0, 0), "Qwen3.6-27B-DFlash": (16, 5),
        "Qwen3.5-4B-DFlash": (16, 8), "Qwen3.5-9B-DFlash": (16, 8), "Qwen3.5-27B-DFlash": (16, 8),
        "Qwen3.5-35B-A3B-DFlash": (16, 8), "Qwen3.6-35B-A3B-DFlash": (16, 8), "Qwen3.5-122B-A10B-DFlash": (16, 8),
        "Qwen3.5-397B-A17B-DFlash": (0, 0), "MiniMax-M2.5-DFlash": (0, 0), "MiniMax-M2.7-DFlash": (0, 0),
        "Kimi-K2.6-DFlash": (0, 0), "Kimi-K2.7-Code-DFlash": (0, 0), "GLM-5.1-FP8-DFlash": (0, 0),
        "Alpamayo-1.5-10B-DFlash": (0, 0), "Alpamayo-R1-10B-DFlash": (0, 0),
        "Qwen3.8-27B-DFlash2": (8, 5), "Muse-Glimmer-30B-DFlash2": (16, 5),
    },
    "incoai": {
        "Qwen3.8-27B-DFlash2": (8, 5), "Muse-Glimmer-30B-DFlash2": (16, 5), "Qwen3.6-35B-A3B-DFlash2": (8, 0),
        "GLM-5.3-Flash-DFlash2": (8, 5),
    },
    "RedHatAI": {
        "Qwen3-4B-speculator.dflash2": (16, 0), "Qwen3-8B-speculator.dflash2": (16, 5),
        "gemma-4-31B-it-speculator.dflash2": (16, 0), "Qwen3-8B-speculator.dflash": (8, 0),
        "gemma-4-31B-it-speculator.dflash": (8, 5), "Qwen3-30B-A3B-speculator.dflash": (0, 0),
        "DeepSeek-V4-Flash-speculator.dflash": (0, 0), "Mistral-Small-4-119B-2603.dflash": (0, 3),
    },
    "modal-labs": {"Qwen3.8-2.4T-A95B-DFlash": (0, 0), "Qwen3.5-4B-DFlash": (16, 8), "Qwen3.6-35B-A3B-DFlash": (16, 8)},
    "lmsys": {"Qwen3.5-397B-A17B-DFlash": (0, 0)},
    "reflection": {"Beam-1.0-501B-A23B-DFlash2": (0, 0)},
    "rasyosef": {"gemma-4-E2B-it-dflash2": (0, 0)},
    "XiaomiMiMo": {"MiMo-V2.5-Pro-FP4-DFlash": (8, 5)},
    "deepseek-ai": {
        "dflash_qwen3_4b_block7": (7, 0), "dflash_qwen3_8b_block7": (7, 0), "dflash_qwen3_14b_block7": (7, 0),
        "dflash_gemma4_12b_block7": (7, 0),
    },
    "nvidia": {"Kimi-K2.6-DFlash": (0, 0), "Kimi-K2.7-Code-DFlash": (0, 0)},
    "JetSpec": {"jetspec-qwen3-8b": (0, 0)},
    "sdougbrown": {"North-Mini-Code-1.0-dflash": (0, 0)},
    "ornith-ai": {"Ornith-1.5-35B-A3B-DFlash": (0, 8)},
    "cm00cm": {"Kimi-K2.7-Code-DFlash": (0, 0)},
    "Moonlight556": {"Qwen3.5-0.8B-DFlash": (0, 5)},
    "guglxni": {"Qwen3.5-9B-abliterated-DFlash": (0, 0)},
    "asf0": {"Qwen3.8-27B-DFlash": (0, 0)},
    "seabit-ai": {"Qwen3.8-27B-DFlash2-4bit": (8, 5)},
    "mlx-community": {"Qwen3.6-35B-A3B-DFlash2-4bit": (8, 0)},
}  # fmt: skip


@pytest.mark.parametrize("repo", [f"{org}/{name}" for org, names in PUBLISHED.items() for name in names])
def test_every_published_draft_is_in_the_table(repo: str) -> None:
    found = find_draft(repo)
    assert found is not None
    _, draft = found
    org, _, name = repo.partition("/")
    assert (draft.block or 0, len(draft.taps or []) or draft.tap_count or 0) == PUBLISHED[org][name]


def test_both_generations_of_every_overwritten_repo_are_in_the_table() -> None:
    generations: dict[str, set[str | None]] = {}
    for pair in pairs():
        for draft in pair.drafts:
            generations.setdefault(draft.repo, set()).add(draft.generation)
    overwritten = {repo for repo, found in generations.items() if found != {None}}
    assert overwritten == {
        *(f"z-lab/Qwen3.5-{size}-DFlash" for size in ("4B", "9B", "27B", "35B-A3B", "122B-A10B")),
        "z-lab/Qwen3.6-35B-A3B-DFlash",
    }
    assert all(generations[repo] == {"retrain", "original"} for repo in overwritten)


def test_a_draft_is_found_by_repo_mirror_and_revision() -> None:
    def found(*name: str) -> PublishedDraft:
        hit = find_draft(*name)
        assert hit is not None
        return hit[1]

    assert found("z-lab/Qwen3.5-4B-DFlash").generation == "retrain"
    assert found("z-lab/Qwen3.5-4B-DFlash", "96899cc27094").generation == "original"
    assert found("incoai/Qwen3.8-27B-DFlash2").repo == "z-lab/Qwen3.8-27B-DFlash2"
    assert find_draft("Qwen/Qwen3-8B") is None


def test_table_has_no_target_and_no_draft_twice() -> None:
    keys = Counter(normalise(target) for pair in pairs() for target in pair.targets)
    assert [key for key, n in keys.items() if n > 1 or not key] == []
    drafts = Counter((repo, draft.generation) for pair in pairs() for draft in pair.drafts for repo in draft.repos)
    assert [draft for draft, n in drafts.items() if n > 1] == []


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.targets[0])
def test_table_entry_is_well_formed(pair: Pair) -> None:
    assert all(re.fullmatch(rf"{REPO}|[\w.-]+", target) for target in pair.targets)
    assert set(pair.recommended_block) <= {"4", "8", "16"}
    assert all(resolve(target).pair is pair for target in pair.targets), "its own key resolves to it"
    for draft in pair.drafts:
        assert all(re.fullmatch(REPO, repo) for repo in draft.repos)
        assert draft.revision is None or re.fullmatch(r"[0-9a-f]{7}|[0-9a-f]{40}", draft.revision)
        assert draft.kind in KINDS
        assert draft.layout in LAYOUTS
        assert draft.status == "unseen", "no published draft has been run here"
        assert draft.block is None or 2 <= draft.block <= 16
        assert draft.mask is None or 0 <= draft.mask < (pair.vocab or 2**31)
        assert draft.size is None or re.fullmatch(r"\d+(\.\d+)? Gi?B", draft.size)
        assert not (draft.taps and draft.tap_count)
        for block in pair.recommended_block.values():
            assert draft.block is None or block <= draft.block
        if draft.taps is not None:
            assert draft.taps == sorted(set(draft.taps))
            assert draft.taps[0] >= 0
            assert draft.taps[-1] < (pair.layers or 2**31)


def test_a_block_is_recommended_where_it_is_not_the_drafts_own() -> None:
    pair = Pair(["a/target"], [], recommended_block={"4": 16})
    for block, says in ((16, []), (8, ["blocks of 16 did best on 4-bit targets (--block-size 16)"])):
        assert list(_advice(PublishedDraft("a/draft", block=block), pair, {"quantization": {"bits": 4}})) == says
    assert list(_advice(PublishedDraft("a/draft", block=8), pair, {})) == []
