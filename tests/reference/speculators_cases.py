"""Tiny pairs whose drafts `speculators` was given, and `test_export` gives our writer. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import draft_config, make_draft, make_target, save_draft, save_target, target_config

TARGET = {**target_config("qwen3-untied"), "architectures": ["Qwen3ForCausalLM"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "use_sliding_window": True}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DRAFTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": SLIDING,
    "yarn": {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
}


def write_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A tiny draft in z-lab's layout and its target."""
    target = save_target(folder / "target", make_target("qwen3-untied"), TARGET)
    return save_draft(folder / "draft", make_draft(**changes), draft_config(**changes)), target
