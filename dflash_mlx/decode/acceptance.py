"""The match rule: draft tokens count while they equal the target's own pick.

Works for every sampler and any draft, since the text is the target's picks alone. Knows no model.
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
