"""Cases C1, C10, C25, C31, C32: the tokens are the target's own, whatever the draft proposes."""

from __future__ import annotations

import functools
import threading

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_draft, make_hybrid, make_target

from dflash_mlx import generate_step
from dflash_mlx.api import _tokens
from dflash_mlx.check import compare_with_plain
from dflash_mlx.decode import GenerationStats
from dflash_mlx.target import Target

N = 60


def prompt_of(n: int) -> list[int]:
    return [(7 * i + 3) % 250 for i in range(n)]


@functools.cache
def text(family, length, dtype=mx.float32, seed=0):
    """A model, a prompt and the 60 tokens that it says to it."""
    model = make_hybrid(family) if family in ("qwen3_5", "gpt_oss") else make_target(family, dtype, seed)
    prompt = prompt_of(length)
    return model, prompt, plain_tokens(model, prompt, N)


def decode(model, prompt, draft, n=N, **options) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    tokens = [t.id for t in _tokens(mx.array(prompt), model, draft, stats, max_tokens=n, **options)]
    return tokens, stats


@pytest.mark.parametrize("length", [1, 5, 17, 64])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", mx.float32),
        ("qwen3-untied", mx.float32),
        ("qwen3", mx.bfloat16),
        ("qwen3-untied", mx.bfloat16),
        ("llama", mx.float32),
        ("llama", mx.bfloat16),
        ("qwen2", mx.float32),
        ("qwen3_moe", mx.float32),
    ],
)
def test_every_acceptance_pattern_gives_the_tokens_of_plain_decoding(family, dtype, length):
    model, prompt, truth = text(family, length, dtype)
    for block in (2, 5, 8, 16):
        draft = ScriptedDrafter([*prompt, *truth], lambda i, block=block: i % block, block)
        tokens, stats = decode(model, prompt, draft)
        assert tokens == truth
        full = [kept for kept, width in zip(stats.accepted, stats.block_sizes, strict=True) if width == block]
        assert full == [i % block for i in range(len(full))], "each round accepts exactly what the script allows"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=st.lists(st.integers(0, 15), min_size=1, max_size=12), block=st.integers(2, 16), seed=st.integers(0, 3))
def test_random_acceptance_patterns(pattern, block, seed):
    model, prompt, truth = text("qwen3", 9, seed=seed)
    draft = ScriptedDrafter([*prompt, *truth], lambda i: pattern[i % len(pattern)], block)
    tokens, stats = decode(model, prompt, draft, 40)
    assert tokens == truth[:40]
    assert len(tokens) == 1 + sum(stats.accepted) + stats.bonus


def test_logits_of_accepted_positions_are_bit_equal_to_plain_decoding():
    model, prompt = make_target("qwen3"), prompt_of(12)
    plain = list(plain_step(mx.array(prompt), model, max_tokens=30))
    script = [*prompt, *(t for t, _ in plain)]
    for (token, logprobs, _), (expected, expected_logprobs) in zip(
        generate_step(prompt, model, ScriptedDrafter(script, lambda i: i % 8), max_tokens=30), plain, strict=True
    ):
        assert token == expected
        assert mx.array_equal(logprobs, expected_logprobs)


def test_a_real_draft_changes_nothing_even_when_it_is_random():
    model, draft, prompt = make_target("qwen3"), make_draft(), prompt_of(20)
    tokens, stats = decode(model, prompt, draft)
    assert tokens == plain_tokens(model, prompt, N)
    assert stats.draft_used
    assert stats.block_sizes[0] == 8


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_target(bits):
    model, prompt = make_target("qwen3", mx.bfloat16), prompt_of(20)
    nn.quantize(model, group_size=32, bits=bits)
    truth = plain_tokens(model, prompt, N)
    for right in (0, 3, 7):
        assert decode(model, prompt, ScriptedDrafter([*prompt, *truth], lambda i, right=right: right))[0] == truth


@pytest.mark.parametrize("start", [0, 25, 31, 40, 1000])
def test_quantised_cache_and_no_block_across_the_point_where_it_starts(start):
    model, prompt = make_target("qwen3-wide"), prompt_of(20)
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    truth = plain_tokens(model, prompt, N, **options)
    tokens, stats = decode(model, prompt, ScriptedDrafter([*prompt, *truth], lambda i: i % 8), **options)
    assert tokens == truth
    assert max(stats.accepted) == 7


