"""What the package `speculators` makes of a draft: `PYTHONPATH=tests python -m reference.record_speculators`.

Its own converter turns a tiny z-lab draft into a checkpoint (DFlash 2, for which it has none, is built by its classes),
and `speculators.json` keeps config.json and the names and shapes of the tensors, so that `test_export` needs no torch.

Needs speculators 0.9.0, torch and transformers; knows nothing of our writer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from reference.speculators_cases import DRAFTS, SECOND, SLIDING, write_pair
from safetensors import safe_open
from speculators.convert.dflash import DFlashConverter
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

GOLDEN = Path(__file__).parent / "speculators.json"


def facts(folder: Path) -> dict[str, Any]:
    """config.json, the verifier by another name, and the tensors of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "target"
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    return {"config": config, "tensors": tensors}


def converted(changes: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        draft, target = write_pair(Path(work), **changes)
        DFlashConverter().convert(draft, Path(work) / "out", str(target), validate=False)
        return facts(Path(work) / "out")


def second_generation() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        draft, target = write_pair(Path(work), **SLIDING)
        config = DFlashConverter()._build_config(json.loads((draft / "config.json").read_text()), str(target), None)
        fields = {name: getattr(config, name) for name in DFlashDraftModel.config_class.model_fields}
        fields.update(SECOND, speculators_model_type="dflash2", architectures=["DFlash2DraftModel"])
        fields["speculators_config"].algorithm = "dflash2"
        fields["sliding_window_non_causal"] = True
        model = DFlash2DraftModel(DFlash2SpeculatorConfig(**fields)).to(torch.float32)
        model.save_pretrained(Path(work) / "out")
        return facts(Path(work) / "out")


def main() -> None:
    golden = {name: converted(changes) for name, changes in DRAFTS.items()}
    golden["dflash2"] = second_generation()
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
