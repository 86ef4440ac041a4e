"""Golden outputs of the PyTorch reference: `PYTHONPATH=tests python -m reference.record [CASE ...]`.

Runs z-lab's own draft (dflash 0.1.0, transformers 5) on the cases and writes what it gives to `golden/`.
Every case is run twice: as the reference decodes, with a `DynamicCache` whose block rows are cropped after
each round, and in one shot, every round from scratch over the whole context with no cache. The two agree
wherever the context only grows, sliding layers included, and the cached outputs are recorded.
Dynamic rope is the exception: keys keep the base of the round that they came in, so only the cached run is made.

One limitation of the reference, met where a sliding layer is cropped back into its context, which its own
decoding never does: the layer has kept `window - 1` rows, so after the crop fewer are left than the window
shows (outputs of magnitude 5 are 3 off), and from a length below the window on, the next
`DynamicSlidingWindowLayer.crop` takes the number of rows left for the length. For these cases (`slides` and
`crops_context`) the one-shot outputs are recorded.

Needs torch, transformers and dflash; knows nothing of MLX.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _draft_value, _make_cache, _raw_input_embeddings
from reference.cases import CASES, Case, Crop, Extend, draft_weights, inputs, target_tables
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

GOLDEN = Path(__file__).parent / "golden"
AGREE = 2e-5  # cached against one-shot, both float32


class Target(nn.Module):
    """What the reference asks of a target: an embedding and a head."""

    def __init__(self, embedding: np.ndarray, head: np.ndarray):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.from_numpy(embedding))
        self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.lm_head.weight.data = torch.from_numpy(head)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def reference_draft(case: Case) -> DFlashDraftModel:
    """The reference's draft with the weights of the case, every tensor set."""
    config = {name: value for name, value in deepcopy(case.config).items() if value is not None}  # it edits its own
    model_class = DFlash2DraftModel if case.is_dflash2 else DFlashDraftModel
    model = model_class(Qwen3Config(**config, attn_implementation="sdpa")).float().eval()
    weights = {
        f"{name}.weight" if name.endswith("_codebook") else name: torch.from_numpy(array)
        for name, array in draft_weights(case).items()
    }
    model.load_state_dict(weights, strict=True)
    return model


@torch.inference_mode()
def run_reference(case: Case, model: DFlashDraftModel, cached: bool) -> dict[str, np.ndarray]:
    """Hidden states `round_i` `[L, H]` of every round, `logits` `[L-1, V]` of the last one.

    A DFlash 2 draft gives the path of every round too, `path_i` `[L-1]`.
    """
    target = Target(*target_tables(case))
    scale = float(_draft_value(model.config, "input_embedding_scale", 1.0))
    cache = _make_cache(model.config) if cached else None
    context = torch.zeros(1, 0, model.fc.in_features)  # all taps so far
    held = 0  # context rows that the cache has seen
    outputs: dict[str, np.ndarray] = {}
    for step, taps, ids in inputs(case):
        if isinstance(step, Crop):
            context = context[:, : step.length]
            if cache is not None and held > step.length:
                _crop_to(cache, step.length)
                held = step.length
            continue
        context = torch.cat([context, torch.from_numpy(taps)], dim=1)
        if isinstance(step, Extend):
            continue  # the reference takes context with the next block only
        new = context[:, held:]
        start, length = case.offset + held, new.shape[1] + ids.shape[1]
        hidden = model(
            target_hidden=new,
            noise_embedding=_raw_input_embeddings(target, torch.from_numpy(ids), scale),
            position_ids=torch.arange(start, start + length)[None],
            past_key_values=cache,
            use_cache=cached,
        )
        if cache is not None:
            held = context.shape[1]
            _crop_to(cache, held)
        number = sum(name.startswith("round") for name in outputs)
        outputs[f"round_{number:02}"] = hidden[0].numpy()
        if case.is_dflash2:
            anchor = torch.from_numpy(ids[:, 0])
            outputs[f"path_{number:02}"] = model.propose(hidden[:, 1:], anchor, target.lm_head, 0.0)[0][0].numpy()
    outputs["logits"] = model.compute_logits(hidden[:, 1:], target.lm_head)[0].numpy()
    return outputs


def reference_outputs(case: Case, model: DFlashDraftModel | None = None) -> dict[str, np.ndarray]:
    """What our draft has to give: the reference's cached outputs, or its one-shot ones (see the module).

    `model`: the draft, where it does not come from the case's own config and weights.
    """
    model = model or reference_draft(case)
    if (case.config.get("rope_scaling") or {}).get("rope_type") == "dynamic":
        return run_reference(case, model, cached=True)
    one_shot = run_reference(case, model, cached=False)
    if case.windowless or (case.slides and case.crops_context):
        return one_shot
    outputs = run_reference(case, model, cached=True)
    apart = largest_difference(outputs, one_shot)
    if apart > AGREE:
        raise RuntimeError(f"{case.name}: the reference's cached path is {apart:.1e} off its one-shot computation")
    return outputs


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for case in [case for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]]:
        outputs = reference_outputs(case)
        np.savez(GOLDEN / f"{case.name}.npz", **outputs)
        largest = max(float(np.abs(array).max()) for array in outputs.values())
        rounds = sum(name.startswith("round") for name in outputs)
        print(f"{case.name:40} {rounds:2} rounds, outputs up to {largest:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
