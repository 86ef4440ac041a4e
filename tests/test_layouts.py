"""Every published layout of a v1 draft loads, converts and means what its own code means (cases C6, C18, C20, C21).

The tables are in `layouts.py`: other spellings must give the same bits as z-lab's, what z-lab's layout has no word for
must agree with the plain numpy of `plain.py`, and what can't be read must be named.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from layouts import (
    FAULTS,
    GATES,
    HIDDEN,
    KNOWN,
    MASK,
    OTHER,
    OWN,
    QKV,
    SAME,
    SINKS,
    SMALL,
    TABLE,
    TAP_NORMS,
    VOCAB,
    Tensors,
    base,
    chain,
    laguna,
    mimo,
    muse,
    nested,
    plus,
    prefixed,
    quantised,
    random,
    zlab,
)  # fmt: skip
from mlx.utils import tree_flatten
from plain import block_logits as plain_logits
from serving import save_tiny_pair
from tiny import make_target

from dflash_mlx import DraftError, convert_draft, generate_step, inspect_draft, load, load_draft
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.fields import read_json
from dflash_mlx.decode.dflash import DFlashDrafter
from dflash_mlx.decode.drafter import DraftRequest
from dflash_mlx.decode.sampling import TokenPicker
from dflash_mlx.draft import DFlashDraftModel
from dflash_mlx.target import Target

HAS_TORCH = importlib.util.find_spec("torch") is not None

# What is asserted ----------------------------------------------------------------------------------


def write(folder: Path, config: dict[str, Any], weights: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def block_ids(draft: DFlashDraftModel) -> mx.array:
    return draft.block(mx.array([[4]]), 5)


def run(draft: DFlashDraftModel) -> mx.array:
    """Logits of a block behind 20 rows of context, 12 of which went in before."""
    context = draft.context_feature(taps(draft))
    cache = draft.make_cache()
    draft.extend(context[:, :12], cache)
    how = {"embed": lambda ids: TABLE[ids], "head": lambda h: h @ TABLE.T}
    return draft.logits(block_ids(draft), context[:, 12:], cache, **how)[0]


def taps(draft: DFlashDraftModel) -> mx.array:
    return random(1, 20, draft.config.context_width, seed=91)


def assert_converts(folder: Path, logits: mx.array, tmp_path: Path) -> None:
    """The draft converts, loads again with the same bits, and its config says the same."""
    for to_hf in (False, True):
        result = convert_draft(folder, tmp_path / f"converted-{to_hf}", to_hf=to_hf)
        again = load_draft(result.path)
        assert mx.array_equal(run(again), logits)
        stated = parse_config(read_json(result.path / "config.json"))
        assert again.config == stated == parse_config(json.loads(json.dumps(stated.to_dict())))
        names = set(mx.load(str(result.path / "model.safetensors")))
        assert names == set(dict(tree_flatten(again.parameters())))


@pytest.mark.parametrize("name", SAME)
def test_another_spelling_gives_the_same_bits(name, tmp_path):
    config, canonical, spell = SAME[name]
    weights = base(num_hidden_layers=canonical["num_hidden_layers"])
    plain = quantised(weights) if "quantization" in canonical else weights
    expected = run(load_draft(write(tmp_path / "z-lab", canonical, plain)))
    folder = write(tmp_path / "draft", config, spell(weights))
    draft = load_draft(folder)
    assert mx.array_equal(run(draft), expected)
    assert draft.config.block_size == canonical["block_size"]
    assert draft.config.target_layer_ids == tuple(canonical["dflash_config"]["target_layer_ids"])
    if "quantization" not in canonical:
        assert_converts(folder, expected, tmp_path)
    assert inspect_draft(folder).problem is None


@pytest.mark.parametrize("name", OTHER)
def test_what_z_lab_has_no_word_for_agrees_with_plain_numpy(name, tmp_path):
    config, change, spell, facts = OTHER[name]
    weights = change(base())
    folder = write(tmp_path / "draft", config, spell(weights))
    draft, eager = load_draft(folder), load_draft(folder, attn_implementation="eager")
    logits = run(draft)

    def plain(weights: Tensors, **facts: Any) -> np.ndarray:
        arrays = {key: np.array(value) for key, value in weights.items()}
        context = np.array(taps(draft)[0], np.float64)
        return plain_logits(arrays, np.array(block_ids(draft)[0]), context, np.array(TABLE, np.float64), **facts)

    expected = plain(weights, **facts)
    assert expected.shape == (5, VOCAB)
    np.testing.assert_allclose(np.array(logits), expected, atol=2e-3, rtol=1e-3)
    np.testing.assert_allclose(np.array(run(eager)), expected, atol=2e-3, rtol=1e-3)
    if weights["fc.weight"].shape == base()["fc.weight"].shape and not facts.get("from_anchor"):
        assert np.abs(expected - plain(base())).max() > 0.05  # the option does something
    assert_converts(folder, logits, tmp_path)
    assert inspect_draft(folder).problem is None


@pytest.mark.parametrize(
    ("config", "change", "own"),
    [
        (zlab(final_logit_softcapping=30.0), base, []),
        (laguna(), lambda: chain(plus(**GATES, **TAP_NORMS), QKV)(base()), ["gating", "aux_hidden_norms"]),
        (mimo(), lambda: plus(**SINKS, **MASK)(base()), ["attention_sink_layers", "mask_embedding"]),
        (zlab(), lambda: plus(**OWN)(base()), ["has_embed_tokens", "has_lm_head"]),
        (OTHER["reduced vocabulary"][0], lambda: plus(**SMALL)(base()), ["draft_vocab_size"]),
    ],
    ids=["z-lab", "Laguna", "MiMo", "its own embedding", "reduced vocabulary"],
)
def test_the_pytorch_layout_says_what_only_we_read(config, change, own, tmp_path):
    folder = write(tmp_path / "draft", config, change())
    notes = [note.split(";")[0] for note in convert_draft(folder, tmp_path / "out", to="hf").notes]
    assert {f"only dflash-mlx reads {name}" for name in own} <= set(notes)
    assert any("only dflash-mlx reads" in note for note in notes) == bool(own)
    assert not any("only dflash-mlx" in note for note in convert_draft(folder, tmp_path / "mlx").notes)


# Other files ---------------------------------------------------------------------------------------


def test_a_draft_beside_its_target_lies_in_a_subfolder(tmp_path):
    folder = write(tmp_path / "dflash", mimo(), {**base(), **plus(**SINKS, **MASK)({})})
    write(tmp_path, {"model_type": "mimo_v2_flash", "hidden_size": 64}, {"model.embed_tokens.weight": TABLE})
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    logits = run(load_draft(folder))
    assert mx.array_equal(run(load_draft(tmp_path)), logits)
    assert inspect_draft(tmp_path).problem is None
    card = convert_draft(tmp_path, tmp_path / "out").path / "README.md"
    assert "license: mit" in card.read_text()


def test_shards_of_a_fused_layer_are_put_together(tmp_path):
    weights = chain(QKV, prefixed("model."))(base())
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(zlab()))
    index = {}
    for i, name in enumerate(weights):
        file = f"model-{i % 3 + 1:05d}-of-00003.safetensors"
        index[name] = file
    for file in set(index.values()):
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in weights if index[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    expected = run(load_draft(write(tmp_path / "z-lab", zlab(), base())))
    assert mx.array_equal(run(load_draft(folder)), expected)
    assert_converts(folder, expected, tmp_path)


MASK_TEXT = {"target_layer_ids": [0, 2], "mask_token": "<|mask|>"}


def test_a_mask_token_stated_as_text_has_its_tokenizers_id(tmp_path):
    folder = write(tmp_path / "draft", zlab(dflash_config=MASK_TEXT), base())
    with pytest.raises(DraftError, match=r"config.json: mask_token: '<\|mask\|>' is no special token .*draft; state"):
        load_draft(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<|mask|>": 255}))
    expected = run(load_draft(write(tmp_path / "z-lab", zlab(), base())))
    assert mx.array_equal(run(load_draft(folder)), expected)
    assert_converts(folder, expected, tmp_path)
    write(folder, zlab(dflash_config={**MASK_TEXT, "mask_token": 255}), base())
    with pytest.raises(DraftError, match="mask_token: 255 is no special token"):
        load_draft(folder)


def test_a_mask_token_stated_as_text_may_be_the_targets(tmp_path):
    target, folder = save_tiny_pair(tmp_path, "qwen3")
    stated = json.loads((folder / "config.json").read_text()) | {"dflash_config": MASK_TEXT}
    (folder / "config.json").write_text(json.dumps(stated))
    _, draft, tokenizer = load(str(target), str(folder))
    assert draft.config.mask_token_id == tokenizer.convert_tokens_to_ids("<|mask|>") == 258


def torch_only(test: Any) -> Any:
    return pytest.mark.reference(pytest.mark.skipif(not HAS_TORCH, reason="needs torch")(test))


def save_torch(file: Path, value: Any) -> None:
    import torch

    def as_torch(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: as_torch(inner) for key, inner in x.items()}
        return torch.from_numpy(np.array(x)) if isinstance(x, mx.array) else x

    torch.save(as_torch(value), file)


@torch_only
def test_specforge_training_state_holds_a_draft(tmp_path):
    expected = run(load_draft(write(tmp_path / "z-lab", zlab(), base())))
    folder = write(tmp_path / "draft", zlab(), base())
    (folder / "model.safetensors").unlink()
    state = {"draft_state_dict": prefixed("draft_model.")(base()), "epoch": 3, "optimizer": {"lr": 1e-4}}
    save_torch(folder / "training_state.pt", state)
    assert mx.array_equal(run(load_draft(folder)), expected)
    assert_converts(folder, expected, tmp_path)


@torch_only
@pytest.mark.parametrize("form", ["row", "object"])
def test_mask_embedding_pt_is_the_mask_tokens_row(form, tmp_path):
    row = MASK["mask_embedding"]
    expected = run(load_draft(write(tmp_path / "tensor", zlab(), {**base(), **MASK})))
    folder = write(tmp_path / "draft", zlab(), base())
    save_torch(folder / "mask_embedding.pt", row if form == "row" else {"embedding": row[None], "mask_token_id": 255})
    assert mx.array_equal(run(load_draft(folder)), expected)
    assert_converts(folder, expected, tmp_path)


@torch_only
def test_mask_embedding_pt_of_another_token_is_refused(tmp_path):
    folder = write(tmp_path / "draft", zlab(), base())
    save_torch(folder / "mask_embedding.pt", {"embedding": MASK["mask_embedding"], "mask_token_id": 7})
    with pytest.raises(DraftError, match=r"mask_embedding.pt: mask_token_id 7 differs from config.json's 255"):
        load_draft(folder)


# What a round gets ---------------------------------------------------------------------------------


def propose(draft: DFlashDraftModel, width: int, noise: Any = None) -> Any:
    picker = TokenPicker()
    context = draft.context_feature(taps(draft))
    target = Target(make_target())
    request = DraftRequest(mx.array([4], mx.int32), width, [4], context, draft.make_cache(), target, picker, noise)
    return DFlashDrafter(draft).propose(request)


def successor(from_anchor: bool) -> tuple[dict[str, Any], Tensors]:
    """A draft whose slots each predict the token after the one that they are given: its layers pass it through."""
    weights = {name: w * 0 if "o_proj" in name or "down_proj" in name else w for name, w in base().items()}
    table = OWN["embed_tokens__weight"]
    weights["norm.weight"] = mx.ones((HIDDEN,))
    head = mx.concatenate([table[-1:], table[:-1]])  # row t + 1 answers to the embedding of t
    weights |= {"embed_tokens.weight": table, "lm_head.weight": head / mx.linalg.norm(head, axis=1, keepdims=True)}
    return zlab(block_size=4, **nested(sample_from_anchor=from_anchor, mask_token_id=100)), weights


@pytest.mark.parametrize(("from_anchor", "widest", "expected"), [(True, 5, [5, 101, 101, 101]), (False, 4, [101] * 3)])
def test_where_the_first_proposal_comes_from(from_anchor, widest, expected, tmp_path):
    draft = load_draft(write(tmp_path / "draft", *successor(from_anchor)))
    drafter = DFlashDrafter(draft)
    assert drafter.block_size == draft.config.widest_block == widest
    assert draft.config.block_size == 4  # slots as trained: the anchor and three mask tokens, either way
    assert propose(draft, widest).tokens.tolist() == expected
    assert propose(draft, 2).tokens.tolist() == expected[:1]


def test_proposals_of_a_reduced_vocabulary_are_target_ids(tmp_path):
    weights = plus(**SMALL)(base())
    draft = load_draft(write(tmp_path / "draft", zlab(draft_vocab_size=8), weights))
    tokens = propose(draft, 6).tokens.tolist()
    assert set(tokens) <= set(KNOWN.tolist())
    hidden = random(1, 5, HIDDEN, seed=3)
    logits = draft.compute_logits(hidden, head=lambda h: 1 / 0)
    assert logits.shape == (1, 5, VOCAB)
    known = logits[..., KNOWN]
    assert mx.allclose(known, hidden @ SMALL["lm_head__weight"].T, atol=1e-5)
    others = [i for i in range(VOCAB) if i not in KNOWN.tolist()]
    assert mx.all(logits[..., mx.array(others)] == -mx.inf)


@pytest.mark.parametrize("name", ["reduced vocabulary", "DeepSpec", "Laguna", "MiMo", "target_hidden_size of its own"])
@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 1}, {"temp": 0.9, "seed": 1, "acceptance": "rejection"}])
def test_generating_with_it_stays_lossless(name, options, tmp_path):
    config, change, spell, _ = OTHER[name]
    draft = load_draft(write(tmp_path / "draft", config, spell(change(base()))))
    hidden = 80 if "hidden" in name else HIDDEN
    target = make_target(hidden=hidden)
    prompt = mx.array([3, 1, 4, 1, 5])

    def tokens(draft_model: Any, **options: Any) -> list[int]:
        return [int(token) for token, *_ in generate_step(prompt, target, draft_model, max_tokens=24, **options)]

    found = tokens(draft, **options)
    assert len(found) == 24
    if options.get("acceptance") != "rejection":
        assert found == tokens(None, **options)


# What can't be read


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_read_is_named(name, tmp_path):
    config, spell, named = FAULTS[name]
    folder = write(tmp_path / "draft", config, spell(base()))
    with pytest.raises(DraftError) as caught:
        load_draft(folder)
    message = str(caught.value)
    assert named in message
    assert str(folder) in message
    assert "\n" not in message
    with pytest.raises(DraftError):
        convert_draft(folder, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("name", OTHER)
def test_a_config_alone_round_trips(name):
    config = parse_config(OTHER[name][0])
    assert parse_config(json.loads(json.dumps(config.to_dict()))) == config


def test_the_muse_family_states_no_vocabulary():
    config = muse(vocab_size=None, mask_token_id=201818)
    assert parse_config({key: value for key, value in config.items() if value is not None}).vocab_size == 202048
