"""The round itself: one sync, order of draft, verify and yield (C13), first tokens, no copy of the context."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_draft, make_draft2, make_target

from dflash_mlx import generate_step
from dflash_mlx.api import _tokens
from dflash_mlx.decode import GenerationStats, session
from dflash_mlx.target import Target


class Waits:
    """Counts every way in which Python can wait for the device."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("tolist", "item", "__array__", "__bool__", "__int__", "__float__"):
            if hasattr(mx.array, name):
                monkeypatch.setattr(mx.array, name, self._counted(getattr(mx.array, name)))
        for name in ("eval", "synchronize"):
            monkeypatch.setattr(mx, name, self._counted(getattr(mx, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            self.count += 1
            return call(*args, **kwargs)

        return counted


@pytest.mark.parametrize("options", [{}, {"temp": 0.8, "seed": 1}, {"temp": 0.8, "acceptance": "rejection"}])
@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_one_sync_a_round(monkeypatch, make, options):
    model, draft = make_target(), make()
    stats = GenerationStats()
    tokens = _tokens(mx.array([1, 2, 3]), model, draft, stats, max_tokens=40, **options)
    next(tokens)  # prefill, first token, first round queued
    waits = Waits(monkeypatch)
    list(tokens)
    assert stats.rounds > 5
    assert waits.count == stats.rounds


def test_the_counter_sees_a_second_sync(monkeypatch):
    """The test above must be able to fail."""
    model, draft = make_target(), make_draft()
    stats = GenerationStats()
    real = session.count_accepted
    monkeypatch.setattr(session, "count_accepted", lambda p, t: mx.array(real(p, t).item()))
    tokens = _tokens(mx.array([1, 2, 3]), model, draft, stats, max_tokens=40)
    next(tokens)
    waits = Waits(monkeypatch)
    list(tokens)
    assert waits.count > stats.rounds


def test_the_first_token_comes_before_the_second_draft_and_the_next_round_before_its_text():
    model, prompt = make_target(), [3, 1, 4, 1, 5]
    truth = plain_tokens(model, prompt, 30)
    draft = ScriptedDrafter([*prompt, *truth], lambda i: 3)
    log = draft.log
    for token, _, _ in generate_step(prompt, model, draft, max_tokens=13):
        log.append(f"token {token}")
    assert log[0] == f"token {truth[0]}", "nothing is built before the first token is out"
    assert log[1:3] == ["draft", "draft"], "round 2 is queued before the text of round 1"
    assert log[3:7] == [f"token {t}" for t in truth[1:5]]
    assert [entry for entry in log if entry != "draft"] == [f"token {t}" for t in truth[:13]]


@pytest.mark.parametrize("block", [1, 4])
def test_no_tokens_are_none_and_the_prompt_is_in_the_cache(block):
    """As mlx-lm's own generator does it (C10)."""
    model, draft, prompt = make_target(), make_draft(), [3, 1, 4, 1, 5]
    theirs, ours = make_prompt_cache(model), [*make_prompt_cache(model), *draft.make_cache()]
    assert list(plain_step(mx.array(prompt), model, max_tokens=0, prompt_cache=theirs)) == []
    assert list(generate_step(prompt, model, draft, max_tokens=0, block_size=block, prompt_cache=ours)) == []
    assert [cache.offset for cache in ours[: len(theirs)]] == [cache.offset for cache in theirs] == [5] * len(theirs)
    assert list(generate_step(prompt, model, draft, max_tokens=0)) == []


@pytest.mark.parametrize("block", [1, 4])
def test_caches_that_nobody_keeps_are_not_settled(monkeypatch, block):
    """The last token is fed, and the draft's rows are made up, only for a cache that the caller holds."""
    model, draft = make_target(), make_draft()
    real, calls = Target.forward, []
    monkeypatch.setattr(Target, "forward", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    extended = []
    monkeypatch.setattr(type(draft), "extend", lambda *args: extended.append(args))

    def forwards(cache):
        calls.clear(), extended.clear()
        tokens = [
            t for t, _, _ in generate_step([3, 1], model, draft, max_tokens=9, block_size=block, prompt_cache=cache)
        ]
        return tokens, len(calls), len(extended)

    forwards(None)  # checks the taps of this model once
    tokens, private, made_up = forwards(None)
    same, held, made_up_too = forwards([*make_prompt_cache(model), *draft.make_cache()])
    assert (tokens, private + 1) == (same, held)
    assert made_up_too - made_up == (block > 1)


@pytest.mark.parametrize("block", [1, 4, 8])
def test_any_thread_can_read_the_log_probabilities(block):
    """Lazy rows belong to the thread that made them, so they are computed before they are handed out."""
    model, draft = make_target(), make_draft()
    steps = list(generate_step([3, 1, 4], model, draft, max_tokens=12, block_size=block))
    read = []
    thread = threading.Thread(target=lambda: read.extend(np.array(row).argmax() for _, row, _ in steps))
    thread.start()
    thread.join()
    assert read == [token for token, *_ in steps]


def test_an_exception_in_the_consumer_leaves_the_target_as_it_was():
    model, draft, prompt = make_target(), make_draft(), [3, 1, 4]
    before = [type(layer) for layer in model.layers], type(model.model), sorted(vars(model.layers[0]))
    truth = plain_tokens(model, prompt, 20)

    def consume():
        for i, _ in enumerate(generate_step(prompt, model, draft, max_tokens=20)):
            if i == 5:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert ([type(layer) for layer in model.layers], type(model.model), sorted(vars(model.layers[0]))) == before
    assert plain_tokens(model, prompt, 20) == truth


def test_plain_decoding_builds_each_step_before_the_last_is_known():
    """Without this a plain step would wait for Python, and be slower than mlx-lm's."""
    model = make_target()
    forwards, own = [], type(model).__call__

    class Counting(type(model)):
        def __call__(self, *args, **kwargs):
            forwards.append(1)
            return own(self, *args, **kwargs)

    model.__class__ = Counting
    steps = generate_step([1, 2, 3], model, max_tokens=10)
    next(steps)
    assert len(forwards) == 3, "prompt, first token, and the next step queued ahead"
    rest = list(steps)
    assert len(rest) == 9
    assert len(forwards) == 11, "no forward whose token nobody takes"


def test_draft_cache_grows_by_a_share_and_not_every_round():
    """Buffers are reallocated ever more rarely, so a round's copies do not grow with the context."""
    draft = make_draft()
    cache = draft.make_cache()
    moves, buffers = 0, None
    for _ in range(2000):
        draft.extend(mx.zeros((1, 4, 64)), cache)
        mx.eval([c.state for c in cache])
        if (size := cache[0].keys.shape[2]) != buffers:
            moves, buffers = moves + 1, size
    assert cache[0].rows == 8000
    assert moves < 32
    assert cache[0].keys.shape[2] < 1.1 * 8000, "what is held is close to what is needed"


@pytest.mark.parametrize("bad", [{"max_tokens": -2}, {"prefill_step_size": 0}, {"temp": -1.0}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        list(generate_step([1, 2], make_target(), **bad))


def test_an_empty_prompt_and_a_foreign_draft_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        list(generate_step([], make_target()))
    with pytest.raises(TypeError, match="Drafter protocol"):
        list(generate_step([1], make_target(), object()))


@pytest.mark.parametrize("block", [0, 9, 64])
def test_block_size_outside_the_drafts_is_refused(block):
    with pytest.raises(ValueError, match="blocks of 2 to 8"):
        list(generate_step([1], make_target(), make_draft(), block_size=block))
