"""Case C11: stop strings, held back across tokens and blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedDrafter, plain_tokens

from dflash_mlx import demo, stream_generate
from dflash_mlx.decode.stop import StopStrings

LETTERS = st.text(alphabet="ab\n", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


@given(st.lists(LETTERS, max_size=12), STOPS)
def test_text_ends_before_the_first_stop_and_near_misses_come_out(chunks, stops):
    text, shown, stopping = "".join(chunks), "", StopStrings(stops)
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    for i, chunk in enumerate(chunks):
        shown += stopping.add(chunk)
        assert text[:cut].startswith(shown), "no part of a stop string is ever shown"
        so_far = "".join(chunks[: i + 1])
        if stopping.found is None and not any(stop in so_far for stop in stops):
            held = len(so_far) - len(shown)
            assert held < max(map(len, stops), default=1), "no more is held back than can matter"
    if stopping.found is None:
        shown += stopping.finish()
    assert shown == text[:cut]
    assert (stopping.found is None) == (cut == len(text) and not any(s in text for s in stops))


def test_empty_stop_strings_are_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["END", ""])


TOKENS = 40


@pytest.fixture(scope="module")
def plain(demo_pair):
    """What the target says: prompt, tokens, text."""
    model, _, tokenizer = demo_pair
    ids = tokenizer.encode(demo.PROMPT)
    tokens = plain_tokens(model, ids, TOKENS)
    return ids, tokens, tokenizer.decode(tokens)


def run(pair, plain, stop):
    """The stream with scripted drafts that are never and always right, with a real one and without; all must agree."""
    model, draft, tokenizer = pair
    ids, truth, _ = plain
    never, always = (ScriptedDrafter([*ids, *truth], lambda i, n=n: n, 8, vocab=2048) for n in (0, 7))
    outputs = []
    for drafter, options in ((never, {}), (always, {}), (draft, {"block_size": 4}), (None, {})):
        cache = make_prompt_cache(model)
        out = list(stream_generate(model, tokenizer, ids, TOKENS, drafter, stop=stop, prompt_cache=cache, **options))
        outputs.append(out)
        assert {c.offset for c in cache} == {len(ids) + len(out)}, "nothing behind the stop is in the cache"
    texts = {"".join(r.text for r in out) for out in outputs}
    assert len(texts) == 1
    assert len({len(out) for out in outputs}) == 1
    return outputs[0]


@pytest.mark.parametrize("where", [0, 5, 33])
@pytest.mark.parametrize("size", [1, 4, 11])
def test_a_stop_string_anywhere(demo_pair, plain, where, size):
    text = plain[2]
    stop = text[where : where + size]
    out = run(demo_pair, plain, ["never this", stop])
    assert "".join(r.text for r in out) == text[: text.find(stop)]
    assert out[-1].finish_reason == "stop"
    assert all(r.finish_reason is None for r in out[:-1])


def test_a_near_miss_is_released_and_the_length_ends_it(demo_pair, plain):
    text = plain[2]
    out = run(demo_pair, plain, [text[3:9] + "NOT", text[-4:] + "more"])
    assert "".join(r.text for r in out) == text
    assert out[-1].finish_reason == "length"


def test_stop_text_in_the_prompt_does_not_count(demo_pair, plain):
    out = run(demo_pair, plain, [demo.PROMPT[:20]])
    assert "".join(r.text for r in out) == plain[2].partition(demo.PROMPT[:20])[0]
