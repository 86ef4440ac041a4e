"""The `speculators` layout that we write: what its own package makes of the same draft, and back to us bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from dflash_mlx.convert.export import Verifier, find_verifier, speculators_config
from layouts import MARKED, SMALL, TABLE, base, plus, speculators
from reference.speculators_cases import DRAFTS, SECOND, SLIDING, write_pair
from tiny import draft2_config, draft_config, target_config

from dflash_mlx import DFlashError, DraftError, convert_draft
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.fields import read_json
from dflash_mlx.checkpoint.weights import expected_shapes

GOLDEN = json.loads((Path(__file__).parent / "reference" / "speculators.json").read_text())
# Keys that the package's classes add with their own defaults, and what it knows of itself.
DEFAULTS = {"auto_map", "transformers_version"}
LAYER_DEFAULTS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_window_layers", "use_cache", "dtype",
    "transformers_version",
}  # fmt: skip


def export(source: Path, target: Path | None, to: Path, **options: Any) -> dict[str, Any]:
    convert_draft(source, to, to="speculators", target=str(target) if target else None, **options)
    return json.loads((to / "config.json").read_text())


def read_or_skip(read: Callable[[], Any], unread: str) -> Any:
    """What `read` gives; skips the test where our reader says that it can't do this yet."""
    try:
        return read()
    except DraftError as error:
        if unread not in str(error):
            raise
        pytest.skip(f"the reader: {unread}")


def tensors(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))  # type: ignore[return-value]


def assert_same_tensors(a: Path, b: Path) -> None:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == theirs[n].dtype and mx.array_equal(ours[n], theirs[n]) for n in ours)


def assert_same_config(ours: dict[str, Any], theirs: dict[str, Any], target: str) -> None:
    """Key by key, except for the package's defaults and for the two values in which we differ on purpose."""
    ours, theirs = json.loads(json.dumps(ours)), json.loads(json.dumps(theirs))
    assert ours.pop("num_target_layers") == theirs.pop("num_target_layers", 4) == 4  # its own converter drops it
    theirs["speculators_config"]["verifier"]["name_or_path"] = target
    if "sliding_attention" not in theirs["transformer_layer_config"]["layer_types"]:
        theirs["sliding_window_non_causal"] = True  # vLLM takes it for full layers too, where the package ignores it
    layers, their_layers = ours.pop("transformer_layer_config"), theirs.pop("transformer_layer_config")
    assert {k: v for k, v in theirs.items() if k not in DEFAULTS} == ours
    expected = {k: v for k, v in their_layers.items() if k not in LAYER_DEFAULTS and v is not None}
    assert layers == expected


@pytest.mark.parametrize("name", DRAFTS)
def test_config_and_tensors_are_those_of_the_packages_own_converter(tmp_path: Path, name: str) -> None:
    source, target = write_pair(tmp_path, **DRAFTS[name])
    config = export(source, target, tmp_path / "out")
    assert_same_config(config, GOLDEN[name]["config"], str(target))
    assert {n: list(a.shape) for n, a in tensors(tmp_path / "out").items()} == GOLDEN[name]["tensors"]
    assert_same_tensors(tmp_path / "out", source)


def test_the_second_generation_has_its_own_type_and_fields(tmp_path: Path) -> None:
    nested = {**SECOND, "target_layer_ids": [0, 2], "mask_token_id": 255}
    raw = draft_config(**SLIDING, architectures=["DFlash2DraftModel"], is_causal=False, dflash_config=nested)
    draft = read_or_skip(lambda: parse_config(raw), "only DFlash (v1) drafts are read yet")
    notes: list[str] = []
    config = speculators_config(draft, Verifier("target", ["Qwen3ForCausalLM"]), notes)
    assert_same_config(config, GOLDEN["dflash2"]["config"], "target")
    assert any("DFlash 2" in note for note in notes)
    assert {n: list(shape) for n, shape in expected_shapes(draft).items()} == GOLDEN["dflash2"]["tensors"]


@pytest.mark.parametrize("name", DRAFTS)
def test_back_from_the_layout_is_bit_equal(tmp_path: Path, name: str) -> None:
    source, target = write_pair(tmp_path, **DRAFTS[name])
    first = export(source, target, tmp_path / "out")
    read_or_skip(lambda: convert_draft(tmp_path / "out", tmp_path / "mlx"), "this layout is not read yet")
    assert_same_tensors(tmp_path / "mlx", source)
    ours, theirs = (parse_config(read_json(folder / "config.json")) for folder in (tmp_path / "mlx", source))
    for fact in (
        "target_layer_ids", "block_size", "mask_token_id", "rope_theta", "layer_types", "sliding_window",
        "num_target_layers",
    ):  # fmt: skip
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    assert [ours.causal(i) for i in range(2)] == [theirs.causal(i) for i in range(2)]
    assert export(tmp_path / "mlx", target, tmp_path / "again") == first
    assert_same_tensors(tmp_path / "again", tmp_path / "out")


