"""The two rules by which draft tokens are kept, both in the graph. Know no model.

Match (the default): a draft token counts while it equals the target's own pick. Works for every sampler and any
draft, and the text is the target's picks alone. Rejection: the classic scheme on the two distributions; exact in
distribution too, keeps a few more tokens, but the text then depends on the draft and the block size.
"""

import mlx.core as mx


def count_accepted(proposed: mx.array, picks: mx.array) -> mx.array:
    """How many proposals are kept, as a scalar int32 in the graph.

    Args:
        proposed: `[L - 1]` draft tokens in slots 1.. of the block.
        picks: `[L]` the target's picks; pick i is its own choice for slot i+1.
    """
    match = proposed.astype(picks.dtype) == picks[:-1]
    return mx.cumprod(match.astype(mx.int32)).sum()


def reject(
    proposed: mx.array, draft: mx.array | None, target: mx.array, uniform: mx.array, gumbel: mx.array
) -> tuple[mx.array, mx.array]:
    """Accept token d_i where u_i q_i(d_i) < p_i(d_i); the first that fails is drawn again from max(p - q, 0).

    Args:
        proposed: `[L - 1]` drawn from the softmax of `draft` `[L - 1, V]`, or chosen without chance (draft None).
        target: `[L, V]` scores of the target. uniform: `[L - 1]`, gumbel: `[L, V]`; independent of the draft's noise.

    Returns:
        How many are kept (scalar int32), and tokens `[L]`: the kept ones, then the target's own.
    """
    length, vocab = target.shape
    p = mx.softmax(target, axis=-1, precise=True)
    if draft is None:
        q = (mx.arange(vocab)[None] == proposed[:, None]).astype(p.dtype)
    else:
        q = mx.softmax(draft, axis=-1, precise=True)
    p_of, q_of = (mx.take_along_axis(x, proposed[:, None], axis=-1)[:, 0] for x in (p[:-1], q))
    kept = mx.cumprod((uniform * q_of < p_of).astype(mx.int32)).sum()
    q = mx.concatenate([q, mx.zeros((1, vocab), q.dtype)])  # nothing to take away behind the last draft token
    residual = mx.maximum(p[kept] - q[kept], 0)
    residual = mx.where(residual.sum() > 0, residual, p[kept])  # p = q up to rounding
    own = mx.argmax(mx.log(residual) + gumbel[kept])
    padded = mx.concatenate([proposed, proposed[:1]]).astype(own.dtype)
    return kept, mx.where(mx.arange(length) < kept, padded, own)
