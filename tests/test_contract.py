"""What callers may rely on after anything: caches, statistics, verdicts, and a target that stays itself."""

from __future__ import annotations

import copy
import functools
import json
import signal
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedDrafter, plain_tokens
from tiny import HYBRIDS, make_draft, make_hybrid, make_target

from dflash_mlx import DFlashError, generate_step
from dflash_mlx.api import _tokens
from dflash_mlx.check import compare_with_plain
from dflash_mlx.cli.options import add_end_tokens
from dflash_mlx.decode import GenerationStats, Proposal, session
from dflash_mlx.decode.caches import align
from dflash_mlx.draft import DraftKVCache
from dflash_mlx.prompt import as_ids, encode
from dflash_mlx.target.intercept import intercept

PROMPT = [(7 * i + 3) % 250 for i in range(11)]


@functools.cache
def text(family):
    """A model and the 40 tokens that it says to the prompt."""
    model = make_target() if family == "qwen3" else make_hybrid(family)
    return model, plain_tokens(model, PROMPT, 40)


def decode(model, prompt, draft, n=30, **options):
    stats = GenerationStats()
    return [t.id for t in _tokens(prompt, model, draft, stats, max_tokens=n, **options)], stats


@pytest.mark.parametrize("drafted", [True, False])
def test_a_quantised_cache_is_the_callers_own(drafted):
    """mlx-lm replaces entries of the list; the caller must find the new ones, and a next turn go on from them."""
    model = make_target("qwen3-wide")
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
    ours, theirs = make_prompt_cache(model), make_prompt_cache(model)
    draft = make_draft() if drafted else None
    for turn in (PROMPT, [5, 6], [9]):
        truth = [t for t, _ in plain_step(mx.array(turn), model, max_tokens=10, prompt_cache=theirs, **options)]
        assert decode(model, turn, draft, 10, prompt_cache=ours, **options)[0] == truth
        assert [(type(a), a.offset) for a in ours] == [(type(b), b.offset) for b in theirs]


@pytest.mark.parametrize("family", [*HYBRIDS, "qwen3"])
@pytest.mark.parametrize("emitted", [1, 4, 9])
@pytest.mark.parametrize("where", ["sync", "layer", "draft"])
def test_an_interrupt_anywhere_leaves_the_caches_at_what_was_handed_out(monkeypatch, family, emitted, where):
    (model, truth), draft = text(family), make_draft()
    cache = make_prompt_cache(model) + draft.make_cache()
    steps = generate_step(PROMPT, model, draft, max_tokens=40, prompt_cache=cache)
    assert [next(steps)[0] for _ in range(emitted)] == truth[:emitted]

    with monkeypatch.context() as patch:
        owner, name = {
            "sync": (session, "sync"),
            "draft": (type(draft), "hidden"),
            "layer": (type(model.layers[2].mlp), "__call__"),
        }[where]
        real = getattr(owner, name)

        def interrupt(*args, **kwargs):
            patch.setattr(owner, name, real)  # once
            raise KeyboardInterrupt

        patch.setattr(owner, name, interrupt)
        more: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            more.extend(token for token, *_ in steps)
    offsets = {c.offset for c in cache if isinstance(getattr(c, "offset", None), int)}
    offsets.discard(0)
    taken = offsets.pop() - len(PROMPT)
    assert not offsets, "target and draft agree"
    assert emitted <= taken <= emitted + 8
    rest, _ = decode(model, truth[taken : taken + 1], draft, 12, prompt_cache=cache)
    assert rest == truth[taken + 1 : taken + 13]


def test_interrupts_while_a_call_is_watched_leave_nothing_behind():
    """Ctrl-C may strike between any two instructions."""
    model = make_target()
    layers, truth = model.layers, plain_tokens(model, PROMPT, 5)

    def alarm(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, alarm)
    try:
        for i in range(400):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + i * 2e-7)
            try:
                with intercept([(layer, lambda own, *a, **k: 1 / 0) for layer in layers]):
                    for _ in range(50):
                        pass
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert plain_tokens(model, PROMPT, 5) == truth, "no stale handler acts"
    with intercept([(layer, lambda own, *a, **k: own(*a, **k)) for layer in layers]):
        pass
    assert {type(layer).__call__.__qualname__ for layer in layers} == {"TransformerBlock.__call__"}


