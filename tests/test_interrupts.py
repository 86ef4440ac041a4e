"""Whatever raises, wherever: the caller gets that exception, and the caches hold what was handed out or say so."""

from __future__ import annotations

import copy

import interrupts
import mlx.core as mx
import pytest
from interrupts import PROMPT, Often, goes_on, target
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import PromptCache, generate_step
from dflash_mlx.decode import GenerationStats, session
from dflash_mlx.target import Rewinder


@pytest.mark.parametrize("family", interrupts.FAMILIES)
def test_an_interrupt_at_any_place(family):
    found, wrong = interrupts.strike(12, [family])
    assert not wrong
    assert found[f"{family} held"] > 9


class Odd(Exception):
    """Nobody else raises it."""


def failing(call, first, last=1 << 30):
    """Raises from its `first` to its `last` call."""
    calls = 0

    def fail(*args, **kwargs):
        nonlocal calls
        calls += 1
        if first <= calls <= last:
            raise Odd
        return call(*args, **kwargs)

    return fail


@pytest.mark.parametrize("family", ["full", "rotating", "hybrid"])
@pytest.mark.parametrize("where", ["propose", "context", "extend", "processor", "sampler", "sync", "rewind", "layer"])
@pytest.mark.parametrize("stays", [False, True])
def test_an_error_anywhere_is_the_one_that_comes_out(monkeypatch, family, where, stays):
    model, truth, draft = target(family)
    drafter, stats = Often(draft, [*PROMPT, *truth], 1), GenerationStats()
    caches = make_prompt_cache(model) + draft.make_cache()
    given = {"processor": lambda tokens, logits: logits, "sampler": lambda rows: mx.argmax(rows, axis=-1)}
    told, emitted = [], []
    drafter.rng.choice = lambda options: 7  # so that much has to be fed again
    owner, name, first = {
        "sync": (session, "sync", 3),
        "rewind": (Rewinder, "rewind", 2),
        "layer": (type(model.layers[2]), "__call__", 1),
        "extend": (drafter, "extend", 2),
    }.get(where, (drafter, where, 3))
    with monkeypatch.context() as patch:

        def break_it():
            patch.setattr(owner, name, failing(getattr(owner, name), first, 1 << 30 if stays else first))

        if where in given:
            given[where] = failing(given[where], 12, 1 << 30 if stays else 12)
        elif where != "layer":
            break_it()

        def go():
            for token, *_ in generate_step(
                PROMPT, model, drafter, stats=stats, max_tokens=22, prompt_cache=caches, prefill_step_size=7,
                logits_processors=[given["processor"]], sampler=given["sampler"],
                prompt_progress_callback=lambda done, _: told.append(done),
            ):  # fmt: skip
                emitted.append(token)
                if where == "layer" and len(emitted) == 4:
                    break_it()

        if stays and where == "layer":
            with pytest.warns(RuntimeWarning, match=r"holds \d+ tokens instead of \d+"), pytest.raises(Odd):
                go()
        else:
            with pytest.raises(Odd):
                go()
    assert stats.cache_lost == (stays and where == "layer")
    if not stats.cache_lost:
        goes_on(model, truth, drafter, caches, len(PROMPT) + len(emitted) if emitted else told[-1])
    elif family != "hybrid":
        assert {cache.offset for cache in caches} == {cache.offset for cache in caches[-1:]}


def test_a_prompt_that_was_fed_in_part_is_said_where_nobody_was_told():
    model, _, draft = target("full")
    caches = make_prompt_cache(model) + draft.make_cache()
    drafter = Often(draft, PROMPT, 1)
    drafter.extend = failing(drafter.extend, 2)
    with pytest.warns(RuntimeWarning, match="holds 7 tokens, not the whole prompt"), pytest.raises(Odd):
        next(generate_step(PROMPT, model, drafter, prompt_cache=caches, prefill_step_size=7))
    assert {cache.offset for cache in caches} == {7}


def test_a_chat_goes_on_after_any_interrupt(cli, monkeypatch):
    """What was said stays, and the next answer is the one that caches which are filled anew would give."""
    from dflash_mlx.cli import chat

    answer, seed, checked = chat.Chat.answer, 0, 0
    lines = iter([*["def f(x):", "return x"] * 8, "/quit"])

    def struck_every_second_time(self, text):
        nonlocal seed, checked
        if text == "def f(x):":
            seed += 1
            with interrupts.Striker(400 * seed).armed():
                return answer(self, text)
        fresh = copy.copy(self)
        fresh.messages = [*self.messages]
        fresh.cache = PromptCache(self.model, self.draft)
        for one in (fresh, self):
            answer(one, text)
        assert self.messages == fresh.messages
        checked += 1

    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    monkeypatch.setattr(chat.Chat, "answer", struck_every_second_time)
    outcome = cli("chat", "--model", "demo", "--max-tokens", 8)
    assert outcome.code == 0
    assert outcome.err.count("[stopped]") > 3
    assert checked == 8
