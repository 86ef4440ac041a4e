"""The PyTorch reference runs what `--to hf` writes: its own reader, its caches, its forward, against ours.

The cases are those of the parity tests; the export goes through files, so that what a config.json leaves out shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from reference.cases import CASES, Case, draft_weights
from reference.replay import largest_difference, our_outputs

from dflash_mlx import convert_draft

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
