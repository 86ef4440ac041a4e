"""Cases C2 and C3: caches after a rewind equal caches that only ever saw the kept tokens."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from scripted import ScriptedDrafter, plain_tokens
from tiny import HYBRIDS, make_draft, make_hybrid, make_target

from dflash_mlx import generate_step
from dflash_mlx.api import _tokens
from dflash_mlx.decode import GenerationStats
from dflash_mlx.target import Rewinder, Target
from dflash_mlx.target.pinned import pin
from dflash_mlx.target.undo import CanNotRewind, note


def prompt_of(n: int) -> list[int]:
    return [(7 * i + 3) % 250 for i in range(n)]


@functools.cache
def model_of(family):
    return make_target() if family == "qwen3" else make_hybrid(family)


@functools.cache
def text(family, length):
    """A model, a prompt and the 40 tokens that it says to it."""
    model, prompt = model_of(family), prompt_of(length)
    return model, prompt, plain_tokens(model, prompt, 40)


def decode(model, prompt, draft, n=40, **options):
    stats = GenerationStats()
    return [t.id for t in _tokens(mx.array(prompt), model, draft, stats, max_tokens=n, **options)], stats


def same_state(ours, theirs, tolerance=1e-4) -> None:
    """Rows, recurrent state and offsets of two lists of caches agree."""
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, CacheList):
            same_state(a.caches, b.caches, tolerance)
        elif isinstance(a, ArraysCache):
            for x, y in zip(a.cache, b.cache, strict=True):
                assert (x is None) == (y is None)
                assert x is None or mx.allclose(x, y, atol=tolerance)
        else:
            assert a.offset == b.offset
            for x, y in ((a.keys, b.keys), (a.values, b.values)):
                if isinstance(a, RotatingKVCache):
                    n = min(a.offset, a.max_size - 1)
                    x, y = a._temporal_order(x)[..., -n:, :], b._temporal_order(y)[..., -n:, :]
                else:
                    x, y = x[..., : a.offset, :], y[..., : b.offset, :]
                assert mx.allclose(x, y, atol=tolerance)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("length", [3, 20, 30])
def test_every_cut_of_a_block(family, length):
    """Feed a block of 8, keep n = 0..8, then go on as if only n had been fed."""
    model = model_of(family)
    target, ids = Target(model), prompt_of(length + 40)
    for keep in range(9):
        caches = make_prompt_cache(model)
        rewinder = target.rewinder(caches)
        target.forward(mx.array([ids[:length]]), caches)
        rewinder.mark(length, 8)
        garbage = [*ids[length : length + keep], *([249] * (8 - keep))]
        target.forward(mx.array([garbage]), caches, watch=rewinder.watch())
        rewinder.rewind(length + 8, length + keep)
        clean = make_prompt_cache(model)
        target.forward(mx.array([ids[:length]]), clean)
        if keep:
            target.forward(mx.array([ids[length : length + keep]]), clean)
        same_state(caches, clean)
        for step in range(4):
            token = mx.array([[ids[length + keep + step]]])
            assert mx.allclose(model(token, cache=caches), model(token, cache=clean), atol=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("length", [1, 18, 23, 24, 25, 60])
def test_tokens_across_the_window(family, length):
    model, prompt, truth = text(family, length)
    for block in (2, 5, 8):
        draft = ScriptedDrafter([*prompt, *truth], lambda i, block=block: i % block, block)
        tokens, stats = decode(model, prompt, draft)
        assert tokens == truth
        position = length + 1
        late = []
        for kept in stats.accepted:
            late += [kept] if position > 24 else []
            position += kept + 1
        assert max(late, default=1) > 0, "drafting goes on after the wrap"


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("kind", [0, 3, 7, "real", "none"])  # a number: so many of each block are right
@pytest.mark.parametrize("stop_after", [1, 2, 4, 5, 8, 9, 13])
def test_closing_early_goes_back_across_two_rounds(family, kind, stop_after):
    """The next round is queued before the tokens of the last are handed out, so both may have to be undone."""
    model, prompt, truth = text(family, 21)
    draft = {"real": make_draft(), "none": None}.get(kind, ScriptedDrafter([*prompt, *truth], lambda i: kind))
    cache = make_prompt_cache(model)
    steps = generate_step(prompt, model, draft, max_tokens=40, prompt_cache=cache)
    assert [next(steps)[0] for _ in range(stop_after)] == truth[:stop_after]
    steps.close()
    clean = make_prompt_cache(model)
    Target(model).forward(mx.array([[*prompt, *truth[:stop_after]]]), clean)
    same_state(cache, clean)
    rest, _ = decode(model, truth[stop_after : stop_after + 1], draft, 15, prompt_cache=cache)
    assert rest == truth[stop_after + 1 : stop_after + 16]


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 26])
@pytest.mark.parametrize("right", [0, 7])
def test_a_length_stop_leaves_the_cache_at_prompt_and_tokens(family, limit, right):
    model, prompt, truth = text(family, 21)
    cache = make_prompt_cache(model)
    tokens, _ = decode(model, prompt, ScriptedDrafter([*prompt, *truth], lambda i: right), limit, prompt_cache=cache)
    assert tokens == truth[:limit]
    assert decode(model, truth[limit : limit + 1], None, 11, prompt_cache=cache)[0] == truth[limit + 1 : limit + 12]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
def test_a_cache_that_pins_its_first_tokens(length):
    """`max_kv_size` keeps 4 tokens for ever; mlx-lm's own mask for several rows is wrong there."""
    model, prompt, whole = text("qwen3", length)
    truth = plain_tokens(model, prompt, 40, max_kv_size=16)
    assert truth != whole, "the window must matter"
    for block in (2, 5, 8):
        draft = ScriptedDrafter([*prompt, *truth], lambda i, block=block: i % block, block)
        tokens, stats = decode(model, prompt, draft, max_kv_size=16)
        assert tokens == truth
        assert max(stats.accepted) == block - 1
    assert decode(model, prompt, make_draft(), max_kv_size=16)[0] == truth


