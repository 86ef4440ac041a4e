"""What a draft is, from its config and the headers of its files alone; nothing heavy is read or downloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_mlx import demo, hub
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.readers import read_headers
from dflash_mlx.checkpoint.tensor_info import TensorInfo
from dflash_mlx.checkpoint.weights import Quantized, check_tensors, folder_facts
from dflash_mlx.draft.config import DraftConfig
from dflash_mlx.errors import DraftError
from dflash_mlx.loading import SUBFOLDER, peek_draft

# Tensor names that give a layout away, most telling first.
KINDS = {
    "candidate_selector.": "DFlash 2 draft",
    "markov_head.": "DSpark draft",
    "encoder.output_norm_enc.": "DFlash draft in the layout of Meta's Muse assistant",
    "aux_hidden_norms.": "DFlash draft in the layout of poolside's Laguna",
    "hidden_norm.": "DFlash draft",
    "embed_tokens.": "target, or a draft with its own embedding",
}


@dataclass(frozen=True)
class Inspection:
    """The facts of a draft.

    Attributes:
        kind: what its tensors say it is. problem: why it can't be run here, or None.
        config: its facts, None when they can't be read. census: tensors, parameters and bytes by dtype.
        fits: sizes that a target must have.
    """

    source: str
    kind: str
    problem: str | None
    config: dict[str, Any] | None
    tensors: int
    parameters: int
    nbytes: int
    census: dict[str, dict[str, int]]
    quantized: int
    fits: dict[str, Any]


def inspect_draft(path_or_repo: str | Path, *, revision: str | None = None) -> Inspection:
    """Inspect a draft in a folder or on the hub (there by range requests for the headers).

    Raises `DraftError` when config or headers can't be read at all; a draft that can be read but not run
    comes back with its `problem`.
    """
    source = str(path_or_repo)
    folder, tensors = _headers(source, revision)
    raw, stated_in = folder_facts(folder)
    config: DraftConfig | None = None
    quantized: dict[str, Quantized] = {}
    problem = None
    try:
        config = parse_config(raw, stated_in)
        config, quantized, *_ = check_tensors(config, tensors, folder)
    except DraftError as error:
        problem = str(error)
    census: dict[str, Counter] = {}
    for info in tensors.values():
        size = 1
        for n in info.shape:
            size *= n
        census.setdefault(info.dtype, Counter()).update(tensors=1, parameters=size, nbytes=info.nbytes)
    return Inspection(
        source=source,
        kind=_kind(raw, tensors),
        problem=problem,
        config=asdict(config) if config else None,
        tensors=len(tensors),
        parameters=sum(c["parameters"] for c in census.values()),
        nbytes=sum(info.nbytes for info in tensors.values()),
        census={dtype: dict(counter) for dtype, counter in sorted(census.items())},
        quantized=len(quantized),
        fits=_fits(config, raw),
    )


def _headers(source: str, revision: str | None) -> tuple[Path, Mapping[str, TensorInfo]]:
    folder = demo.DRAFTS[source] if source in demo.DRAFTS else peek_draft(source, revision)
    if source in demo.DRAFTS or Path(source).expanduser().is_dir():
        return folder, read_headers(folder)
    return folder, hub.remote_headers(source, revision, SUBFOLDER if folder.name == SUBFOLDER else None)


def _kind(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    if "transformer_layer_config" in raw:
        return "DFlash draft in the `speculators` layout"
    return next((kind for part, kind in KINDS.items() if any(part in name for name in tensors)), "unknown model")


def _fits(config: DraftConfig | None, raw: Mapping[str, Any]) -> dict[str, Any]:
    if config is None:
        return {}
    base = raw.get("base_model") or raw.get("target_model_name_or_path")
    return {
        "hidden_size": config.tap_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers or f"more than {max(config.target_layer_ids)}",
        "base_model": base if isinstance(base, str) else None,
    }
