"""stream_generate and generate: responses as mlx-lm's, end tokens (C9), limits (C10), mask tokens (C8)."""

from __future__ import annotations

import dataclasses
import json
import shutil

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import stream_generate as plain_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scripted import ScriptedDrafter, plain_tokens

import dflash_mlx
from dflash_mlx import demo, generate, stream_generate
from dflash_mlx.loading import end_tokens

PROMPT = demo.PROMPT


def with_ends(tokenizer, *ends):
    wrapped = TokenizerWrapper(tokenizer._tokenizer)
    wrapped.eos_token_ids = set(ends)
    return wrapped


@pytest.fixture(scope="module")
def said(demo_pair):
    """The prompt's ids and the 60 tokens that the target says to it."""
    model, _, tokenizer = demo_pair
    ids = tokenizer.encode(PROMPT)
    return ids, plain_tokens(model, ids, 60)


def test_responses_equal_mlx_lms_field_by_field(demo_pair):
    model, draft, tokenizer = demo_pair
    ours = list(stream_generate(model, tokenizer, PROMPT, 40, draft))
    theirs = list(plain_stream(model, tokenizer, PROMPT, 40))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a, MlxLmResponse)
        for name in ("token", "prompt_tokens", "generation_tokens", "finish_reason"):
            assert getattr(a, name) == getattr(b, name)
        assert mx.allclose(a.logprobs, b.logprobs, atol=1e-5)
    text = "".join(r.text for r in ours)
    assert text == tokenizer.decode([r.token for r in ours])
    assert text.strip() == "".join(r.text for r in theirs).strip()
    assert any(r.from_draft for r in ours)
    stats = ours[-1].stats
    assert [r.stats for r in ours[:-1]] == [None] * 39
    assert stats.generation_tokens == 40 == ours[-1].generation_tokens
    assert sum(r.from_draft for r in ours) == sum(stats.accepted)
    assert json.loads(json.dumps(stats.to_dict()))["tau"] == pytest.approx(stats.tau)


# The first end id at these places of the text; a block emits 8 tokens when all are accepted.
@pytest.mark.parametrize("place", [0, 1, 7, 8, 9, 16])
@pytest.mark.parametrize("right", [0, 15])
def test_the_first_end_token_ends_everything(demo_pair, said, place, right):
    model, _, tokenizer = demo_pair
    ids, truth = said
    draft = ScriptedDrafter([*ids, *truth], lambda i: right, 8, vocab=2048)
    end = truth[place]
    place = truth.index(end)
    cache = make_prompt_cache(model)
    out = list(stream_generate(model, with_ends(tokenizer, 2047, end), ids, 60, draft, prompt_cache=cache))
    assert [r.token for r in out] == truth[: place + 1]
    assert out[-1].finish_reason == "stop"
    assert "".join(r.text for r in out) == tokenizer.decode(truth[:place])
    assert out[-1].stats.generation_tokens == place + 1
    assert {c.offset for c in cache} == {len(ids) + place + 1}, "the end token is in the cache, nothing after it"


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 26])
def test_a_length_stop_is_exact(demo_pair, limit):
    model, draft, tokenizer = demo_pair
    out = list(stream_generate(model, tokenizer, PROMPT, limit, draft))
    assert len(out) == limit
    assert out[-1].finish_reason == "length"


def test_max_tokens_zero_is_refused_as_in_mlx_lm(demo_pair):
    model, draft, tokenizer = demo_pair
    with pytest.raises(ValueError, match="max_tokens"):
        list(stream_generate(model, tokenizer, PROMPT, 0, draft))


def test_end_tokens_come_from_all_three_places(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(demo.TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "eos_token_id": [11, 12], "text_config": {"eos_token_id": 14}})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 13}))
    assert end_tokens(folder) == {11, 12, 13, 14}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [11, 12]}))
    _, _, tokenizer = dflash_mlx.load(str(folder), draft_model=None)
    assert tokenizer.eos_token_ids >= {0, 11, 12, 13}, "0 is the tokenizer's own"


