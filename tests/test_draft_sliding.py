"""The draft's sliding layers and its cache: cached rounds equal a from-scratch masked computation."""

from copy import deepcopy
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from reference.cases import Case, draft_config, draft_weights, sliding_config

from dflash_mlx import generate_step, load, load_draft
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.draft import DFlashDraftModel, DraftKVCache
from dflash_mlx.errors import DraftError

WINDOW, BLOCK = 16, 8
INCREMENTS = (1, 3, 8)
CLOSE = 1e-5
SLIDING_CASE = Case("C4", sliding_config("ssf"))
FULL_CASE = Case("C4", draft_config())  # layer_types absent; the same name draws the same weights


def make_draft(case: Case = SLIDING_CASE, attn_implementation: str = "sdpa") -> DFlashDraftModel:
    model = DFlashDraftModel(parse_config(case.config), attn_implementation)
    model.load_weights([(name, mx.array(array)) for name, array in draft_weights(case).items()])
    return model


def draw(rows: int, name: str = "context") -> mx.array:
    """Context feature or block rows `[1, rows, H]`."""
    shape = (1, rows, SLIDING_CASE.config["hidden_size"])
    return mx.array(SLIDING_CASE.random(name).standard_normal(shape).astype(np.float32))


def increments(total: int) -> list[int]:
    """1, 3, 8, 1, 3, 8, ... up to `total` rows, the last one cut to fit."""
    parts: list[int] = []
    for n in cycle(INCREMENTS):
        if sum(parts) == total:
            return parts
        parts.append(min(n, total - sum(parts)))
    raise AssertionError


def feed(model: DFlashDraftModel, cache: list[DraftKVCache], context: mx.array, parts: list[int]) -> None:
    """Extend by the parts, one after the other."""
    for chunk in mx.split(context, np.cumsum(parts)[:-1].tolist(), axis=1):
        model.extend(chunk, cache)