def test_one_row_rounds_between_blocks_on_a_rotating_cache():
    """A one-row append writes in place; going back across it must not find the overwritten rows."""
    model, prompt = make_hybrid("gpt_oss"), prompt_of(30)
    target, ids = Target(model), prompt_of(80)
    caches = make_prompt_cache(model)
    rewinder = target.rewinder(caches)
    target.forward(mx.array([ids[:30]]), caches)
    for start, width in ((30, 6), (36, 1)):
        rewinder.mark(start, width)
        target.forward(mx.array([ids[start : start + width]]), caches, watch=rewinder.watch())
    assert rewinder.rewind(37, 33) == 30, "where the block began; what was kept of it is fed again"
    target.forward(mx.array([ids[30:33]]), caches)
    clean = make_prompt_cache(model)
    target.forward(mx.array([ids[:30]]), clean)
    target.forward(mx.array([ids[30:33]]), clean)
    same_state(caches, clean)
    assert prompt == ids[:30]


# how to make it, and a wide append that is cut again
CACHES = {
    "KVCache": KVCache,
    "QuantizedKVCache": lambda: QuantizedKVCache(group_size=32, bits=8),
    "RotatingKVCache": lambda: RotatingKVCache(12),
    "RotatingKVCache, pinned": lambda: RotatingKVCache(12, keep=4),
    "ChunkedKVCache": lambda: ChunkedKVCache(8),
    "ConcatenateKVCache": ConcatenateKVCache,
    "CacheList": lambda: CacheList(KVCache(), KVCache()),
    "nested CacheList": lambda: CacheList(CacheList(KVCache(), RotatingKVCache(12)), KVCache()),
}


def append(cache, values):
    if isinstance(cache, CacheList):
        for member in cache.caches:
            append(member, values)
        return
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    rows = mx.broadcast_to(mx.array(list(values), mx.float32)[None, None, :, None], (1, 2, len(values), 32))
    cache.update_and_fetch(rows, rows)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("before", [1, 3, 7, 11, 12, 13, 30])
def test_each_cache_class(name, before):
    for keep in range(1, 7):
        ours, clean = CACHES[name](), CACHES[name]()
        for cache in (ours, clean):
            append(cache, range(before))
        rewinder = Rewinder([ours], [])
        rewinder.mark(before, 6)
        append(ours, [*range(before, before + keep), *([999] * (6 - keep))])
        rewinder.rewind(before + 6, before + keep)
        append(clean, range(before, before + keep))
        for step in range(3):  # what a later step sees
            for cache in (ours, clean):
                append(cache, [before + keep + step])
            visible = [shown(cache) for cache in (ours, clean)]
            assert visible[0] == visible[1]
            assert 999 not in visible[0]