# What the layout has besides z-lab's: config.json's changes, and the tensors.
IDS = {**SMALL, "d2t": SMALL["d2t"].astype(mx.int64)}
OWN_FACTS: dict[str, tuple[dict[str, Any], dict[str, mx.array]]] = {
    "the anchor predicts": (
        {"sample_from_anchor": True, "speculators_config": {"proposal_methods": [{"speculative_tokens": 8}]}}, {}),
    "reduced vocabulary": ({"draft_vocab_size": 8}, {**IDS, "t2d": MARKED}),
    "with an embedding": ({"draft_vocab_size": 8}, {**IDS, "t2d": MARKED, "embed_tokens__weight": TABLE}),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_FACTS)
def test_a_draft_of_the_layout_comes_back_bit_equal(tmp_path: Path, name: str) -> None:
    changes, extra = OWN_FACTS[name]
    _, target = write_pair(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    stated = speculators(aux_hidden_state_layer_ids=[1, 3], sliding_window_non_causal=True, **changes)
    (source / "config.json").write_text(json.dumps(stated))
    mx.save_safetensors(str(source / "model.safetensors"), plus(**extra)(base()), {"format": "pt"})
    convert_draft(source, tmp_path / "mlx")
    config = export(tmp_path / "mlx", target, tmp_path / "again")
    assert_same_tensors(tmp_path / "again", source)
    result = convert_draft(source, tmp_path / "at once", to="speculators", target=str(target))
    assert json.loads((tmp_path / "at once" / "config.json").read_text()) == config
    assert_same_tensors(tmp_path / "at once", source)
    assert not any("t2d" in note for note in result.notes)
    assert any("embed_tokens" in note for note in result.notes) == ("embed_tokens__weight" in extra)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7 + config["sample_from_anchor"]
    for key in ("sample_from_anchor", "draft_vocab_size", "aux_hidden_state_layer_ids", "block_size", "mask_token_id"):
        assert config[key] == stated[key], key


def test_what_only_the_package_would_replace_or_refuse_is_refused() -> None:
    own, second = draft_config(), draft2_config(draft_vocab_size=8)
    own["dflash_config"] = {**own["dflash_config"], "has_lm_head": True}
    for raw, problem in ((own, "lm_head of its own"), (second, "a reduced vocabulary of DFlash 2")):
        with pytest.raises(DraftError, match=f"no place for {problem}"):
            speculators_config(parse_config(raw), Verifier("a/b"), [])


def test_a_target_of_another_depth_is_refused_after_the_way_back(tmp_path: Path) -> None:
    source, target = write_pair(tmp_path, num_target_layers=6)
    with pytest.raises(DraftError, match="num_target_layers 6 against 4"):
        export(source, target, tmp_path / "out")
    config = speculators_config(parse_config(read_json(source / "config.json")), Verifier("a/b"), [])
    assert parse_config(config).num_target_layers == 6


def test_a_quantised_draft_is_dequantised(tmp_path: Path) -> None:
    source, target = write_pair(tmp_path)
    convert_draft(source, tmp_path / "q", quantize=True, q_bits=8, q_group_size=32)
    export(tmp_path / "q", target, tmp_path / "out")
    assert {n: list(a.shape) for n, a in tensors(tmp_path / "out").items()} == GOLDEN["full"]["tensors"]
    assert "quantization" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"is_causal": True}, "causal full-attention layers"),
        ({"target_hidden_size": 32}, "target_hidden_size 32 beside hidden_size 64"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 255}}, "the target's last layer, 3"),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 255, "output_multiplier": 0.5}},
            "output_multiplier 0.5",
        ),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 255, "input_embedding_scale": 8.0}},
            "input_embedding_scale 8.0",
        ),
    ],
)
def test_what_the_layout_can_not_state_is_refused(changes: dict[str, Any], problem: str) -> None:
    draft = parse_config(draft_config(**changes))
    with pytest.raises(DraftError, match=r"no place for .*use --to hf") as refused:
        speculators_config(draft, Verifier("a/b"), [])
    assert problem in str(refused.value)


def test_a_tap_of_the_last_layer_that_the_layout_itself_stated_comes_back() -> None:
    draft = parse_config(speculators(aux_hidden_state_layer_ids=[1, 4], num_target_layers=4))
    assert draft.taps_before_norm
    config = speculators_config(parse_config(draft.to_dict()), Verifier("a/b", layers=4), [])
    assert config["aux_hidden_state_layer_ids"] == [1, 4]


