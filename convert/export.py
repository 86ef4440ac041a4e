"""The `speculators` layout of a draft, which vLLM takes: config.json from our config; tensors are named as ours.

Knows the layout as the package `speculators` 0.9.0 reads and writes it; knows no file and no tensor. What the layout
can't state is refused by name, never dropped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx import hub
from dflash_mlx.draft.config import DFLASH2_FIELDS, SLIDING, DraftConfig
from dflash_mlx.errors import DFlashError, DraftError
from dflash_mlx.pairs.fit import TargetFacts, check_fit
from dflash_mlx.pairs.registry import find_draft

VERSION = "0.9.0"  # of the package that this layout was checked against
# Fields of a layer of the draft, which stand in `transformer_layer_config` under our names.
LAYER_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "attention_bias", "sliding_window", "max_position_embeddings",
    "final_logit_softcapping",
)  # fmt: skip
# Every fact of a draft that the layout states, here or there; others must have their default.
STATED = {
    *LAYER_FIELDS, *DFLASH2_FIELDS, "rope_theta", "rope_scaling", "layer_types", "is_causal", "block_size",
    "mask_token_id", "target_layer_ids", "num_target_layers", "target_hidden_size", "dtype",
    "attention_output_bias", "sample_from_anchor", "taps_before_norm", "draft_vocab_size", "has_embed_tokens",
    "has_lm_head",
}  # fmt: skip


@dataclass(frozen=True)
class Verifier:
    """The target as the layout names it."""

    name: str
    architectures: list[str] = field(default_factory=list)
    layers: int | None = None


def find_verifier(
    draft: DraftConfig, source: str, base_model: str | list[str] | None, target: str | None, notes: list[str]
) -> Verifier:
    """The target of a draft: the one the user names, else that of the card, else that of the table of pairs.

    Its config.json gives the architectures and is checked against the draft; where it can't be had, a note says so.
    Raises `DFlashError` when nothing names one target, `DraftError` when the draft does not fit it.
    """
    found = find_draft(source)
    stated = [base_model] if isinstance(base_model, str) else base_model or []
    name = target or (stated[0] if len(stated) == 1 else None) or (found[0].targets[0] if found else None)
    if not name:
        raise DFlashError(f"--to speculators: the card of {source} names no single target; give it as --target")
    try:
        _, config = hub.peek_config(name, what="target")
    except DFlashError as error:
        if target:
            raise
        notes.append(f"the architecture of the target is left out of config.json ({error})")
        return Verifier(name)
    facts = TargetFacts.from_config(name, config)
    check_fit(draft, facts, source)
    architectures = config.get("architectures")
    return Verifier(name, architectures if isinstance(architectures, list) else [], facts.num_layers)


def speculators_config(config: DraftConfig, verifier: Verifier, notes: list[str]) -> dict[str, Any]:
    """`config.json` of this draft in the `speculators` layout. Raises `DraftError` for what the layout can't state."""
    _refuse_unstatable(config, verifier)
    ours = config.to_dict()
    second = {name: ours["dflash_config"][name] for name in DFLASH2_FIELDS if name in ours["dflash_config"]}
    kind = "dflash2" if second else "dflash"
    causal = [config.causal(i) for i in range(config.num_hidden_layers)]
    if any(causal) and not all(causal):
        notes.append("vLLM makes every layer of this layout causal or none, this draft has both; serve --to hf there")
    if second:
        notes.append("no engine reads DFlash 2 in this layout by itself yet; serve --to hf, see docs/serving.md")
    if config.has_embed_tokens:
        notes.append("embed_tokens is written, but `speculators` takes the target's; serve --to hf if they differ")
    return {
        "architectures": ours["architectures"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],  # 0 is the embedding here
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not any(causal),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **second,
        **{name: getattr(config, name) for name in ("dtype", "num_target_layers") if getattr(config, name) is not None},
        "transformer_layer_config": _layers(config),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": config.widest_block - 1,
                "verifier_accept_k": 1, "accept_tolerance": 0.0,
            }],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
        },
    }  # fmt: skip


def _layers(config: DraftConfig) -> dict[str, Any]:
    scaling = dict(config.rope_scaling or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in LAYER_FIELDS if getattr(config, name) is not None},
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
        "rope_parameters": {**scaling, "rope_type": kind, "rope_theta": config.rope_theta},
    }


def _refuse_unstatable(config: DraftConfig, verifier: Verifier) -> None:
    last = (config.num_target_layers or verifier.layers or 0) - 1
    width, bias = config.target_hidden_size, config.attention_bias
    problems = {
        "biases of some projections of attention only": getattr(config, "attention_output_bias", bias) != bias,
        "causal full-attention layers": any(
            kind != SLIDING and config.causal(i) for i, kind in enumerate(config.layer_types)
        ),
        f"target_hidden_size {width} beside hidden_size {config.hidden_size}": width not in (None, config.hidden_size),
        f"a tap of the target's last layer, {last}": last in config.target_layer_ids and not config.taps_before_norm,
        "lm_head of its own for the whole vocabulary": config.has_lm_head and not config.draft_vocab_size,
        "a reduced vocabulary of DFlash 2": config.kind == "dflash2" and bool(config.draft_vocab_size),
    }
    for fact in dataclasses.fields(config):
        value = getattr(config, fact.name)
        problems[f"{fact.name} {value}"] = fact.name not in STATED and value != fact.default
    for problem, present in problems.items():
        if present:
            raise DraftError(f"--to speculators: the layout has no place for {problem}; use --to hf")
