"""Log-probabilities of a prompt's own tokens. Runs in the engine's thread; knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from ..target import Target
from .cache import Hit
from .job import Job, Progress, Scores
from .provider import Provider

LOGIT_BYTES = 128 << 20  # of the rows that are looked at at once; their temporaries are a few times that


def score(job: Job, provider: Provider, stream: mx.Stream, check: Callable[[Job], None]) -> Hit:
    """Feed all of the prompt but its last token, and send `Scores` of all but its first.

    A token's log-probability is that of the target, given the tokens before it: the forward of mlx-lm in chunks, the
    softmax in float32. Stored caches hold no logits, so none are used.

    Args:
        check: asked between chunks; it raises where the job is to end.

    Returns:
        Caches to go on from.
    """
    cli, prompt, target = provider.cli_args, job.prompt, Target(provider.model)
    caches = target.make_cache()
    rows = max(1, min(cli.prefill_step_size, LOGIT_BYTES // (4 * target.vocab_size)))
    with mx.stream(stream):
        for start in range(0, len(prompt) - 1, rows):
            check(job)
            following = prompt[start + 1 : start + 1 + rows]
            chunk = mx.array(prompt[start : start + len(following)])
            logits, _ = target.forward(chunk[None], caches)
            maybe_quantize_kv_cache(caches, cli.quantized_kv_start, cli.kv_group_size, cli.kv_bits)
            job.send(_scores(logits[0], following, max(job.args.top_logprobs, 0)))
            mx.eval([cache.state for cache in caches])
            mx.clear_cache()
            job.send(Progress(start + len(following), len(prompt)))
    return Hit(caches if len(prompt) > 1 else None, None, len(prompt) - 1)


def _scores(logits: mx.array, tokens: list[int], most: int) -> Scores:
    """Of logits `[L, V]`: those of the `L` tokens, and of the `most` likely at each place, best first."""
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0]
    best: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if most:
        ids = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
        values = mx.take_along_axis(logprobs, ids, axis=-1)
        pairs = zip(cast(list[Any], ids.tolist()), cast(list[Any], values.tolist()), strict=True)
        best = [sorted(zip(*row, strict=True), key=lambda pair: -pair[1]) for row in pairs]
    return Scores(tuple(cast(list[float], own.tolist())), tuple(map(tuple, best)))