@pytest.mark.parametrize("limit", [5, 9, 12])
@pytest.mark.parametrize("cached", [True, False])
def test_every_step_may_run_in_another_thread_to_the_very_end(limit, cached):
    model, draft = make_target(), make_draft()
    truth = plain_tokens(model, PROMPT, limit + 8)
    cache = make_prompt_cache(model) + draft.make_cache()
    steps = generate_step(PROMPT, model, draft, max_tokens=limit, prompt_cache=cache if cached else None)
    tokens, errors = [], []

    def step():
        try:
            tokens.append(next(steps)[0])
        except StopIteration:
            tokens.append(None)
        except Exception as error:
            errors.append(error)

    while (not tokens or tokens[-1] is not None) and not errors:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert not errors
    assert tokens[:-1] == truth[:limit]
    if cached:
        assert (
            decode(model, truth[limit - 1 : limit][-1:] and truth[limit : limit + 1], draft, 7, prompt_cache=cache)[0]
            == truth[limit + 1 : limit + 8]
        )


@pytest.mark.parametrize("plain_turn", [{"draft_model": None}, {"block_size": 1}])
def test_a_turn_without_the_draft_does_not_spoil_the_cache(plain_turn):
    model, draft = make_target(), make_draft()
    cache, seen = make_prompt_cache(model) + draft.make_cache(), list(PROMPT)
    for options in ({}, plain_turn, {}):
        truth = plain_tokens(model, seen, 12)
        turn = seen if not cache[0].offset else seen[cache[0].offset :]
        chosen = options.get("draft_model", draft)
        rest = {k: v for k, v in options.items() if k != "draft_model"}
        tokens, _ = decode(model, turn, chosen, 12, prompt_cache=cache, **rest)
        assert tokens == truth
        seen += [*tokens, 5, 6]


def test_a_position_is_counted_in_the_rounds_that_offered_it():
    stats = GenerationStats()
    stats.record(width=2, accepted=1, emitted=2)
    stats.record(width=4, accepted=2, emitted=3)
    stats.record(width=1, accepted=0, emitted=1)
    assert stats.acceptance_by_position == [1, 1, 0]
    assert (stats.tau, stats.bonus) == (2, 3)


@pytest.mark.parametrize("taken", [1, 2, 5, 8, 9])
def test_counts_reconcile_after_an_early_close(taken):
    model = make_target()
    truth = plain_tokens(model, PROMPT, 40)
    stats = GenerationStats()
    steps = _tokens(mx.array(PROMPT), model, ScriptedDrafter([*PROMPT, *truth], lambda i: 7), stats, max_tokens=40)
    flags = [next(steps).from_draft for _ in range(taken)]
    steps.close()
    assert 1 + sum(stats.accepted) + stats.bonus == taken
    assert sum(stats.accepted) == sum(flags)
    json.dumps(stats.to_dict())


@pytest.mark.parametrize("prompt", [np.array(PROMPT), [np.int64(i) for i in PROMPT], tuple(PROMPT), mx.array(PROMPT)])
def test_prompts_may_be_any_row_of_whole_numbers(prompt):
    model = make_target()
    assert decode(model, prompt, make_draft(), 8)[0] == plain_tokens(model, PROMPT, 8)


@pytest.mark.parametrize(
    "prompt",
    [[1.7, 2.2], [True, False], ["a"], [[1, 2]], [-1], [2**31], [256], mx.array([1.0]), mx.array([[1, 2]]), []],
)
def test_prompts_that_are_no_token_ids_are_refused(prompt):
    with pytest.raises(ValueError, match="prompt"):
        decode(make_target(), prompt, None)


@pytest.mark.parametrize("bad", [999_999, 2**30, -5, 256])
def test_a_draft_token_outside_the_vocabulary_is_harmless(bad):
    model = make_target()
    truth = plain_tokens(model, PROMPT, 30)

    class Wild(ScriptedDrafter):
        def propose(self, request):
            tokens = super().propose(request).tokens
            return Proposal(mx.where(mx.arange(tokens.shape[0]) >= 2, bad, tokens))

    tokens, stats = decode(model, PROMPT, Wild([*PROMPT, *truth], lambda i: 7))
    assert tokens == truth
    assert max(stats.accepted) == 2


@pytest.mark.parametrize("junk", [None, [1, 2], Proposal(mx.array([[1, 2]])), Proposal(mx.array([1.0])), Proposal([3])])
def test_a_drafter_that_returns_something_else_is_named(junk):
    class Broken(ScriptedDrafter):
        def propose(self, request):
            return junk

    with pytest.raises(TypeError, match=r"Broken\.propose"):
        decode(make_target(), PROMPT, Broken(PROMPT, lambda i: 0))


def test_a_drafter_with_nothing_to_say_makes_plain_rounds():
    model = make_target()
    truth = plain_tokens(model, PROMPT, 30)

    class Silent(ScriptedDrafter):
        def propose(self, request):
            proposal = super().propose(request)
            return Proposal(proposal.tokens[:0]) if self.rounds % 2 else proposal

    tokens, stats = decode(model, PROMPT, Silent([*PROMPT, *truth], lambda i: 3))
    assert tokens == truth
    assert set(stats.block_sizes[:-1]) == {1, 8}, "no token proposed, and eight rows"


