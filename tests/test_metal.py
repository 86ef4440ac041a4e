"""What only a GPU can show: the same promises with Metal's kernels. Skipped where there is no Metal."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import draft_config, make_draft, make_target

from dflash_mlx import demo, stream_generate
from dflash_mlx.check import compare_with_plain
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.draft import DFlashDraftModel

pytestmark = pytest.mark.metal


@pytest.mark.parametrize("block", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_any_difference_to_plain_decoding_is_a_near_tie(demo_pair, block, dtype):
    model, draft, tokenizer = demo_pair
    model.set_dtype(dtype)
    try:
        ids = mx.array(tokenizer.encode(demo.PROMPT))
        tokens = [r.token for r in stream_generate(model, tokenizer, ids, 96, draft, block_size=block)]
        verdict = compare_with_plain(model, ids, tokens, end_tokens=tokenizer.eos_token_ids)
        assert verdict.identical or verdict.near_tie, str(verdict)
    finally:
        model.set_dtype(mx.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target(bits):
    model = make_target("qwen3-untied", mx.bfloat16)
    nn.quantize(model, group_size=32, bits=bits)
    from dflash_mlx import generate_step

    prompt = mx.array([3, 1, 4, 1, 5, 9])
    tokens = [token for token, *_ in generate_step(prompt, model, make_draft(dtype=mx.bfloat16), max_tokens=60)]
    verdict = compare_with_plain(model, prompt, tokens)
    assert verdict.identical or verdict.near_tie, str(verdict)


@pytest.mark.parametrize("context", [1, 17, 300])
def test_fused_attention_equals_the_plain_one(context):
    config = parse_config(
        draft_config(layer_types=["sliding_attention", "full_attention"], sliding_window=64, head_dim=64)
    )
    fused, plain = DFlashDraftModel(config, "sdpa"), DFlashDraftModel(config, "eager")
    plain.update(fused.parameters())
    mx.random.seed(0)
    rows, block = mx.random.normal((1, context, 64)), mx.random.normal((1, 8, 64))
    outputs = [draft(block, rows, draft.make_cache()) for draft in (fused, plain)]
    assert mx.allclose(*outputs, atol=2e-3)


def test_noise_is_the_same_on_every_device():
    """The same seed gives the same text on a Mac and on Linux only if the noise is the same."""
    from dflash_mlx.decode.sampling import TokenPicker

    picker = TokenPicker(temp=1.0, seed=7)
    with mx.stream(mx.cpu):
        on_cpu = picker.gumbel(range(4), 1000)
        mx.eval(on_cpu)
    with mx.stream(mx.gpu):
        on_gpu = picker.gumbel(range(4), 1000)
        mx.eval(on_gpu)
    assert mx.allclose(on_cpu, on_gpu, atol=1e-4)