def test_a_mask_token_that_is_also_an_end_token_does_not_stop_early(demo_pair):
    model, draft, tokenizer = demo_pair
    mask = draft.config.mask_token_id
    out = list(stream_generate(model, with_ends(tokenizer, mask), PROMPT, 40, draft))
    assert [r.token for r in out] == plain_tokens(model, tokenizer.encode(PROMPT), 40)


def test_generate_returns_the_text_and_can_print_it(demo_pair, capsys):
    model, draft, tokenizer = demo_pair
    text = generate(model, tokenizer, PROMPT, max_tokens=20, draft_model=draft, verbose=True)
    assert text == tokenizer.decode(plain_tokens(model, tokenizer.encode(PROMPT), 20))
    printed = capsys.readouterr()
    assert printed.out == text + "\n"
    assert "tau" in printed.err


def test_prompts_may_be_text_ids_or_an_array(demo_pair):
    model, draft, tokenizer = demo_pair
    ids = tokenizer.encode(PROMPT)
    texts = {generate(model, tokenizer, p, max_tokens=12, draft_model=draft) for p in (PROMPT, mx.array(ids))}
    texts.add(generate(model, tokenizer, ids, max_tokens=12, draft_model=draft))
    assert len(texts) == 1


def test_early_break_then_a_clean_run(demo_pair):
    model, draft, tokenizer = demo_pair
    truth = plain_tokens(model, tokenizer.encode(PROMPT), 30)
    for stop in (1, 5, 16):
        for i, _ in enumerate(stream_generate(model, tokenizer, PROMPT, 30, draft), 1):
            if i == stop:
                break
        out = list(stream_generate(model, tokenizer, PROMPT, 30, draft))
        assert [r.token for r in out] == truth


def test_plain_decoding_says_that_no_draft_was_used(demo_pair):
    model, draft, tokenizer = demo_pair
    for options in ({}, {"draft_model": draft, "block_size": 1}):
        *_, last = stream_generate(model, tokenizer, PROMPT, 10, **options)
        assert not last.stats.draft_used
        assert last.stats.draft_off_reason
        assert last.stats.tau == 1.0
        assert "no draft used" in last.stats.summary()


def test_profiling_measures_the_parts(demo_pair):
    model, draft, tokenizer = demo_pair
    *_, last = stream_generate(model, tokenizer, PROMPT, 20, draft, profile=True)
    stats = last.stats
    assert min(stats.draft_seconds, stats.verify_seconds, stats.host_seconds) > 0
    assert [stats.rounds, stats.block_size] == [len(stats.accepted), 16]


def test_a_draft_that_turns_non_finite_is_switched_off_with_one_warning(demo_pair):
    """C17: overflow in float16; the text stays right and the statistics say what happened."""
    model, _, tokenizer = demo_pair
    draft = dflash_mlx.load_draft("demo", dtype=mx.float16)
    draft.layers[0].mlp.down_proj.weight = draft.layers[0].mlp.down_proj.weight * 1e4
    with pytest.warns(RuntimeWarning, match="float16") as caught:
        out = list(stream_generate(model, tokenizer, PROMPT, 30, draft))
    assert len([w for w in caught if "draft" in str(w.message)]) == 1
    assert [r.token for r in out] == plain_tokens(model, tokenizer.encode(PROMPT), 30)
    assert "NaN" in out[-1].stats.draft_off_reason
    assert "draft off later" in out[-1].stats.summary()
    assert dataclasses.asdict(out[-1].stats)["draft_used"]


def test_a_useless_draft_never_changes_the_text_and_is_not_remembered(demo_pair, said):
    """C23, the part about text and requests."""
    model, draft, tokenizer = demo_pair
    ids, truth = said
    wrong = ScriptedDrafter([*ids, *truth], lambda i: 15 if i < 4 else 0, 8, vocab=2048)
    out = list(stream_generate(model, tokenizer, ids, 60, wrong))
    assert [r.token for r in out] == truth
    assert out[-1].stats.accepted[-1] == 0
    good = list(stream_generate(model, tokenizer, ids, 60, draft))
    assert good[-1].stats.draft_used
    assert good[-1].stats.tau > 1.5