def test_a_draft_for_another_target_is_refused():
    from dflash_mlx import DraftError

    with pytest.raises(DraftError, match="vocab_size 300 against 256"):
        decode(make_target(), PROMPT, make_draft(vocab_size=300))


@pytest.mark.parametrize("options", [{"block_size": 8}, {"input_embeddings": mx.zeros((3, 64))}, {"max_tokens": 2.5}])
def test_options_that_can_not_be_done_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        list(generate_step(PROMPT, make_target(), **options))


def test_mlx_lms_name_for_the_block_is_understood():
    model = make_target()
    _, stats = decode(model, PROMPT, make_draft(), num_draft_tokens=3)
    assert stats.block_sizes[0] == 4


def test_kept_logprobs_do_not_keep_whole_blocks():
    model = make_target("qwen3-untied", vocab=20_000)
    draft = make_draft(vocab_size=20_000)
    kept = []
    mx.clear_cache()
    before = mx.get_active_memory()
    for _, logprobs, _ in generate_step(PROMPT, model, draft, max_tokens=40):
        mx.eval(logprobs)
        kept.append(logprobs)
    assert mx.get_active_memory() - before < 1.6 * 40 * 20_000 * 4 + 2e6


class TestVerdict:
    def test_a_bad_token_is_no_near_tie_even_where_the_best_two_are_close(self):
        model = make_target(dtype=mx.bfloat16)
        plain = list(plain_step(mx.array(PROMPT), model, max_tokens=20))
        close = min(range(20), key=lambda i: float(np.diff(np.sort(np.array(plain[i][1].astype(mx.float32)))[-2:])[0]))
        tokens = [t for t, _ in plain]
        tokens[close] = int(mx.argmin(plain[close][1]).item())
        verdict = compare_with_plain(model, mx.array(PROMPT), tokens)
        assert verdict.first_difference == close
        assert not verdict.near_tie
        assert "NOT a near-tie" in str(verdict)

    def test_a_sampled_near_tie_is_judged_with_its_noise(self):
        model = make_target()
        tokens, _ = decode(model, PROMPT, None, temp=0.9, seed=3)
        tokens[4] = (tokens[4] + 1) % 256
        verdict = compare_with_plain(model, mx.array(PROMPT), tokens, temp=0.9, seed=3)
        assert verdict.first_difference == 4
        assert verdict.margin > 0

    def test_a_text_that_ends_too_early_or_too_late_differs(self):
        model = make_target()
        truth = plain_tokens(model, PROMPT, 20)
        short = compare_with_plain(model, mx.array(PROMPT), truth[:5], max_tokens=20)
        assert (short.first_difference, short.identical) == (5, False)
        assert "plain decoding goes on" in str(short)
        late = compare_with_plain(model, mx.array(PROMPT), truth, end_tokens={truth[3]})
        end = truth.index(truth[3])
        assert late.first_difference == end + 1
        assert "ours goes on" in str(late)
        assert not compare_with_plain(model, mx.array(PROMPT), [], max_tokens=5).identical


def interrupted_once(patch, owner, name):
    real = getattr(owner, name)

    def interrupt(*args, **kwargs):
        patch.setattr(owner, name, real)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupt)


@pytest.mark.parametrize("family", [*HYBRIDS, "qwen3"])
@pytest.mark.parametrize("where", ["sync", "layer"])
def test_an_interrupt_without_a_draft(monkeypatch, family, where):
    """The next step is queued ahead, so one token has to be taken back."""
    model, truth = text(family)
    cache = make_prompt_cache(model)
    steps = generate_step(PROMPT, model, max_tokens=30, prompt_cache=cache)
    assert [next(steps)[0] for _ in range(5)] == truth[:5]
    with monkeypatch.context() as patch:
        interrupted_once(patch, *((session, "sync") if where == "sync" else (type(model.layers[2]), "__call__")))
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert {c.offset for c in cache if hasattr(c, "offset")} == {len(PROMPT) + 5}
    assert decode(model, truth[5:6], None, 12, prompt_cache=cache)[0] == truth[6:18]


def test_a_wrapped_window_that_can_not_be_taken_back_is_said(monkeypatch):
    model = make_hybrid("gpt_oss")
    steps = generate_step(PROMPT * 4, model, max_tokens=30, prompt_cache=make_prompt_cache(model))
    next(steps), next(steps)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            next(steps)

    with monkeypatch.context() as patch:
        interrupted_once(patch, session, "sync")
        with pytest.warns(RuntimeWarning, match="fresh one"):
            interrupted()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("drafted", [True, False])
