"""The default path: rounds whose width changes, plain ones among them, over families, options, turns and closings."""

from __future__ import annotations

import copy
import functools
import random

import mlx.core as mx
import pytest
from interrupts import Often, mixed
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.models.cache import make_prompt_cache
from tiny import make_draft, make_draft2, make_hybrid, make_target

from dflash_mlx import generate_step
from dflash_mlx.decode.caches import cached_tokens
from dflash_mlx.decode.costs import RoundCosts

CASES = {
    "full": ("qwen3-wide", {}, {}),
    "pinned": ("qwen3-wide", {"max_kv_size": 24}, {}),
    "quantised": ("qwen3-wide", {}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30}),
    "hybrid": ("qwen3_5", {}, {}),
    "rotating": ("gpt_oss", {}, {}),
    "sliding": ("llama", {}, {}),
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


@functools.cache
def model_of(name):
    return make_target(name) if name.startswith("qwen3-") else make_hybrid(name)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_widths_that_change(monkeypatch, case, sampled):
    """Tokens against plain decoding that was fed the same, and what both caches hold, turn by turn."""
    name, sizes, options = CASES[case]
    seed = 1  # with it every draft, with a window and without, meets a case
    rng = random.Random(f"{case} {sampled} {seed}")
    model = model_of(name)
    draft = rng.choice([make_draft, make_draft2])(**rng.choice([{}, SLIDING]))
    monkeypatch.setattr("dflash_mlx.api.AutoBlockSize", mixed(seed))
    monkeypatch.setattr("dflash_mlx.api.round_costs", lambda *args, **kwargs: RoundCosts())
    sampling = {"temp": 0.8, "seed": seed, "top_p": 0.9} if sampled else {}
    target_size = len(make_prompt_cache(model))
    ours = make_prompt_cache(model, **sizes) + draft.make_cache()
    theirs, held = make_prompt_cache(model, **sizes), []
    for _turn in range(2):
        prompt, n = [rng.randrange(240) for _ in range(rng.choice([1, 5, 30]))], rng.choice([12, 30])
        taken = rng.choice([n, n - 5])
        before = copy.deepcopy(theirs)
        truth = plainly(model, prompt, n, theirs, sampling, options)
        drafter = Often(draft, [*held, *prompt, *truth], seed)
        drafter.start = len(held)
        steps = generate_step(prompt, model, drafter, max_tokens=n, prompt_cache=ours, **sampling, **options)
        tokens = [next(steps)[0] for _ in range(taken)]
        steps.close()
        assert tokens == truth[:taken]
        held += [*prompt, *tokens]
        assert cached_tokens(ours[:target_size]) == len(held)
        assert {cache.offset for cache in ours[target_size:]} == {len(held)}
        if taken < n:  # go on from what was taken
            theirs = before
            plainly(model, prompt, taken, theirs, sampling, options)


def plainly(model, prompt, n, cache, sampling, options):
    """mlx-lm's own, or ours where noise by position is needed; both leave the cache at prompt and tokens."""
    if sampling:
        return [t for t, *_ in generate_step(prompt, model, max_tokens=n, prompt_cache=cache, **sampling, **options)]
    return [t for t, _ in plain_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache, **options)]