def from_scratch(
    model: DFlashDraftModel, windows: list[int | None], context: mx.array, block: mx.array, start: int, lost: int = 0
) -> mx.array:
    """The block's hidden states `[1, L, H]` with no cache: whole context, explicit mask, plain attention.

    Args:
        windows: of each layer; a layer with one is causal.
        start: absolute position of the first context row.
        lost: first context rows that layers with a window don't see.
    """
    config, head_dim = model.config, model.config.head_dim

    def norm(x: mx.array, module) -> mx.array:
        return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * module.weight

    def heads(rows: mx.array, weight: mx.array, head_norm=None) -> mx.array:  # [heads, rows, hd]
        x = (rows[0] @ weight.T).reshape(rows.shape[1], -1, head_dim)
        if head_norm is None:
            return x.swapaxes(0, 1)
        x = norm(x, head_norm).swapaxes(0, 1)[None]
        return mx.fast.rope(x, head_dim, traditional=False, base=config.rope_theta, scale=1.0, offset=start)[0]

    before, length = context.shape[1], block.shape[1]
    h = block
    for layer, window in zip(model.layers, windows, strict=True):
        attention = layer.self_attn
        rows = mx.concatenate([context, norm(h, layer.input_layernorm)], axis=1)
        queries = heads(rows, attention.q_proj.weight, attention.q_norm)[:, before:]
        keys = heads(rows, attention.k_proj.weight, attention.k_norm)
        values = heads(rows, attention.v_proj.weight)
        mask = mx.array(
            [
                [window is None or (lost <= k <= q and q - k < window) for k in range(before + length)]
                for q in range(before, before + length)
            ]
        )
        groups = config.num_attention_heads // config.num_key_value_heads
        out = []
        for head in range(config.num_attention_heads):
            scores = queries[head] @ keys[head // groups].T / head_dim**0.5
            out.append(mx.softmax(mx.where(mask, scores, -mx.inf), axis=-1) @ values[head // groups])
        h = h + mx.concatenate(out, axis=-1)[None] @ attention.o_proj.weight.T
        x = norm(h, layer.post_attention_layernorm)
        gate = x @ layer.mlp.gate_proj.weight.T
        h = h + (gate * mx.sigmoid(gate) * (x @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return norm(h, model.norm)


def apart(one: mx.array, other: mx.array) -> float:
    assert one.shape == other.shape
    return mx.abs(one - other).max().item()


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("offset", [0, 5000])
@pytest.mark.parametrize("length", [15, 16, 17, 40, 200])
def test_blocks_equal_masked_computation(length: int, offset: int, attn_implementation: str) -> None:
    model = make_draft(attn_implementation=attn_implementation)
    cache, context, rows = model.make_cache(offset), draw(length), 0
    for i, new in enumerate(increments(length)):
        block = draw(BLOCK, f"block {i}")
        hidden = model(block, context[:, rows : rows + new], cache)
        rows += new
        expected = from_scratch(model, [WINDOW, WINDOW, None], context[:, :rows], block, offset)
        assert apart(hidden, expected) < CLOSE, rows
        assert all(layer.offset == offset + rows for layer in cache)
    assert rows == length


def test_blocks_equal_masked_computation_at_every_length_around_the_window() -> None:
    model, context, block = make_draft(), draw(WINDOW + BLOCK), draw(BLOCK, "block")
    cache = model.make_cache()
    for rows in range(1, WINDOW + BLOCK + 1):
        hidden = model(block, context[:, rows - 1 : rows], cache)
        assert apart(hidden, from_scratch(model, [WINDOW, WINDOW, None], context[:, :rows], block, 0)) < CLOSE, rows


def test_blocks_equal_masked_computation_after_the_buffers_moved() -> None:
    model, context, block = make_draft(), draw(600), draw(BLOCK, "block")
    cache, rows, capacities = model.make_cache(), 0, set()
    for new in increments(600):
        hidden = model(block, context[:, rows : rows + new], cache)
        rows += new
        capacities |= {layer.keys.shape[2] for layer in cache[:2]}
        if rows > 240:
            assert apart(hidden, from_scratch(model, [WINDOW, WINDOW, None], context[:, :rows], block, 0)) < CLOSE, rows
    assert len(capacities) == 1


def test_masked_computation_can_tell_windows_apart() -> None:
    model, context, block = make_draft(), draw(40), draw(BLOCK, "block")
    right = from_scratch(model, [WINDOW, WINDOW, None], context, block, 0)
    for windows in ([WINDOW, WINDOW + 1, None], [WINDOW, WINDOW - 1, None], [WINDOW, None, None], [WINDOW] * 3):
        assert apart(right, from_scratch(model, windows, context, block, 0)) > 100 * CLOSE


@pytest.mark.parametrize("offset", [0, 5000])
def test_cached_keys_stand_at_absolute_positions(offset: int) -> None:
    model, context = make_draft(), draw(40)
    cache = model.make_cache(offset)
    feed(model, cache, context, increments(40))
    for layer, layer_cache in zip(model.layers, cache, strict=True):
        keys, _, next_position, rows, end, _ = layer_cache.state
        first = offset + 40 - rows
        attention = layer.self_attn
        expected = attention.k_proj(context[:, 40 - rows :]).reshape(1, rows, -1, model.config.head_dim)
        expected = model.rope(attention.k_norm(expected).swapaxes(1, 2), offset=first)
        assert next_position == offset + 40
        assert rows >= WINDOW - 1
        assert apart(keys[..., end - rows : end, :], expected) < CLOSE


def test_sliding_layers_hold_a_bounded_context() -> None:
    model = make_draft()
    cache, block, capacities = model.make_cache(), draw(BLOCK, "block"), set()
    for i, new in enumerate([8, 3, 40, 1, 8, 300, 15, 16, 17] * 10):
        model(block, draw(new, f"chunk {i}"), cache)
        assert all(layer.visible <= WINDOW - 1 for layer in cache[:2])
        capacities |= {layer.keys.shape[2] for layer in cache[:2]}
    assert cache[0].offset == 4080
    assert max(capacities) <= 512
    assert cache[2].visible == cache[2].rows == 4080


def test_room_is_for_the_rows_held_not_for_the_window() -> None:
    cache = DraftKVCache(window=2**31 - 1)
    cache.write(mx.zeros((1, 1, 40, 2)), mx.zeros((1, 1, 40, 2)), 32)
    assert cache.keys is not None
    assert cache.keys.shape[2] <= 512


def test_layer_types_absent_means_all_full() -> None:
    model, context, block = make_draft(FULL_CASE), draw(40), draw(BLOCK, "block")
    cache = model.make_cache()
    feed(model, cache, context[:, :-1], increments(39))
    hidden = model(block, context[:, -1:], cache)
    assert apart(hidden, from_scratch(model, [None] * 3, context, block, 0)) < CLOSE
    assert all(layer.window is None and layer.visible == 40 for layer in cache)


@pytest.mark.parametrize("length", [15, 16, 17, 40, 200])
def test_extend_in_chunks_equals_one_extend(length: int) -> None:
    model, context, block = make_draft(), draw(length), draw(BLOCK, "block")
    chunked, whole = model.make_cache(5000), model.make_cache(5000)
    feed(model, chunked, context, increments(length))
    model.extend(context, whole)
    assert [(c.offset, c.visible) for c in chunked] == [(c.offset, c.visible) for c in whole]
    nothing = context[:, :0]
    expected = from_scratch(model, [WINDOW, WINDOW, None], context, block, 5000)
    assert apart(model(block, nothing, chunked), expected) < CLOSE
    assert apart(model(block, nothing, whole), expected) < CLOSE


def test_drafting_leaves_no_block_row_behind() -> None:
    model, context, block = make_draft(), draw(40), draw(BLOCK, "block")
    cache, nothing = model.make_cache(), context[:, :0]
    model.extend(context, cache)
    first = model(block, nothing, cache)
    model(draw(BLOCK, "another block"), nothing, cache)
    assert mx.array_equal(model(block, nothing, cache), first)


# mlx-lm's cache protocol


def grown(model: DFlashDraftModel, length: int = 40) -> list[DraftKVCache]:
    cache = model.make_cache(5000)
    feed(model, cache, draw(200)[:, :length], increments(length))
    return cache


@pytest.mark.parametrize(
    "copied",
    [deepcopy, lambda cache: [DraftKVCache.from_state(c.state) for c in cache]],
    ids=["deepcopy", "from_state"],
)
def test_copy_drafts_like_the_original(copied) -> None:
    model, block, more = make_draft(), draw(BLOCK, "block"), draw(3, "more")
    cache = grown(model)
    copy = copied(cache)
    assert [(c.offset, c.visible, c.window, c.nbytes) for c in copy] == [
        (c.offset, c.visible, c.window, c.nbytes) for c in cache
    ]
    assert mx.array_equal(model(block, more, copy), model(block, more, cache))


def test_deepcopy_is_independent() -> None:
    model, block, more = make_draft(), draw(BLOCK, "block"), draw(3, "more")
    cache, untouched = grown(model), grown(model)
    copy = deepcopy(cache)
    trim_prompt_cache(copy, 20)
    model(draw(BLOCK, "another block"), draw(30, "other context"), copy)
    assert mx.array_equal(model(block, more, cache), model(block, more, untouched))


@pytest.mark.parametrize("dropped", [0, 1, 7, 24])
def test_trimmed_cache_drafts_as_if_the_rows_had_not_been_fed(dropped: int) -> None:
    model, block, context = make_draft(), draw(BLOCK, "block"), draw(200)[:, :40]
    cache = grown(model)
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, dropped) == dropped
    kept, refed = context[:, : 40 - dropped], draw(3, "more")
    expected = from_scratch(model, [WINDOW, WINDOW, None], mx.concatenate([kept, refed], axis=1), block, 5000)
    assert apart(model(block, refed, cache), expected) < CLOSE
    assert all(c.offset == 5000 + 43 - dropped for c in cache)


@pytest.mark.parametrize(("dropped", "left"), [(10, 5), (30, 0)])
def test_rows_that_slid_out_stay_gone_after_a_trim(dropped: int, left: int) -> None:
    model, block, context = make_draft(), draw(BLOCK, "block"), draw(45)
    cache, windows, rows = model.make_cache(), [WINDOW, WINDOW, None], 45 - dropped
    model.extend(context[:, :5], cache)
    model.extend(context[:, 5:], cache)  # longer than the window: sliding layers take the last 15 rows only
    assert trim_prompt_cache(cache, dropped) == dropped
    assert [(c.offset, c.visible) for c in cache] == [(rows, left), (rows, left), (rows, rows)]
    kept = context[:, :rows]
    hidden = model(block, context[:, :0], cache)
    assert apart(hidden, from_scratch(model, windows, kept, block, 0, lost=rows - left)) < CLOSE
    refed = draw(WINDOW - 1 - left, "more")  # the window is whole again
    kept = mx.concatenate([kept, refed], axis=1)
    assert apart(model(block, refed, cache), from_scratch(model, windows, kept, block, 0)) < CLOSE


def test_sizes_of_a_cache() -> None:
    model = make_draft()
    assert all(c.empty() and c.size() == 0 and c.nbytes == 0 for c in model.make_cache())
    cache = grown(model)
    for c in cache:
        assert c.is_trimmable()
        assert not c.empty()
        assert c.size() == c.rows >= c.visible
        assert c.nbytes == c.keys.nbytes + c.values.nbytes > 0
    assert trim_prompt_cache(cache, 10_000) == 5040
    assert all(c.empty() and c.size() == 0 for c in cache)


@pytest.mark.parametrize("case", [FULL_CASE, SLIDING_CASE], ids=["full", "sliding"])
@pytest.mark.parametrize("window", [1, 5, WINDOW - 1, WINDOW, 40, 60])
def test_a_context_window_hides_what_lies_further_back(case: Case, window: int) -> None:
    model, context, block = make_draft(case), draw(53), draw(BLOCK, "block")
    first = max(0, 53 - window)
    expected = model(block, context[:, first:], model.make_cache(offset=first))  # of a draft that was given no more
    model.context_window = window
    cache = model.make_cache()
    feed(model, cache, context[:, :50], increments(50))
    assert mx.allclose(model(block, context[:, 50:], cache), expected, atol=CLOSE)
    assert all(layer.offset == 53 for layer in cache), "positions stay absolute"


def test_a_context_window_bounds_the_cache() -> None:
    model = make_draft(FULL_CASE)
    model.context_window = 100
    cache = model.make_cache()
    for _ in range(60):
        model.extend(draw(50), cache)
        model(draw(BLOCK, "block"), draw(4), cache)
    assert all(layer.keys is not None and layer.keys.shape[2] <= 512 for layer in cache)
    assert [layer.visible for layer in cache] == [100] * 3


def test_a_window_is_an_option_of_loading_and_leaves_the_text_alone(demo_pair) -> None:
    model, draft, tokenizer = load("demo", draft_window=8)
    assert [layer.window for layer in draft.make_cache()] == [9, 9]
    prompt = tokenizer.encode("def parse(self, text):\n    for line in text.splitlines():\n        ")
    texts = [[t for t, *_ in generate_step(prompt, model, d, max_tokens=40)] for d in (None, demo_pair[1], draft)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("window", [0, -1, 2.5, "8", True])
def test_a_window_that_is_none_is_refused_by_auto_too(window) -> None:
    for call in (lambda: load("demo", draft_window=window), lambda: load_draft("demo", draft_window=window)):
        with pytest.raises(DraftError, match="expected a whole number from 1"):
            call()


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_window_needs_a_draft(draft) -> None:
    with pytest.raises(DraftError, match="draft_window is 4, but there is no draft"):
        load("demo", draft_model=draft, draft_window=4)