def shown(cache):
    if isinstance(cache, CacheList):
        return [x for member in cache.caches for x in shown(member)]
    if isinstance(cache, QuantizedKVCache):
        return [round(x) for x in mx.dequantize(*cache.keys_and_values()[0], 32, 8)[0, 0, :, 0].tolist()]
    keys, _ = cache.keys_and_values()
    return sorted(round(x) for x in keys[0, 0, :, 0].tolist())


def test_interleaved_generators_on_a_hybrid():
    model, draft = make_hybrid("qwen3_5"), make_draft()
    prompts = [prompt_of(30), prompt_of(7), prompt_of(19)]
    truth = [plain_tokens(model, prompt, 25) for prompt in prompts]
    steps = [generate_step(prompt, model, draft, max_tokens=25) for prompt in prompts]
    together = [[step[0] for step in row] for row in zip(*steps, strict=True)]
    assert [list(column) for column in zip(*together, strict=True)] == truth


def test_a_hybrid_grows_by_its_own_rows_only():
    """Over 400 tokens recurrent state and its copies do not add up."""
    model, draft = make_hybrid("qwen3_5"), make_draft()
    base, per_token = {}, 2 * 2 * 16 * 4 + 2 * 2 * 2 * 16 * 4  # one attention layer here, two in the draft
    for i, _ in enumerate(generate_step(prompt_of(8), model, draft, max_tokens=500), 1):
        if i in (100, 500):
            base[i] = mx.get_active_memory()
    assert base[500] - base[100] < 1.5 * 400 * per_token + 300_000


@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
@pytest.mark.parametrize("right", [0, 2, 4, 7])
def test_an_end_token_anywhere_in_a_partly_accepted_block(family, right):
    """The block is cut twice: what was rejected, then what was accepted behind the end token."""
    model, prompt, truth = text(family, 21)
    for place in range(1, 2 * (right + 1) + 2):  # in the first two rounds, and right behind
        end = truth[place]
        n = truth.index(end) + 1
        cache = make_prompt_cache(model)
        draft = ScriptedDrafter([*prompt, *truth], lambda i: right)
        tokens, stats = decode(model, prompt, draft, end_tokens={end}, prompt_cache=cache)
        assert tokens == truth[:n]
        assert n == 1 + sum(stats.accepted) + stats.bonus
        clean = make_prompt_cache(model)
        Target(model).forward(mx.array([[*prompt, *tokens]]), clean)
        same_state(cache, clean)


def rows_of(start: int, n: int) -> tuple[mx.array, mx.array]:
    """Keys and values `[1, 1, n, 4]` that tell the rows apart."""
    keys = mx.broadcast_to(mx.arange(start, start + n, dtype=mx.float32)[:, None], (1, 1, n, 4)) + 0.0
    return keys, -keys


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("fed", [(5,), (5, 1), (12,), (12, 1), (8, 1, 1), (8, *[1] * 6), (8, *[1] * 7), (3, 4, 9, 1)])
@pytest.mark.parametrize(
    "make",
    [KVCache, ConcatenateKVCache, lambda: RotatingKVCache(max_size=8), lambda: RotatingKVCache(max_size=8, keep=2)],
)
def test_an_append_that_is_undone_leaves_no_row(make, fed, width):
    """Whatever was appended before, wide or by one, the next append finds what it would have found."""
    undone, clean = make(), make()
    for cache in (undone, clean):
        at = 0
        for n in fed:
            cache.update_and_fetch(*rows_of(at, n))
            at += n
    undo = note(undone, width)
    undone.update_and_fetch(*rows_of(100, width))
    undo()
    same_state([undone], [clean])
    for n in (1, 1, 3):
        found = [cache.update_and_fetch(*rows_of(at, n)) for cache in (undone, clean)]
        assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
        at += n


def test_a_restore_ends_the_masks_of_a_verify_that_was_broken_off():
    cache = RotatingKVCache(max_size=8, keep=2)
    cache.update_and_fetch(*rows_of(0, 8))
    rewinder = Rewinder([cache], [])
    rewinder.mark(8, 3)
    pin([cache])
    assert "make_mask" in vars(cache)
    assert rewinder.restore(8) == 8
    assert "make_mask" not in vars(cache)


def test_a_round_that_touched_nothing_needs_no_way_back():
    cache = RotatingKVCache(max_size=8)
    cache.update_and_fetch(*rows_of(0, 8))
    rewinder = Rewinder([cache], [])
    mark = rewinder.mark(8, 1, plain=True)
    with pytest.raises(CanNotRewind):
        rewinder.restore(8)
    mark.idle = True
    assert rewinder.restore(8) == 8