def test_noise_on_wide_calls_is_reported_with_its_margin():
    """A GPU rounds blocks differently; the comparison must find the first difference and say how near it is."""
    model, prompt = make_target("qwen3"), prompt_of(10)
    truth = plain_tokens(model, prompt, N)

    class Noisy(type(model)):
        def __call__(self, inputs, *args, **kwargs):
            logits = super().__call__(inputs, *args, **kwargs)
            if inputs.shape[1] > 1:
                logits = logits + 3.0 * mx.random.normal(logits.shape, key=mx.random.key(inputs.shape[1]))
            return logits

    own = type(model)
    Target(model).check()  # which would refuse it
    model.__class__ = Noisy
    tokens, _ = decode(model, prompt, ScriptedDrafter([*prompt, *truth], lambda i: 7))
    model.__class__ = own
    verdict = compare_with_plain(model, mx.array(prompt), tokens)
    first = next(i for i, (a, b) in enumerate(zip(tokens, truth, strict=True)) if a != b)
    assert (verdict.first_difference, verdict.ours, verdict.plain) == (first, tokens[first], truth[first])
    assert not verdict.identical
    assert verdict.margin > 0
    assert f"token {first}" in str(verdict)


def test_an_identical_run_is_reported_as_identical():
    model, prompt = make_target("qwen3"), prompt_of(10)
    verdict = compare_with_plain(model, mx.array(prompt), plain_tokens(model, prompt, 20))
    assert verdict.identical
    assert "identical to plain decoding" in str(verdict)


@pytest.mark.parametrize("right", [0, 7])
@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 26])
def test_max_tokens_is_exact_and_the_cache_holds_prompt_and_tokens(limit, right):
    model, prompt, truth = text("qwen3", 11)
    cache = make_prompt_cache(model)
    draft = ScriptedDrafter([*prompt, *truth], lambda i: right)
    tokens, _ = decode(model, prompt, draft, limit, prompt_cache=cache)
    assert tokens == truth[:limit]
    assert {c.offset for c in cache} == {len(prompt) + limit}
    more, _ = decode(model, truth[limit : limit + 1], None, 11, prompt_cache=cache)
    assert more == truth[limit + 1 : limit + 12], "what follows must be as if it had never stopped"


def test_the_cache_after_a_run_equals_one_that_saw_only_the_tokens():
    model, draft, prompt = make_target("qwen3"), make_draft(), prompt_of(11)
    cache = make_prompt_cache(model) + draft.make_cache()
    tokens, _ = decode(model, prompt, draft, 30, prompt_cache=cache)
    clean = make_prompt_cache(model)
    model(mx.array([[*prompt, *tokens]]), cache=clean)
    for ours, theirs in zip(cache, clean, strict=False):
        assert ours.offset == theirs.offset
        assert mx.allclose(ours.keys[..., : ours.offset, :], theirs.keys[..., : theirs.offset, :], atol=1e-5)
    assert {c.offset for c in cache} == {41}, "draft rows included"


@pytest.mark.parametrize("stop_after", [1, 2, 5, 8, 9, 20])
@pytest.mark.parametrize("kind", [0, 3, 7, "real", "none"])  # a number: so many of each block are right
def test_closing_early_leaves_both_caches_at_what_was_taken(stop_after, kind):
    model, prompt, truth = text("qwen3", 11)
    draft = {"real": make_draft(), "none": None}.get(kind, ScriptedDrafter([*prompt, *truth], lambda i: kind))
    cache = make_prompt_cache(model) + (draft.make_cache() if kind == "real" else [])
    steps = generate_step(prompt, model, draft, max_tokens=40, prompt_cache=cache)
    taken = [next(steps)[0] for _ in range(stop_after)]
    steps.close()
    assert taken == truth[:stop_after]
    assert {c.offset for c in cache} == {len(prompt) + stop_after}
    rest, _ = decode(model, truth[stop_after : stop_after + 1], draft, 15, prompt_cache=cache)
    assert rest == truth[stop_after + 1 : stop_after + 16]


def test_a_second_turn_keeps_the_draft_context_equal_to_a_cold_start():
    model, draft, prompt = make_target("qwen3"), make_draft(), prompt_of(11)
    cache = make_prompt_cache(model) + draft.make_cache()
    tokens, _ = decode(model, prompt, draft, 20, prompt_cache=cache)
    turn = [5, 6, 7]
    warm, warm_stats = decode(model, turn, draft, 20, prompt_cache=cache)
    cold, cold_stats = decode(model, [*prompt, *tokens, *turn], draft, 20)
    assert warm == cold
    assert warm_stats.accepted == cold_stats.accepted


def test_counts_reconcile_when_a_block_is_cut():
    model, prompt = make_target("qwen3"), prompt_of(11)
    truth = plain_tokens(model, prompt, 40)
    end = truth[12]
    tokens, stats = decode(model, prompt, ScriptedDrafter([*prompt, *truth], lambda i: 7), 40, end_tokens={end})
    assert tokens == truth[: truth.index(end) + 1]
    assert len(tokens) == 1 + sum(stats.accepted) + stats.bonus
    assert stats.tau == pytest.approx((len(tokens) - 1) / stats.rounds)


