"""Other packages run what we write, by their own readers and forwards, against ours.

The PyTorch reference runs `--to hf`, in the cases of the parity tests, and `speculators` runs `--to speculators`. Each
export goes through files, so that what a config.json leaves out shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference.cases import CASES, Case, draft_weights
from reference.replay import largest_difference, our_outputs
from reference.speculators_cases import DRAFTS, SECOND, SLIDING, write_pair
from tiny import draft2_config, make_draft2, save_draft

from dflash_mlx import convert_draft, load_draft

TABLES = ("model.embed_tokens", "lm_head")
BY_NAME = {case.name: case for case in CASES}


def exported(case: Case, folder: Path, **options: Any) -> Path:
    """The case's draft in PyTorch's layout, by way of ours."""
    source = folder / "draft"
    source.mkdir()
    weights = {name: mx.array(array) for name, array in draft_weights(case).items()}
    mx.save_safetensors(str(source / "model.safetensors"), weights, {"format": "pt"})
    (source / "config.json").write_text(json.dumps(case.config))
    mlx = convert_draft(source, folder / "mlx", **options).path
    return convert_draft(mlx, folder / "hf", to="hf").path


@pytest.mark.parametrize("name", ["sliding_mixed", "dflash2_sliding", "sliding_by_max_window_layers"])
def test_transformers_reads_the_window(name: str, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    case = BY_NAME[name]
    theirs, stated = Qwen3Config.from_pretrained(exported(case, tmp_path)), Qwen3Config(**case.config)
    assert (theirs.sliding_window, theirs.layer_types) == (16, stated.layer_types)


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_runs_what_is_exported(case: Case, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("dflash.model")
    from reference.record import reference_outputs

    model_class = reference.DFlash2DraftModel if case.is_dflash2 else reference.DFlashDraftModel
    model = model_class.from_pretrained(exported(case, tmp_path), dtype=torch.float32).eval()
    assert largest_difference(our_outputs(case, "sdpa"), reference_outputs(case, model)) <= case.tolerance


@pytest.mark.reference
@pytest.mark.parametrize("name", [*DRAFTS, "dflash2"])
def test_speculators_runs_what_is_exported(name: str, tmp_path: Path) -> None:
    """The package's own forward, which trains a draft, a block at one anchor at a time.

    It loads the export as it loads its own checkpoints, embedding and head from the target that the export names, and
    runs on the CPU with its "eager" attention. Its window reaches back from the anchor, ours, as z-lab's and vLLM's,
    from each token: sliding layers are compared where the window holds all of the context.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("speculators.models.dflash")
    from speculators.config import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    source, target = write_pair(tmp_path, **DRAFTS.get(name, {}))
    if name == "dflash2":
        sizes = dict(zip(("kernel", "group", "rank", "top_k"), SECOND.values(), strict=True))
        changes = {**SLIDING, "is_causal": False}
        save_draft(source, make_draft2(**sizes, **changes), draft2_config(**sizes, **changes))
    out = convert_draft(source, tmp_path / "out", to="speculators", target=str(target)).path
    config = SpeculatorModelConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention, its own choice, is for CUDA
    theirs = SpeculatorModel.from_pretrained(str(out), config=config, dtype=torch.float32).eval()
    theirs.load_verifier_weights()

    ours = load_draft(str(source))
    embedding, head = (mx.load(str(target / "model.safetensors"))[f"{name}.weight"] for name in TABLES)
    window, block = config.transformer_layer_config.sliding_window, config.block_size
    random = np.random.RandomState(7)
    taps = random.randn(1, 120, 2 * 64).astype(np.float32)
    tokens = random.randint(0, 255, (1, 120))
    for anchor in (1, 5, 8) if window else (1, 5, 40, 111):
        chosen = torch.zeros(1, 120)
        chosen[0, anchor] = 1
        with torch.inference_mode():
            hidden, logits, *_ = theirs._backbone_forward(
                torch.from_numpy(taps), torch.from_numpy(tokens), chosen, torch.zeros(1, 120, 64),
                torch.zeros(1, 120, dtype=torch.long), max_anchors=1,
            )  # fmt: skip
        ids = mx.array([[int(tokens[0, anchor])] + [255] * (block - 1)])
        context = ours.context_feature(mx.array(taps[:, :anchor]))
        own = ours(embedding[ids], context, ours.make_cache())
        assert np.abs(np.array(own) - hidden.numpy()).max() < 1e-4
        own = ours.logits(ids, context, ours.make_cache(), embed=lambda i: embedding[i], head=lambda h: h @ head.T)
        assert np.abs(np.array(own) - logits[:, 1:].numpy()).max() < 1e-4