def test_a_tap_of_the_last_layer_is_found_by_the_target_too() -> None:
    taps = {"target_layer_ids": [0, 3], "mask_token_id": 255}
    draft = parse_config(draft_config(num_target_layers=None, dflash_config=taps))
    speculators_config(draft, Verifier("a/b"), [])
    with pytest.raises(DraftError, match="last layer, 3"):
        speculators_config(draft, Verifier("a/b", layers=4), [])


@pytest.mark.parametrize(("kind", "vllm"), [(None, True), (False, False)])
def test_sliding_layers_are_causal_unless_stated(kind: bool | None, vllm: bool) -> None:
    notes: list[str] = []
    draft = parse_config(draft_config(**SLIDING, is_causal=kind))
    config = speculators_config(draft, Verifier("a/b"), notes)
    assert config["sliding_window_non_causal"] == (kind is False)
    assert any("vLLM" in note for note in notes) == vllm


# the target's name


def test_the_target_comes_from_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write_pair(tmp_path)
    (source / "README.md").write_text(f"---\nbase_model: {target}\n---\n")
    verifier = export(source, None, tmp_path / "out")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]}


def test_a_card_with_several_bases_names_no_target() -> None:
    draft = parse_config(draft_config())
    with pytest.raises(DFlashError, match="names no single target"):
        find_verifier(draft, "a/b", ["one/target", "another/target"], None, [])


def test_a_target_of_the_card_that_can_not_be_had_is_named_and_noted(tmp_path: Path) -> None:
    draft = parse_config(draft_config())
    notes: list[str] = []
    missing = str(tmp_path / "gone")
    assert find_verifier(draft, "a/b", missing, None, notes) == Verifier(missing)
    assert len(notes) == 1
    assert "no such folder" in notes[0]
    with pytest.raises(DFlashError, match="no such folder"):
        find_verifier(draft, "a/b", None, missing, notes)


def test_the_pair_list_names_the_target_of_a_published_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_mlx.convert import export as module

    def offline(name: str, **options: Any) -> Any:
        raise DFlashError("offline")

    monkeypatch.setattr(module.hub, "peek_config", offline)
    draft = parse_config(draft_config())
    assert find_verifier(draft, "modal-labs/Qwen3.5-4B-DFlash", None, None, []).name == "Qwen/Qwen3.5-4B"


def test_without_a_target_or_with_a_wrong_one_nothing_is_written(tmp_path: Path, cli: Any) -> None:
    source, _ = write_pair(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(target_config("qwen3", hidden=128)))
    command = ["convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "--to", "speculators"]
    for flags, says in (
        ([], "names no single target; give it as --target"),
        (["--target", other], "does not fit"),
        (["-q"], "--to speculators writes unquantised weights; leave out -q"),
        (["--to-hf"], "--to-hf is --to hf"),
    ):
        done = cli(*command, *flags)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert says in done.err
        assert not (tmp_path / "out").exists()
    for flags, says in ((["--to", "gguf"], "--to gguf is not one of"), (["--target", "a/b"], "goes with --to specul")):
        done = cli(*command[:5], *flags)
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert says in done.err


def test_to_hf_is_to_hf(tmp_path: Path, cli: Any) -> None:
    source, _ = write_pair(tmp_path)
    for name, flags in (("a", ["--to", "hf"]), ("b", ["--to-hf"])):
        assert cli("convert", "--hf-path", source, "--mlx-path", tmp_path / name, *flags).code == 0
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


@pytest.mark.reference
@pytest.mark.parametrize("name", DRAFTS)
def test_the_package_loads_what_we_write(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("speculators")
    import numpy as np
    from speculators import SpeculatorModel

    source, target = write_pair(tmp_path, **DRAFTS[name])
    config = export(source, target, tmp_path / "out")
    model = SpeculatorModel.from_pretrained(str(tmp_path / "out"))
    assert type(model).__name__ == config["architectures"][0] == "DFlashDraftModel"
    loaded = {n: array.numpy() for n, array in model.state_dict().items()}
    written = {n: np.array(array) for n, array in tensors(tmp_path / "out").items()}
    assert all(np.array_equal(loaded[n], array) for n, array in written.items())
    of_the_target = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert loaded.keys() - written.keys() == of_the_target
    model.save_pretrained(tmp_path / "saved")
    assert_same_config(config, json.loads((tmp_path / "saved" / "config.json").read_text()), str(target))


@pytest.mark.reference
def test_the_recorded_package_is_the_installed_one() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("speculators")
    from reference.record_speculators import converted, second_generation

    assert {**{name: converted(changes) for name, changes in DRAFTS.items()}, "dflash2": second_generation()} == GOLDEN