def test_requests_do_not_leak_into_each_other():
    model, draft = make_target("qwen3"), make_draft()
    long, short = prompt_of(60), prompt_of(5)
    want_long, want_short = plain_tokens(model, long, 30), plain_tokens(model, short, 30)
    assert decode(model, long, draft, 30)[0] == want_long
    assert decode(model, short, draft, 30)[0] == want_short
    stopped = generate_step(long, model, draft, max_tokens=30)
    next(stopped)
    assert decode(model, short, draft, 30)[0] == want_short
    stopped.close()
    a, b = generate_step(long, model, draft, max_tokens=30), generate_step(short, model, draft, max_tokens=30)
    interleaved = [(x[0], y[0]) for x, y in zip(a, b, strict=True)]
    assert [x for x, _ in interleaved] == want_long
    assert [y for _, y in interleaved] == want_short


def test_a_generator_may_be_finished_in_another_thread():
    model, draft, prompt = make_target("qwen3"), make_draft(), prompt_of(9)
    truth = plain_tokens(model, prompt, 20)
    steps = generate_step(prompt, model, draft, max_tokens=20)
    first, rest = [next(steps)[0] for _ in range(5)], []
    thread = threading.Thread(target=lambda: rest.extend(token for token, *_ in steps))
    thread.start()
    thread.join()
    assert first + rest == truth


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("end", ["finished", "closed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": 1}, {"block_size": 8}, {"block_size": 8, "temp": 0.8, "seed": 1}],
    ids=["greedy", "plain", "block", "sampled"],
)
def test_in_another_thread_the_kept_cache_is_settled_too(family, end, options):
    """Whatever no token depends on is computed before the tokens are out, or only the first thread could do it."""
    model, prompt, truth = text(family, 9)
    draft = make_draft()
    if "temp" in options:
        truth = [t for t, *_ in generate_step(prompt, model, max_tokens=20, temp=options["temp"], seed=options["seed"])]
    cache = [*make_prompt_cache(model), *draft.make_cache()]
    steps = generate_step(prompt, model, draft, max_tokens=12, prompt_cache=cache, **options)
    tokens, errors = [next(steps)[0] for _ in range(5)], []

    def end_it():
        try:
            tokens.extend(token for token, *_ in steps) if end == "finished" else steps.close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=end_it)
    thread.start()
    thread.join()
    assert errors == []
    assert tokens == truth[: 12 if end == "finished" else 5]
    again = generate_step(
        truth[len(tokens) : len(tokens) + 1], model, draft, max_tokens=3, prompt_cache=cache, **options
    )
    assert [t for t, *_ in again] == truth[len(tokens) + 1 : len(tokens) + 4], "the caches go on in the first thread"


def test_logits_processors_see_exactly_the_tokens_before_each_position():
    model, prompt = make_target("qwen3"), prompt_of(11)

    def watched(seen):
        def process(tokens, logits):
            seen.append(tuple(tokens.tolist()))
            return logits - 3.0 * (mx.arange(256) == tokens[-1])[None]

        return process

    plain_seen, ours_seen = [], []
    truth = plain_tokens(model, prompt, 20, logits_processors=[watched(plain_seen)])
    draft = ScriptedDrafter([*prompt, *truth], lambda i: i % 8)
    tokens, stats = decode(model, prompt, draft, 20, logits_processors=[watched(ours_seen)])
    assert tokens == truth
    assert max(stats.accepted) > 3
    whole = (*prompt, *truth)
    assert {whole[: len(prompt) + i] for i in range(20)} <= set(ours_seen)


@pytest.mark.parametrize("temp", [0.7, 1.3])
def test_a_seed_gives_the_same_text_for_any_block_and_any_draft(temp):
    model, prompt = make_target("qwen3"), prompt_of(11)
    truth, _ = decode(model, prompt, None, 40, temp=temp, seed=7)
    for block in (1, 4, 8):
        assert decode(model, prompt, make_draft(), 40, temp=temp, seed=7, block_size=block)[0] == truth
    scripted = ScriptedDrafter([*prompt, *truth], lambda i: i % 8)
    tokens, stats = decode(model, prompt, scripted, 40, temp=temp, seed=7)
    assert tokens == truth
    assert max(stats.accepted) >= 6
    assert decode(model, prompt, None, 40, temp=temp, seed=8)[0] != truth


def test_mlx_lm_samplers_work():
    from mlx_lm.sample_utils import make_sampler

    model, prompt = make_target("qwen3"), prompt_of(11)
    mx.random.seed(3)
    tokens, _ = decode(model, prompt, make_draft(), 30, sampler=make_sampler(0.8, top_p=0.9))
    assert len(tokens) == 30
    assert decode(model, prompt, make_draft(), 30, sampler=make_sampler(0.0))[0] == plain_tokens(model, prompt, 30)
