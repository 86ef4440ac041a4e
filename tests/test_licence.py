"""What may be uploaded, by the source's licence, and what a card carries on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dflash_mlx.convert.licence import read_terms
from fake_hub import FakeHub
from test_convert import card, published, run_with_hub

from dflash_mlx import DFlashError, convert_draft, demo

UPLOAD = ("--upload-repo", "me/copy")


def terms(folder: Path, readme: str, source: str = "a/b", revision: str | None = None) -> Any:
    (folder / "README.md").write_text(readme)
    return read_terms(source, revision, folder, [])


def front(**fields: str) -> str:
    return "---\n" + "".join(f"{name}: {value}\n" for name, value in fields.items()) + "---\n"


@pytest.mark.parametrize(
    ("readme", "problem"),
    [
        ("", "it states no licence, so nobody may pass it on; ask its authors"),
        (front(base_model="a/b"), "it states no licence"),
        (front(license="unknown"), "it states no licence"),
        (front(license="other"), "it states no licence"),
        (front(license="[]"), "it states no licence"),
        (front(license="cc-by-nc-nd-4.0"), "its licence, cc-by-nc-nd-4.0, allows no derivatives"),
        (front(license="cc-by-nd-4.0"), "allows no derivatives"),
        (front(license="[apache-2.0, cc-by-nc-nd-4.0]"), "apache-2.0, cc-by-nc-nd-4.0, allows no derivatives"),
        (front(license="other", license_name="CC BY-NC-ND 4.0"), "its licence, CC BY-NC-ND 4.0, allows no derivatives"),
        (front(license="other", license_name="acme-no-derivatives"), "allows no derivatives"),
        (front(license="other", license_link="https://a.org/by-nd/4.0"), "https://a.org/by-nd/4.0, allows no deriv"),
        (front(license="mit", extra_gated_prompt="sign here"), "it is gated"),
    ],
)
def test_what_may_not_be_passed_on_is_refused_with_the_reason(tmp_path: Path, readme: str, problem: str) -> None:
    with pytest.raises(DFlashError) as refused:
        terms(tmp_path, readme).check_upload()
    assert str(refused.value).startswith("--upload-repo: a/b can't be passed on: it")
    assert str(refused.value).endswith("; leave out --upload-repo")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("readme", "described"),
    [
        (front(license="mit"), "mit"),
        (front(license="apache-2.0"), "apache-2.0"),
        (front(license="gemma"), "gemma"),
        (front(license="[mit, apache-2.0]"), "mit, apache-2.0"),
        (front(license="other", license_name="nvidia-open-model-license"), "nvidia-open-model-license"),
        (front(license="other", license_link="https://a.org/terms"), "https://a.org/terms"),
        (front(license="cc-by-nc-4.0"), "cc-by-nc-4.0"),
        (front(license="bsd-3-clause"), "bsd-3-clause"),
        (front(license="other", license_name="android-and-friends"), "android-and-friends"),
    ],
)
def test_other_licences_may(tmp_path: Path, readme: str, described: str) -> None:
    read = terms(tmp_path, readme)
    read.check_upload()
    assert read.described == described


@pytest.mark.parametrize(
    ("source", "revision", "licence", "name"),
    [
        ("z-lab/Qwen3.5-4B-DFlash", None, "apache-2.0", None),
        ("z-lab/Qwen3.5-4B-DFlash", "96899cc27094", "mit", None),
        ("modal-labs/Qwen3.5-4B-DFlash", None, "apache-2.0", None),
        ("incoai/GLM-5.3-Flash-DFlash2", None, "cc-by-nc-nd-4.0", None),
        ("nvidia/Kimi-K2.7-Code-DFlash", None, "other", "nvidia-open-model-license"),
        ("a/b", None, None, None),
    ],
)
def test_the_pair_list_answers_where_the_card_is_silent(
    tmp_path: Path, source: str, revision: str | None, licence: str | None, name: str | None
) -> None:
    read = terms(tmp_path, "", source, revision)
    assert (read.licence, read.name) == (licence, name)
    assert terms(tmp_path, front(license="bsd"), source, revision).licence == "bsd", "the card comes first"


def test_the_pair_list_knows_gated_repos_and_targets(tmp_path: Path) -> None:
    read = terms(tmp_path, front(license="mit"), "z-lab/MiniMax-M2.5-DFlash")
    with pytest.raises(DFlashError, match="it is gated"):
        read.check_upload()
    assert read.base_model == "MiniMax-M2.5"


def test_the_bundled_draft_is_ours() -> None:
    read_terms(demo.NAME, None, demo.DRAFT, []).check_upload()


def test_ones_own_draft_says_how_to_state_a_licence(tmp_path: Path, cli: Any) -> None:
    source = published(tmp_path / "draft")
    done = cli("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", *UPLOAD)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert f"if it is yours, state `license:` in {source / 'README.md'}" in done.err
    assert not (tmp_path / "out").exists(), "refused before the work"


def test_a_copy_for_oneself_is_always_made_and_stays_refused(tmp_path: Path, cli: Any) -> None:
    source = published(tmp_path / "draft")
    (source / "README.md").write_text(front(license="cc-by-nc-nd-4.0"))
    assert cli("convert", "--hf-path", source, "--mlx-path", tmp_path / "out").code == 0
    done = cli("convert", "--hf-path", tmp_path / "out", "--mlx-path", tmp_path / "again", *UPLOAD)
    assert done.code == 1
    assert "allows no derivatives" in done.err


def test_the_card_carries_licence_target_tags_and_notice(tmp_path: Path) -> None:
    source = published(tmp_path / "draft")
    (source / "README.md").write_text(front(license="gemma", base_model="google/gemma-4-31B-it", tags="[dflash, code]"))
    for name in ("LICENSE", "NOTICE.txt"):
        (source / name).write_text(f"the {name}")
    convert_draft(source, tmp_path / "mlx")
    data, text = card(tmp_path / "mlx")
    assert (data["license"], data["base_model"]) == ("gemma", "google/gemma-4-31B-it")
    assert data["tags"] == ["mlx", "dflash", "speculative-decoding", "code"]
    assert "Licence: gemma. Gemma is provided under and subject to the Gemma Terms of Use" in text
    assert (tmp_path / "mlx" / "NOTICE.txt").read_text() == "the NOTICE.txt"
    convert_draft(tmp_path / "mlx", tmp_path / "hf", to="hf")
    data, _ = card(tmp_path / "hf")
    assert data["tags"] == ["dflash", "speculative-decoding", "code"]
    assert "library_name" not in data
    assert (tmp_path / "hf" / "LICENSE").read_text() == "the LICENSE"


def test_a_repo_without_a_licence_is_not_uploaded(tmp_path: Path) -> None:
    with FakeHub() as hub:
        hub.add_repo("some-lab/draft", published(tmp_path / "draft"))
        argv = ["convert", "--hf-path", "some-lab/draft", "--mlx-path", str(tmp_path / "out"), *UPLOAD]
        code, out, err = run_with_hub(hub, tmp_path / "home", {"it": argv})["it"]
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "some-lab/draft can't be passed on: it states no licence, so nobody may pass it on; ask its authors" in err
    assert hub.uploads == {}


@pytest.mark.parametrize("stated", ["5", "{a: 1}", "[1, a/b]", "2024-01-01", '"a\\eb"'])
def test_a_base_model_of_another_type_is_not_taken_over(tmp_path: Path, stated: str) -> None:
    (tmp_path / "README.md").write_text(front(base_model=stated, license="mit", tags="5"))
    notes: list[str] = []
    read = read_terms("a/b", None, tmp_path, notes)
    assert (read.licence, read.base_model, read.tags) == ("mit", None, [])
    assert "base_model" in notes[0]
