"""DFlash 2: convolutions, the walk over candidates, its exact distribution, its files, and lossless decoding."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from scripted import plain_tokens
from tiny import draft2_config, draft_config, make_draft, make_draft2, make_hybrid, make_target, save_draft

import dflash_mlx
from dflash_mlx import DraftError, convert_draft, generate_step, inspect_draft, stream_generate
from dflash_mlx.api import _tokens
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.fields import read_json
from dflash_mlx.checkpoint.weights import check_draft_folder, load_draft_folder
from dflash_mlx.decode import GenerationStats
from dflash_mlx.decode.acceptance import count_accepted, reject
from dflash_mlx.decode.filters import Filters
from dflash_mlx.decode.sampling import TokenPicker
from dflash_mlx.draft import DFlash2DraftModel
from dflash_mlx.draft.dflash2 import GroupedDynamicCausalConv, best, follow
from dflash_mlx.draft.model import Draw

RNG = np.random.default_rng(0)
PROMPT = [(7 * i + 3) % 250 for i in range(40)]


def normal(*shape: int) -> mx.array:
    return mx.array(RNG.normal(size=shape), mx.float32)


def decode(model, prompt, draft, n=40, **options) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    tokens = [t.id for t in _tokens(mx.array(prompt), model, draft, stats, max_tokens=n, **options)]
    return tokens, stats


# The parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "group", "length"), [(1, 8, 5), (2, 4, 5), (4, 8, 6), (4, 1, 3), (6, 2, 2)])
def test_convolutions_are_those_of_the_definition(kernel, group, length):
    hidden = 8
    conv = GroupedDynamicCausalConv(hidden, kernel, group)
    conv.base_kernel = normal(2, kernel, hidden)
    conv.kernel_projection.weight = normal(*conv.kernel_projection.weight.shape)
    x = normal(1, length, hidden)
    dynamic = np.array(x[0] @ conv.kernel_projection.weight.T).reshape(length, 2, kernel, hidden // group)

    def written_out(rows, which):
        out = np.zeros_like(rows)
        for row in range(length):
            for offset in range(min(kernel, row + 1)):
                for c in range(hidden):
                    weight = conv.base_kernel[which, offset, c].item() + dynamic[row, which, offset, c // group]
                    out[row, c] += weight * rows[row - offset, c]
        return out

    expected = written_out(np.tanh(written_out(np.array(x[0]), 0)), 1)
    assert np.abs(np.array(conv(x, mx.tanh)[0]) - expected).max() < 1e-4


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 300), rows=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
def test_best_are_the_best(vocab, rows, seed, data):
    k = data.draw(st.integers(1, vocab))
    random = np.random.default_rng(seed)
    scores = random.integers(0, data.draw(st.sampled_from([3, 10**6])), (rows, vocab)).astype(np.float32)
    scores[random.random((rows, vocab)) < data.draw(st.sampled_from([0, 0.9]))] = -np.inf  # filtered
    found = np.array(best(mx.array(scores), k))
    assert found.shape == (rows, k)
    assert all(len(set(row)) == k for row in found.tolist()), "an index twice"
    taken = np.take_along_axis(scores, found, -1)
    assert np.array_equal(np.sort(taken, -1), np.sort(scores, -1)[:, vocab - k :])


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 17), k=st.integers(1, 5), seed=st.integers(0, 99))
def test_follow_walks_step_by_step(length, k, seed):
    steps = np.random.default_rng(seed).integers(0, k, (length, k))
    steps[0] = steps[0, 0]
    path = [steps[0, 0]]
    for i in range(1, length):
        path.append(steps[i, path[-1]])
    assert follow(mx.array(steps)).tolist() == path


# The walk ----------------------------------------------------------------------------------------------------


def plain_walk(draft, hidden, logits, anchor, k, temp=1.0, noise=None) -> tuple[list[int], list[dict[int, float]]]:
    """The method as it is told: position by position. Tokens, and the scores of the candidates at each."""
    selector, tokens, scores, before = draft.candidate_selector, [], [], anchor
    a, b = (np.array(book, np.float64) for book in (selector.predecessor_codebook, selector.successor_codebook))
    projected = np.array(hidden @ selector.hidden_projection.weight.T, np.float64)
    for i, row in enumerate(np.array(logits, np.float64)):
        candidates = np.argsort(-row)[:k]
        score = {int(c): float((row[c] + (a[before] * projected[i]) @ b[c]) / temp) for c in candidates}
        noisy = {c: value + (0 if noise is None else noise[i][c]) for c, value in score.items()}
        before = max(noisy, key=noisy.__getitem__)
        tokens.append(before)
        scores.append(score)
    return tokens, scores


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("length", [1, 2, 7, 15])
def test_pick_walks_the_best_path_and_never_proposes_a_padded_row(length, padding):
    draft = make_draft2(top_k=12)
    head = normal(256 + padding, 64)
    head[256:] = head[256:] * 0 + 10.0  # the largest logits of all where the hidden state sums to more than 0
    for seed in range(5):
        mx.random.seed(seed)
        hidden = mx.random.normal((1, length, 64)) * 0.3 + 0.1
        tokens, finite, scores = draft.pick(hidden, mx.array([seed]), lambda h: h @ head.T)
        logits = (hidden[0] @ head.T)[:, :256]
        assert tokens.tolist() == plain_walk(draft, hidden[0], logits, seed, 12)[0]
        assert (finite.item(), scores) == (True, None)


def test_logit_facts_count_before_the_walk():
    changes = {"final_logit_softcapping": 2.0, "output_multiplier": 0.7}
    draft, head, hidden = make_draft2(**changes), normal(256, 64), normal(1, 7, 64)
    logits = 2.0 * mx.tanh(0.7 * (hidden[0] @ head.T) / 2.0)
    assert (
        draft.pick(hidden, mx.array([4]), lambda h: h @ head.T)[0].tolist()
        == (plain_walk(draft, hidden[0], logits, 4, 12)[0])
    )


def test_scores_are_the_distribution_of_the_path_that_was_walked():
    draft, head, hidden, temp = make_draft2(top_k=6), normal(260, 64), normal(1, 7, 64), 0.8
    picker = TokenPicker(temp=temp, seed=1, rejection=True)
    for position in range(20):
        gumbel = picker.gumbel(range(position, position + 7), 260)
        draw = Draw(lambda logits: picker.scores(logits, None), temp, gumbel)
        tokens, _, scores = draft.pick(hidden, mx.array([9]), lambda h: h @ head.T, draw)
        logits = (hidden[0] @ head.T)[:, :256]
        expected_tokens, expected = plain_walk(draft, hidden[0], logits, 9, 6, temp, np.array(gumbel))
        assert tokens.tolist() == expected_tokens
        dense = np.full((7, 260), -np.inf)
        for row, found in zip(dense, expected, strict=True):
            row[list(found)] = list(found.values())
        q, expected_q = (np.array(mx.softmax(mx.array(x, mx.float32), axis=-1)) for x in (scores, dense))
        assert np.abs(q - expected_q).max() < 1e-5


def joint_of_two_tokens(rule: str, temp: float, filters: Filters, runs: int, wrong: bool = False) -> float:
    """How far the first two tokens after token 0 are from plain sampling: a block of 3, and another if needed.

    Total variation between the empirical joint over many runs and the exact one.
    """
    vocab = 12
    target = mx.array(np.random.default_rng(5).normal(size=(vocab, vocab)) * 1.5, mx.float32)
    draft = make_draft2(top_k=5, vocab_size=vocab, dflash_config={"target_layer_ids": [0], "mask_token_id": 1})
    hidden, head = mx.random.normal((1, 2, 64)), mx.random.normal((vocab, 64)) * 0.2
    picker = TokenPicker(temp=temp, seed=1, filters=filters, rejection=rule == "rejection")
    keys = iter(mx.random.split(mx.random.key(3), 4))
    picks = mx.random.gumbel((runs, 3, vocab), key=next(keys))
    accept = mx.random.uniform(shape=(runs, 2), key=next(keys))

    def one_round(anchor: mx.array, at: int) -> tuple[mx.array, mx.array]:
        own = mx.random.gumbel((runs, 2 - at, vocab), key=next(keys))

        def propose(one: mx.array, gumbel: mx.array) -> tuple[mx.array, mx.array]:
            draw = Draw(lambda logits: picker.scores(logits, None), temp, gumbel)
            tokens, _, scores = draft.pick(hidden[:, at:], one[None], lambda h: h @ head.T, draw)
            if wrong:  # as if the walk had not looked at the token before
                scores = draw.scores(hidden[0, at:] @ head.T)
            return tokens, scores

        tokens, scores = mx.vmap(propose)(anchor, picks[:, at:2] if rule == "match" else own)
        rows = target[mx.concatenate([anchor[:, None], tokens.astype(anchor.dtype)], axis=1)]
        scored = picker.scores(rows.reshape(-1, vocab), None).reshape(runs, -1, vocab)
        if rule == "match":
            best_of = mx.argmax(scored + picks[:, at:], axis=-1)
            return mx.vmap(count_accepted)(tokens, best_of), best_of
        return mx.vmap(reject)(tokens, scores, scored, accept[:, at:], picks[:, at:])

    kept, tokens = one_round(mx.zeros((runs,), mx.int32), 0)
    first = tokens[:, 0].astype(mx.int32)
    _, again = one_round(first, 1)  # for runs in which the first draft token was refused
    second = mx.where(kept >= 1, tokens[:, 1], again[:, 0])
    counts = np.zeros((vocab, vocab))
    np.add.at(counts, (np.array(first), np.array(second)), 1)
    p = np.array(mx.softmax(picker.scores(target, None), axis=-1), np.float64)
    return float(np.abs(counts / runs - p[0][:, None] * p).sum() / 2)


@pytest.mark.parametrize("temp", [0.6, 1.2])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_the_joint_of_two_tokens_is_that_of_plain_sampling(rule, filters, temp):
    assert joint_of_two_tokens(rule, temp, Filters(**filters), 60_000) < 0.02


def test_scores_that_forget_the_path_are_caught():
    assert joint_of_two_tokens("rejection", 1.2, Filters(), 60_000, wrong=True) > 0.03


# Decoding ----------------------------------------------------------------------------------------------------

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "is_causal": False}


@pytest.mark.parametrize("changes", [{}, {"kernel": 4, **SLIDING}], ids=["full", "sliding"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss", "llama"])
def test_the_tokens_are_the_targets_on_every_kind_of_cache(family, changes):
    model = make_target() if family == "qwen3" else make_hybrid(family)
    draft = make_draft2(**changes)
    tokens, stats = decode(model, PROMPT, draft, prefill_step_size=16)
    assert tokens == plain_tokens(model, PROMPT, 40)
    assert stats.draft_used
    sampled, _ = decode(model, PROMPT, draft, temp=0.7, seed=4, top_p=0.9)
    assert sampled == decode(model, PROMPT, None, temp=0.7, seed=4, top_p=0.9)[0]


def test_the_trained_draft_accepts_and_changes_nothing(demo_pair, demo2):
    model, _, tokenizer = demo_pair
    ids = tokenizer.encode("class Stack:\n    def __init__(self):\n        self.items = []\n")
    for options in ({}, {"temp": 0.7, "seed": 1}, {"temp": 0.7, "seed": 1, "logits_processors": [_no_newline]}):
        plain, _ = decode(model, ids, None, **options)
        tokens, stats = decode(model, ids, demo2, **options)
        assert tokens == plain
        assert stats.tau > 1.1
    first, _ = decode(model, ids, demo2, temp=0.7, seed=1, acceptance="rejection")
    again, stats = decode(model, ids, demo2, temp=0.7, seed=1, acceptance="rejection")
    assert first == again
    assert stats.tau > 1.3


def _no_newline(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits - 5.0 * (mx.arange(logits.shape[-1]) == tokens[-1])


def test_every_filter_runs_with_the_walk(demo_pair, demo2):
    model, _, tokenizer = demo_pair
    ids = tokenizer.encode("def parse(")
    filters = {"top_k": 4, "min_p": 0.05, "xtc_probability": 0.5, "xtc_special_tokens": [0, 2047], "xtc_threshold": 0.2}
    for acceptance in ("match", "rejection"):  # fewer tokens are left than the walk has candidates
        tokens, stats = decode(model, ids, demo2, 24, temp=1.0, seed=2, acceptance=acceptance, **filters)
        assert len(tokens) == 24
        assert stats.draft_off_reason is None
    assert tokens != decode(model, ids, demo2, 24, temp=1.0, seed=3, acceptance="rejection", **filters)[0]


def test_context_does_not_depend_on_prefill_chunks_or_turns(demo_pair, demo2):
    model, _, tokenizer = demo_pair
    ids = tokenizer.encode(
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    )
    whole, chunked = (decode(model, ids, demo2, 24, prefill_step_size=step) for step in (2048, 5))
    assert (whole[0], whole[1].accepted) == (chunked[0], chunked[1].accepted)
    cache = make_prompt_cache(model) + demo2.make_cache()
    tokens, _ = decode(model, ids, demo2, 24, prompt_cache=cache)
    follow_up = tokenizer.encode("\n    def pop(self):\n")
    warm = decode(model, follow_up, demo2, 24, prompt_cache=cache)
    cold = decode(model, [*ids, *tokens, *follow_up], demo2, 24)
    assert (warm[0], warm[1].accepted) == (cold[0], cold[1].accepted)
    assert max(warm[1].accepted) > 1


def test_closing_early_leaves_both_caches_at_what_was_taken():
    model, draft = make_hybrid("qwen3_5"), make_draft2(**SLIDING)
    truth = plain_tokens(model, PROMPT, 30)
    cache = make_prompt_cache(model) + draft.make_cache()
    steps = generate_step(PROMPT, model, draft, max_tokens=30, prompt_cache=cache)
    taken = [next(steps)[0] for _ in range(6)]
    steps.close()
    assert taken == truth[:6]
    assert {c.offset for c in cache[-2:]} == {46}
    assert decode(model, truth[6:7], draft, 10, prompt_cache=cache)[0] == truth[7:17]


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("layers.1.mlp_conv.base_kernel", mx.float16),
        ("candidate_selector.hidden_projection.weight", mx.float16),
        ("candidate_selector.successor_codebook", mx.float32),
    ],
)
@pytest.mark.parametrize("options", [{}, {"temp": 0.7, "seed": 3}, {"temp": 0.7, "seed": 3, "acceptance": "rejection"}])
def test_overflow_is_caught_wherever_it_happens(part, dtype, options):
    model, draft = make_target(), make_draft2(dtype)
    weights = dict(tree_flatten(draft.parameters()))
    largest = mx.finfo(dtype).max
    draft.load_weights([(part, (mx.sign(weights[part]) * largest).astype(dtype))], strict=False)
    with pytest.warns(RuntimeWarning, match="NaN or infinite values"):
        tokens, stats = decode(model, PROMPT, draft, **options)
    assert "NaN" in stats.draft_off_reason
    assert sum(width > 1 for width in stats.block_sizes) == 1, "one block, then plain decoding"
    if not options:
        assert tokens == plain_tokens(model, PROMPT, 40)


# Files -------------------------------------------------------------------------------------------------------


def tensors(folder) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))


@pytest.fixture
def folder(tmp_path):
    return save_draft(tmp_path / "draft", make_draft2(mx.bfloat16), draft2_config(dtype="bfloat16"))


def test_tensor_names_are_the_checkpoints():
    names = {name for name, _ in tree_flatten(make_draft2(num_hidden_layers=5).parameters())}
    assert len(names) == 81
    assert {
        "candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection.weight",
        "layers.4.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight",
    } <= names  # fmt: skip


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and mx.array_equal(a[n], b[n]) for n in a)


def test_conversion_and_its_way_back_keep_every_bit(folder, tmp_path):
    convert_draft(folder, tmp_path / "mlx")
    convert_draft(tmp_path / "mlx", tmp_path / "back", to_hf=True)
    assert same(tensors(tmp_path / "back"), tensors(folder))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert parse_config(config) == parse_config(read_json(folder / "config.json"))
    loaded = dflash_mlx.load_draft(tmp_path / "mlx", make_target())
    assert isinstance(loaded, DFlash2DraftModel)
    assert same(dict(tree_flatten(loaded.parameters())), tensors(folder))


def test_codebooks_are_read_as_weights_too(folder, tmp_path):
    renamed = {f"{name}.weight" if name.endswith("codebook") else name: a for name, a in tensors(folder).items()}
    other = tmp_path / "other"
    other.mkdir()
    mx.save_safetensors(str(other / "model.safetensors"), renamed)
    (other / "config.json").write_text((folder / "config.json").read_text())
    assert same(dict(tree_flatten(load_draft_folder(other).parameters())), tensors(folder))
    assert inspect_draft(other).problem is None
    convert_draft(other, tmp_path / "mlx")
    assert same(tensors(tmp_path / "mlx"), tensors(folder))


def test_a_quantised_draft_runs(folder, tmp_path):
    convert_draft(folder, tmp_path / "q", quantize=True, q_bits=8, q_group_size=32)
    model = make_target()
    draft = dflash_mlx.load_draft(tmp_path / "q", model)
    assert draft.candidate_selector.successor_codebook.dtype == mx.bfloat16
    assert draft.layers[0].attention_conv.base_kernel.dtype == mx.bfloat16
    assert decode(model, PROMPT, draft, 20)[0] == plain_tokens(model, PROMPT, 20)


def test_inspect_and_the_bundled_draft(folder):
    facts = inspect_draft(folder)
    assert (facts.kind, facts.problem, facts.config["selector_top_k"]) == ("DFlash 2 draft", None, 12)
    bundled = inspect_draft("demo2")
    assert (bundled.problem, bundled.tensors) == (None, 36)
    model, draft, tokenizer = dflash_mlx.load("demo", draft_model="demo2")
    assert isinstance(draft, DFlash2DraftModel)
    *_, last = stream_generate(model, tokenizer, "def parse(", 12, draft)
    assert last.stats.draft_used


def test_tensors_and_config_of_different_kinds_are_refused(folder, tmp_path):
    first = save_draft(tmp_path / "first", make_draft(), draft2_config())
    with pytest.raises(DraftError, match=r"a DFlash \(v1\) draft, but config.json describes DFlash 2"):
        check_draft_folder(first)
    arrays = mx.load(str(folder / "model.safetensors"))
    lost = [name for name in arrays if "attention_conv" in name]
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), {n: a for n, a in arrays.items() if n not in lost})
    with pytest.raises(DraftError, match=f"tensors .*attention_conv.* and {len(lost) - 1} more are missing; the down"):
        check_draft_folder(folder)
    (folder / "config.json").write_text(json.dumps(draft_config()))
    with pytest.raises(DraftError, match=r"a DFlash 2 draft, but config.json describes a DFlash \(v1\) draft"):
        check_draft_folder(folder)


def test_a_draft_for_another_vocabulary_does_not_fit(tmp_path):
    source = save_draft(tmp_path / "draft", make_draft2(vocab_size=300))
    with pytest.raises(DraftError, match="vocab_size 300 against 256"):
        dflash_mlx.load_draft(source, make_target())


def test_a_config_made_in_code_builds_its_kind():
    config = dataclasses.replace(parse_config(draft2_config()), selector_top_k=3)
    assert DFlash2DraftModel(config).config.kind == "dflash2"
