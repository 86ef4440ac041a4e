"""The parity cases on our draft: the same steps as `record`, in MLX. Knows nothing of torch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from reference.cases import Case, Crop, Extend, draft_weights, inputs, target_tables

from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.weights import MODELS


def our_outputs(case: Case, attn_implementation: str) -> dict[str, np.ndarray]:
    """Hidden states `round_i` `[L, H]` of every round, `logits` `[L-1, V]` of the last one.

    A DFlash 2 draft gives the path of every round too, `path_i` `[L-1]`.
    """
    config = parse_config(case.config)
    model = MODELS[config.kind](config, attn_implementation)
    model.load_weights([(name, mx.array(array)) for name, array in draft_weights(case).items()])
    embedding, head = (mx.array(table) for table in target_tables(case))
    cache = model.make_cache(case.offset)
    outputs: dict[str, np.ndarray] = {}
    for step, taps, numpy_ids in inputs(case):
        if isinstance(step, Crop):
            for layer_cache in cache:
                layer_cache.crop(case.offset + step.length)
            continue
        context = model.context_feature(mx.array(taps))
        if isinstance(step, Extend):
            model.extend(context, cache)
            continue
        ids = mx.array(numpy_ids)
        block = embedding[ids] * model.config.input_embedding_scale
        hidden = model(block, context, cache)
        number = sum(name.startswith("round") for name in outputs)
        outputs[f"round_{number:02}"] = np.array(hidden[0])
        if case.is_dflash2:
            path, finite, _ = model.pick(hidden[:, 1:], ids[:, 0], lambda h: h @ head.T)
            assert finite.item()
            outputs[f"path_{number:02}"] = np.array(path)
    # The context is in the cache now: the logits come from a second pass over the same block.
    logits = model.logits(ids, context[:, :0], cache, embed=lambda i: embedding[i], head=lambda h: h @ head.T)
    outputs["logits"] = np.array(logits[0])
    return outputs


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
