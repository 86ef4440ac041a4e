"""Options of another kind, or out of range: one line that names them, and nothing silently taken for something else."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from tiny import make_draft, make_target

from dflash_mlx import PromptCache, PromptLookup, TargetError, generate_step, stream_generate

PROMPT = [(7 * i + 3) % 250 for i in range(11)]
# What no whole number, fraction, switch or list of ids is.
WHOLE = (True, "2", 1.5, math.nan, -2)
FRACTION = (True, "0.5", math.nan, math.inf, -0.5)
SWITCH = (1, "yes", None)
IDS = ("7", 7, [1.5], [True])
# option -> values that are fine, values that are not
OPTIONS = {
    "max_tokens": ((3, np.int64(3)), WHOLE),
    "prefill_step_size": ((3, np.int64(3)), (*WHOLE, 0, None)),
    "top_k": ((0, 3, np.int64(3)), (*WHOLE, None)),
    "min_tokens_to_keep": ((1, 3), (*WHOLE, 0)),
    "max_kv_size": ((None, 8), (*WHOLE, 0)),
    "num_draft_tokens": ((None, 0, np.int32(4)), WHOLE),
    "block_size": ((None, 1, 8, np.int32(8)), (*WHOLE, 0, 17)),
    "quantized_kv_start": ((0, 9), WHOLE),
    "kv_bits": ((None, 4), (*WHOLE, 7, 4.0)),
    "kv_group_size": ((32, 64), (*WHOLE, 48)),
    "seed": ((None, 3, -2, 2**80, np.int64(3)), (True, "2", 1.9, math.nan)),
    "temp": ((0, 0.5, 1.5, np.float32(0.5)), FRACTION),
    "top_p": ((0, 0.5, 1.0), (*FRACTION, 1.5)),
    "min_p": ((0, 0.5, 1.0), (*FRACTION, 1.5)),
    "xtc_probability": ((0, 0.5, 1.0), (*FRACTION, 1.5)),
    "xtc_threshold": ((0, 0.5), (*FRACTION, 0.6)),
    "xtc_special_tokens": (([], {250}, np.array([250])), IDS),
    "end_tokens": (([], {250}, np.array([250])), IDS),
    "prefill_stops": (([], [4]), IDS),
    "acceptance": (("match", "rejection"), ("best", None, True)),
    "lookup": ((False, True), SWITCH),
    "leave_last": ((False, True), SWITCH),
    "profile": ((False, True), SWITCH),
    "logits_processors": ((None, []), (lambda tokens, logits: logits, [None], "none")),
    "sampler": ((None,), ("greedy", 0)),
    "prompt_progress_callback": ((None,), (print.__name__, 0)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_another_kind_is_refused_by_name(name):
    """`top_k=1.5` raised MLX's own TypeError, `seed=1.9` was seed 1, `block_size=True` was plain decoding."""
    model, (fine, odd) = make_target("qwen3-wide"), OPTIONS[name]
    for value in fine:
        options = {"temp": 0.5, "max_tokens": 3, "kv_group_size": 32, name: value}
        assert 0 < len(list(generate_step(PROMPT, model, "lookup", **options))) <= 3
    for value in odd:
        with pytest.raises(ValueError, match=rf"^[^\n]*{name}[^\n]* is [^\n]*, [^\n]*$"):
            list(generate_step(PROMPT, model, "lookup", **{"temp": 0.5, name: value}))


@pytest.mark.parametrize("block", [True, 2, "1"])
def test_a_block_without_a_draft_is_refused(block):
    with pytest.raises(ValueError, match="block_size is"):
        list(generate_step(PROMPT, make_target(), block_size=block))


def test_other_places_that_take_numbers(demo_pair):
    model, _, tokenizer = demo_pair
    response = next(stream_generate(model, tokenizer, "def", 2, stop="no such text"))
    for n in (-1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="n is"):
            response.top_logprobs(n)
    for stop in ([""], [3], [None]):
        with pytest.raises(ValueError, match="stop is"):
            next(stream_generate(model, tokenizer, "def", 2, stop=stop))
    for options in ({"min_match": 0}, {"min_match": 2.0}, {"block_size": "8"}, {"block_size": True}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
            PromptLookup(**options)
    for size in (0, 2.5, True):
        with pytest.raises(ValueError, match="max_kv_size is"):
            PromptCache(model, max_kv_size=size)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("draft", [None, "lookup", "random"])
def test_an_infinite_logit_is_certain(acceptance, draft):
    """A processor that allows one token by giving it +inf; the rejection rule made token 0 of the NaN behind it."""
    model, drafter = make_target(), make_draft() if draft == "random" else draft
    forced = [lambda tokens, logits: mx.where(mx.arange(256) == (tokens.shape[0] * 5) % 256, math.inf, logits)]
    options = {"temp": 0.8, "seed": 1, "acceptance": acceptance, "logits_processors": forced, "top_p": 0.9}
    steps = generate_step([*PROMPT, *PROMPT], model, drafter, max_tokens=20, **options)
    assert [token for token, *_ in steps] == [(n * 5) % 256 for n in range(22, 42)]


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="a GPU computes experts in any dtype")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("draft", [None, "lookup", "random"])
@pytest.mark.parametrize("prompt", [[3], PROMPT])
def test_experts_in_half_precision_on_a_cpu_end_in_one_line(dtype, draft, prompt):
    model, drafter = make_target("qwen3_moe", dtype), make_draft() if draft == "random" else draft
    with pytest.raises(TargetError, match=r"^[^\n]*only supports float32[^\n]*set_dtype[^\n]*$"):
        list(generate_step(prompt, model, drafter, max_tokens=4))
