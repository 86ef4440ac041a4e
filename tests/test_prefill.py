"""Case C5: prompts longer than one prefill chunk, and the progress callback."""

from __future__ import annotations

import mlx.core as mx
import pytest
from scripted import plain_tokens
from tiny import make_draft, make_target

from dflash_mlx.api import _tokens
from dflash_mlx.decode import GenerationStats
from dflash_mlx.decode.dflash import DFlashDrafter
from dflash_mlx.decode.loop import PLAIN
from dflash_mlx.decode.sampling import TokenPicker
from dflash_mlx.decode.session import Session
from dflash_mlx.target import Target


def session_after_prefill(model, draft, prompt, step):
    target = Target(model)
    session = Session(
        target, DFlashDrafter(draft), TokenPicker(), target.make_cache(), draft.make_cache(), GenerationStats(),
        stream=mx.default_stream(mx.default_device()),
    )  # fmt: skip
    session.prefill(mx.array(prompt), step, lambda done, total: None)
    session.settle(session.dispatch(PLAIN))
    return session


def first_logits(draft, session, block):
    context = draft.context_feature(session.backlog.taps[0][1])
    return draft.logits(block, context, session.draft_cache, embed=session.target.embed, head=session.target.head)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 50, 160])
def test_draft_context_is_the_whole_prompt_and_does_not_depend_on_the_chunk(length):
    model, draft = make_target(), make_draft()
    prompt = [(5 * i + 1) % 250 for i in range(length)]
    chunked, whole = (session_after_prefill(model, draft, prompt, step) for step in (16, 4096))
    for session in (chunked, whole):
        rows = session.draft_cache[0].rows + len(session.backlog)
        assert rows == length
    for a, b in zip(chunked.draft_cache, whole.draft_cache, strict=True):
        if length > 1:
            assert mx.array_equal(a.keys[..., : a.rows, :], b.keys[..., : b.rows, :])
    block = mx.array([[9] + [255] * 7])
    logits = [
        draft.logits(
            block, draft.context_feature(s.backlog.taps[0][1]), s.draft_cache, embed=s.target.embed, head=s.target.head
        )
        for s in (chunked, whole)
    ]
    assert mx.array_equal(*logits)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_tokens_and_progress_equal_mlx_lm(length):
    model, draft = make_target(), make_draft()
    prompt = [(5 * i + 1) % 250 for i in range(length)]
    theirs, ours = [], []
    truth = plain_tokens(
        model,
        prompt,
        20,
        prefill_step_size=16,
        prompt_progress_callback=lambda done, total: theirs.append((done, total)),
    )
    tokens = _tokens(
        mx.array(prompt), model, draft, GenerationStats(), max_tokens=20, prefill_step_size=16,
        prompt_progress_callback=lambda done, total: ours.append((done, total)),
    )  # fmt: skip
    assert [token.id for token in tokens] == truth
    assert ours == theirs


def test_prompt_logits_are_never_computed():
    """A prompt's logits would dwarf everything else: 1,023 rows of 50,000 float32 are 204 MB."""
    model, draft = make_target("qwen3-untied", vocab=50_000), make_draft(vocab_size=50_000)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    list(_tokens(mx.array([1] * 1024), model, draft, GenerationStats(), max_tokens=2))
    assert mx.get_peak_memory() - before < 100e6
