"""`dflash_mlx.registry`: names of one model are equal whole, and the table of published pairs is well formed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from dflash_mlx import registry
from dflash_mlx.registry import KINDS, base_models_of, normalise, pairs, resolve

QWEN_8B = "z-lab/Qwen3-8B-DFlash-b16"
REPO = r"[\w.-]+/[\w.-]+"
SUPERSEDED = "superseded in place on 2026-06-19; without a revision the repo gives the retrain"

KEYS = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen3-8B": "qwen3-8b",
    "mlx-community/Qwen3-8B-4bit": "qwen3-8b",
    "mlx-community/Qwen3-8B-8bit": "qwen3-8b",
    "mlx-community/Qwen3-8B-6.5bit": "qwen3-8b",
    "Qwen/Qwen3-8B-MLX-4bit": "qwen3-8b",
    "Qwen/Qwen3-8B-MLX-bf16": "qwen3-8b",
    "mlx-community/Qwen3-8B-fp16": "qwen3-8b",
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
    "4bit": "4bit",
    "": "",
}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_normalise(name: str, key: str) -> None:
    assert normalise(name) == key
    assert normalise(key) == key


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
    assert resolution.draft is not None
    assert resolution.draft.repo == repo
    assert resolution.reason.startswith("published for ")
    assert "from which this model was made" not in resolution.reason


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-80B",
        "Qwen/Qwen3-8B-Coder",
        "Qwen/Qwen3-8",
        "Qwen/3-8B",
        "my-Qwen3-8B",
        "Qwen/Qwen3-8B-Base",
        "",
        "x",
    ],
)
def test_keys_are_compared_whole(target: str) -> None:
    resolution = resolve(target)
    assert resolution.draft is None
    assert resolution.reason == f"no published draft is known for {target}"


def test_current_generation_comes_first_with_its_revision() -> None:
    draft = resolve("mlx-community/Qwen3.6-35B-A3B-4bit").draft
    assert draft is not None
    assert draft.revision == "f181eece646affea2c38b2765f1aaa01a9734ccd"
    assert draft.taps == [1, 6, 11, 16, 22, 27, 32, 37]


def test_thinking_off_is_said() -> None:
    assert "trained with thinking off" in resolve("Qwen/Qwen3-8B").reason
    assert "thinking" not in resolve("Qwen/Qwen3.5-9B").reason


def test_base_model_comes_before_the_name() -> None:
    resolution = resolve("me/Qwen3-4B-4bit", base_models=["Qwen/Qwen3-8B"])
    assert resolution.draft is not None
    assert resolution.draft.repo == QWEN_8B
    assert resolution.reason.startswith("published for Qwen/Qwen3-8B, from which this model was made; what was changed")


def test_exact_id_comes_before_the_base_model() -> None:
    draft = resolve("Qwen/Qwen3-4B", base_models=["Qwen/Qwen3-8B"]).draft
    assert draft is not None
    assert draft.repo == "z-lab/Qwen3-4B-DFlash-b16"


def test_base_models_are_followed_for_three_hops() -> None:
    assert resolve("me/mine", base_models=["a/b", "c/d", "Qwen/Qwen3-8B"]).draft is not None
    resolution = resolve("me/mine", base_models=["a/b", "c/d", "e/f", "Qwen/Qwen3-8B"])
    assert resolution.draft is None
    assert resolution.reason == "no published draft is known for me/mine or what it was made from (a/b, c/d, e/f)"


def test_unknown_base_model_leaves_the_name() -> None:
    resolution = resolve("Qwen/Qwen3-8B-AWQ", base_models=["Qwen/Qwen3-8B-Base"])
    assert resolution.draft is not None
    assert "from which" not in resolution.reason


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7 is a DSpark draft"),
        ("Qwen/Qwen3-14B", "deepseek-ai/dflash_qwen3_14b_block7 is a DFlash draft with its own embedding and head"),
    ],
)
def test_kinds_that_cant_be_run_are_skipped_with_the_reason(target: str, kind: str) -> None:
    resolution = resolve(target)
    assert resolution.draft is None
    assert resolution.reason.startswith("what is published for ")
    assert " can't be run yet: " in resolution.reason
    assert kind in resolution.reason


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
        ("mlx-community/GLM-5.3-Flash-4bit", "incoai/GLM-5.3-Flash-DFlash2"),
        ("meta-models/Muse-Glimmer-30B", "z-lab/Muse-Glimmer-30B-DFlash2"),
    ],
)
def test_a_dflash_2_draft_is_found(target: str, draft: str) -> None:
    resolution = resolve(target)
    assert resolution.draft is not None
    assert (resolution.draft.repo, resolution.draft.kind) == (draft, "dflash2")


def test_gated_draft_is_said() -> None:
    assert "gated" in resolve("moonshotai/Kimi-K2.6").reason


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


@pytest.mark.parametrize(("card", "names"), CARDS.items())
def test_base_models_of_a_card(tmp_path: Path, card: str, names: list[str]) -> None:
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    assert base_models_of(tmp_path) == names


def test_base_models_of_card_and_config(tmp_path: Path) -> None:
    assert base_models_of(tmp_path) == []
    (tmp_path / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3-8B"}', encoding="utf-8")
    assert base_models_of(tmp_path) == ["Qwen/Qwen3-8B"]
    (tmp_path / "README.md").write_text("---\nbase_model: me/tuned\n---\n", encoding="utf-8")
    assert base_models_of(tmp_path) == ["me/tuned", "Qwen/Qwen3-8B"]
    assert resolve(str(tmp_path), base_models=base_models_of(tmp_path)).draft is not None


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"_name_or_path": 3}', b"\xff\xfe", b'{"_name_or_path": ""}'])
def test_broken_card_and_config_say_nothing(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "README.md").write_bytes(b"\xff\xfe---\n")
    (tmp_path / "config.json").write_bytes(config)
    assert base_models_of(tmp_path) == []


def test_table_has_no_target_twice() -> None:
    keys = Counter(normalise(target) for pair in pairs() for target in pair.targets)
    assert [key for key, n in keys.items() if n > 1 or not key] == []


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.targets[0])
def test_table_entry_is_well_formed(pair: registry.Pair) -> None:
    assert all(re.fullmatch(rf"{REPO}|[\w.-]+", target) for target in pair.targets)
    assert pair.drafts
    for number in (pair.hidden, pair.layers, pair.vocab):
        assert number is None or (type(number) is int and number > 0)
    seen = set()
    for draft in pair.drafts:
        if (draft.repo, draft.revision) in seen:  # an older generation whose commit nobody has stated
            assert (draft.revision, draft.note) == (None, SUPERSEDED)
        seen.add((draft.repo, draft.revision))
        assert re.fullmatch(REPO, draft.repo)
        assert draft.revision is None or re.fullmatch(r"[0-9a-f]{7}|[0-9a-f]{40}", draft.revision)
        assert draft.kind in KINDS
        assert draft.status in ("verified", "loads", "config", "table", "unseen")
        assert draft.block is None or 2 <= draft.block <= 16
        assert draft.mask is None or 0 <= draft.mask < (pair.vocab or 2**31)
        assert draft.thinking in (None, True, False)
        assert draft.gated in (None, True, False)
        assert draft.size is None or re.fullmatch(r"\d+(\.\d+)? Gi?B", draft.size)
        if draft.taps is not None:
            assert draft.taps == sorted(set(draft.taps))
            assert draft.taps[0] >= 0
            assert draft.taps[-1] < (pair.layers or 2**31)


def test_table_file_spells_every_field_out() -> None:
    entries = json.loads((Path(registry.__file__).parent / "pairs.json").read_text(encoding="utf-8"))
    fields = {frozenset(draft) for entry in entries for draft in entry["drafts"]}
    assert fields == {frozenset(registry.PublishedDraft.__dataclass_fields__)}
    assert {frozenset(entry) for entry in entries} == {frozenset(registry.Pair.__dataclass_fields__)}
