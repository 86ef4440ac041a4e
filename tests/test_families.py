"""The family matrix in its short form: every causal language model of the installed mlx-lm. See `matrix.py`."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import command_matrix
import matrix
import mlx.core as mx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from dflash_mlx import DFlashError
from dflash_mlx.target import Target
from dflash_mlx.target.args import argument

TABLE = json.loads(matrix.TABLE.read_text())
BUILT = [name for name, entry in matrix.CONFIGS.items() if "skip" not in entry]
# Targets of published drafts (facts of the pair list), by mlx-lm module.
PUBLISHED = [
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_text", "gpt_oss", "llama",
    "kimi_k25",
    "deepseek_v3", "minimax", "glm_moe_dsa", "lfm2", "lfm2_moe", "nemotron_h", "muse_glimmer",
]  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
def test_family(name):
    outcome = matrix.run(name)
    row = TABLE["families"][name]
    assert outcome.status == row["status"], f"families.json says {row['status']}: run tests/matrix.py --write"
    assert (outcome.reason or "") == row.get("reason", "")
    assert outcome.caches == row["caches"]


@pytest.mark.parametrize("name", BUILT)
def test_what_requests_say_in_a_batch(name):
    verdict, known = matrix.batched(name), TABLE["families"][name]["batch"]
    assert (verdict == "verified") == (known == "verified"), f"{verdict}: run tests/matrix.py --write --batch"


WRAPPERS = [name for name in BUILT if "text_config" in matrix.CONFIGS[name]["config"]]


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_serve_and_benchmark(name, tmp_path):
    command_matrix.run(name, tmp_path)


@pytest.mark.parametrize("name", WRAPPERS)
def test_arguments_of_the_text_model_are_found(name):
    model, text = matrix.build(name), matrix.CONFIGS[name]["config"]["text_config"]
    assert argument(model, "vocab_size") == text["vocab_size"]
    assert argument(model, "nonsense") is None
    with pytest.raises(DFlashError, match=f"vocabulary ends at {text['vocab_size'] - 1}"):
        Target(model).check_ids(mx.array([text["vocab_size"]]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_targets_of_published_drafts_are_verified(name):
    assert TABLE["families"][name]["status"] == "verified"


def test_every_module_of_mlx_lm_is_known():
    """A new release brings new modules: give each a config in `families.json` here, or a reason to skip it."""
    assert sorted(matrix.modules()) == sorted(matrix.CONFIGS)


def test_the_release_of_mlx_lm_is_bounded_to_what_was_tested():
    """Rewind, taps and the server use names that mlx-lm promises nobody, so its next release is not let in unseen."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    wanted = [
        Requirement(line) for line in re.findall(r'"(mlx.*?)"', text) if line.startswith(("mlx>", "mlx[", "mlx-lm"))
    ]
    assert sorted(each.name for each in wanted) == ["mlx", "mlx", "mlx-lm"]
    for each in wanted:
        tested = Version(TABLE["mlx_lm"] if each.name == "mlx-lm" else metadata.version("mlx"))
        assert tested in each.specifier
        assert f"{tested.major}.{tested.minor + 1}" not in each.specifier
        assert f"{tested.major + 1}.0" not in each.specifier


def test_the_table_is_whole():
    assert sorted(TABLE["families"]) == sorted(matrix.CONFIGS)
    assert not [
        name
        for name, row in TABLE["families"].items()
        if row["status"] not in ("verified", "lookup only", "refused", "not built")
    ]


def test_skipped_modules_say_why():
    for entry in matrix.CONFIGS.values():
        assert "config" in entry or len(entry["skip"]) > 20