def test_an_interrupt_while_the_last_token_is_fed(monkeypatch, family, drafted):
    (model, truth), draft = text(family), make_draft() if drafted else None
    cache = make_prompt_cache(model) + (draft.make_cache() if drafted else [])
    steps = generate_step(PROMPT, model, draft, max_tokens=9, prompt_cache=cache)
    assert [next(steps)[0] for _ in range(8)] == truth[:8]
    with monkeypatch.context() as patch:
        interrupted_once(patch, type(model.layers[2]), "__call__")
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert {c.offset for c in cache if hasattr(c, "offset")} == {len(PROMPT) + 8}, "the ninth was not handed out"
    assert decode(model, truth[8:9], draft, 12, prompt_cache=cache)[0] == truth[9:21]


def test_an_interrupt_after_the_draft_was_switched_off(monkeypatch):
    model, draft = make_hybrid("qwen3_5"), make_draft()
    draft.layers[0].mlp.down_proj.weight = draft.layers[0].mlp.down_proj.weight * mx.nan
    truth, cache = plain_tokens(model, PROMPT, 30), make_prompt_cache(model)
    steps = generate_step(PROMPT, model, draft, max_tokens=30, prompt_cache=cache)
    with pytest.warns(RuntimeWarning, match="switched off"):
        assert [next(steps)[0] for _ in range(6)] == truth[:6]
    with monkeypatch.context() as patch:
        interrupted_once(patch, session, "sync")
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert decode(model, truth[6:7], None, 12, prompt_cache=cache)[0] == truth[7:19]


def test_recurrent_targets_keep_the_drafts_positions_over_turns():
    import matrix

    model = matrix.build("mamba2")
    from dflash_mlx.target import Target

    draft = matrix.real_draft(Target(model), [0, 1])
    cache, offsets = make_prompt_cache(model) + draft.make_cache(), []
    for prompt, n in ((PROMPT, 9), ([5, 6], 8), ([7], 4)):
        decode(model, prompt, draft, n, prompt_cache=cache)
        offsets.append(cache[-1].offset)
    assert offsets == [20, 30, 35]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_bits": 4, "kv_group_size": 64}, "kv_group_size 64"),
        ({"xtc_probability": 1.0, "temp": 1.0, "xtc_special_tokens": [10**6, -1], "min_tokens_to_keep": 10**6}, None),
        ({"temp": 1e-40, "min_p": 0.1}, None),
    ],
)
def test_values_that_would_crash_later(options, match):
    model = make_target("qwen3-wide")
    if match:
        with pytest.raises(ValueError, match=match):
            decode(model, PROMPT, None, 4, **options)
    else:
        assert len(decode(model, PROMPT, None, 4, **options)[0]) == 4


def test_wrapped_models_refuse_ids_outside_their_vocabulary():
    with pytest.raises(ValueError, match="token id 5000"):
        decode(make_hybrid("qwen3_5"), [1, 5000], None, 2)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("held", [0, 9, 10, 14])
def test_a_drafts_caches_are_brought_to_a_length(held, window):
    cache, rows = DraftKVCache(window), mx.zeros((1, 2, held, 4))
    cache.write(rows, rows, held)
    align([cache], 10)
    assert cache.offset == 10
    assert cache.rows <= 10


def test_a_text_that_begins_with_the_first_special_token_gets_no_second():
    class Tokenizer:
        bos_token = "<s>"

        def encode(self, text, add_special_tokens):
            return [1] * add_special_tokens + [7] * (len(text) - 2)

    tokenizer = Tokenizer()
    assert encode(tokenizer, "<s>a").tolist() == [7, 7]
    assert encode(tokenizer, "abcd").tolist() == [1, 7, 7]
    tokenizer.bos_token = None
    assert encode(tokenizer, "<s>a").tolist() == [1, 7, 7]


def test_a_number_beyond_any_token_id_is_no_prompt():
    assert as_ids([2**31 - 1]).tolist() == [2**31 - 1]
    for ids in ([2**31], [-1]):
        with pytest.raises(DFlashError, match="no token id"):
            as_ids(ids)


def test_an_end_token_may_be_given_by_its_id(demo_pair):
    tokenizer = copy.copy(demo_pair[2])
    tokenizer.eos_token_ids = set()
    number = next(i for i in range(100, 1000) if str(i) not in tokenizer.get_vocab())
    add_end_tokens(tokenizer, [str(number)])
    assert tokenizer.eos_token_ids == {number}
    with pytest.raises(DFlashError, match="no such token"):
        add_end_tokens(tokenizer, ["no token at all"])
