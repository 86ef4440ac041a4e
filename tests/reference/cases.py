"""The parity cases: drafts, weights and inputs that both worlds draw from the same seeds.

Imports numpy only, so that PyTorch (`record`) and MLX (`replay`) build the very same draft from a case and
only the outputs have to be stored. A config is written as a checkpoint's `config.json` and read by each
side's own reader. Knows neither framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Round:
    """Draft one block after `rows` new context rows; `block` is its length where it is not the draft's own."""

    rows: int
    block: int | None = None


@dataclass(frozen=True)
class Extend:
    """Take `rows` context rows without drafting."""

    rows: int


@dataclass(frozen=True)
class Crop:
    """Cut the context back to its first `length` rows."""

    length: int


Step = Round | Extend | Crop

GROW: tuple[Step, ...] = (Round(1), Round(3), Round(8), Round(1), Round(3), Round(8))
GROW_FAR: tuple[Step, ...] = (Round(1), Round(3), Round(8), Round(20), Round(3))
LONG: tuple[Step, ...] = (Extend(120), Round(1), Round(3), Extend(8), Round(8), Round(0), Extend(100), Round(60))
REWIND: tuple[Step, ...] = (
    Round(20), Round(3), Crop(10), Round(1), Round(8), Crop(5), Extend(3), Round(30), Crop(37), Round(1), Round(0),
    Crop(0), Round(3),
)  # fmt: skip
# No increment as long as the window of 16: the rows behind a crop are still held, so the crop is exact.
REWIND_IN_WINDOW: tuple[Step, ...] = (
    Extend(15), Round(8), Extend(12), Round(15), Crop(39), Round(1), Crop(20), Round(3), Extend(8), Round(8),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One draft and what is done to it.

    Attributes:
        offset: absolute position of the first context row.
        tolerance: largest difference allowed between outputs of magnitude 1 to 10.
    """

    name: str
    config: dict[str, Any]
    steps: tuple[Step, ...] = GROW
    offset: int = 0
    tolerance: float = 1e-4

    @property
    def slides(self) -> bool:
        return SLIDING in (self.config.get("layer_types") or ())

    @property
    def windowless(self) -> bool:
        """Whether sliding layers have no window, with which the reference can't make a cache."""
        return self.slides and self.config.get("use_sliding_window") is False

    @property
    def crops_context(self) -> bool:
        return any(isinstance(step, Crop) for step in self.steps)

    @property
    def is_dflash2(self) -> bool:
        return "selector_rank" in self.config["dflash_config"]

    def random(self, what: str) -> np.random.RandomState:
        """The case's own stream for one purpose; numpy keeps `RandomState` the same in every version."""
        return np.random.RandomState(crc32(f"{self.name}/{what}".encode()))


def draft_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` in z-lab's layout: 3 full layers, block 8, 3 taps, head_dim twice hidden / heads."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "vocab_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "block_size": 8,
        "attention_bias": False, "max_position_embeddings": 32768, "num_target_layers": 12,
        "dflash_config": {"target_layer_ids": [1, 5, 9], "mask_token_id": 63},
    }  # fmt: skip
    nested = {key: changes.pop(key) for key in NESTED if key in changes}
    config.update(changes)
    config["dflash_config"].update(nested)
    return config


SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
NESTED = ("target_layer_ids", "input_embedding_scale", "output_multiplier", *SELECTOR)


def sliding_config(types: str, **changes: Any) -> dict[str, Any]:
    """A config whose layers are spelled "s" (sliding) or "f" (full); the window is 16 unless changed."""
    layer_types = [SLIDING if kind == "s" else FULL for kind in types]
    # transformers' Qwen3Config drops the window unless use_sliding_window is set.
    window = {"layer_types": layer_types, "use_sliding_window": True, "sliding_window": 16}
    return draft_config(**{"num_hidden_layers": len(types), **window, **changes})


def dflash2(config: dict[str, Any], kernel: int = 2, group: int = 8, rank: int = 8, top_k: int = 16) -> dict[str, Any]:
    """The same draft as a DFlash 2 one."""
    config["dflash_config"].update(zip(SELECTOR, (kernel, group, rank, top_k), strict=True))
    return config | {"architectures": ["DFlash2DraftModel"]}


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
YARN_BETAS = {**YARN, "type": "yarn", "factor": 2.5, "beta_fast": 8.0, "beta_slow": 2.0}
YARN_FACTOR = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.7}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ONE_TAP = {"target_layer_ids": [6], "num_hidden_layers": 1}
TWO_TAPS = {"target_layer_ids": [7, 2], "num_hidden_layers": 2}
FIVE_TAPS = {"target_layer_ids": [0, 3, 5, 8, 11], "num_hidden_layers": 2}
LOGIT_FACTS = {"input_embedding_scale": 2.5, "output_multiplier": 0.7, "final_logit_softcapping": 3.0}
# At position 5000 a float32 phase is off by up to 2.4e-4 rad: the reference is 3e-4 from its own run in
# double precision there, ours 2e-4, and the two 4e-4 from each other. A position wrong by one gives 0.1.
PHASE_ROUNDING = 1e-3
SHORT_BLOCKS: tuple[Step, ...] = (Round(5), Round(3, block=4), Round(4, block=2), Round(2, block=7))

CASES = [
    Case("block_2", draft_config(block_size=2, **ONE_TAP)),
    Case("block_3_long", draft_config(block_size=3, **TWO_TAPS), LONG),
    Case("block_8_rewind", draft_config(), REWIND),
    Case("block_10_short_blocks", draft_config(block_size=10), SHORT_BLOCKS),
    Case("block_16_five_taps", draft_config(block_size=16, **FIVE_TAPS)),
    Case("block_16_long", draft_config(block_size=16, **TWO_TAPS), LONG),
    Case("heads_4_kv_4", draft_config(num_key_value_heads=4), REWIND),
    Case("heads_4_kv_1_head_dim_32", draft_config(num_key_value_heads=1, head_dim=32), REWIND),
    Case("head_dim_8_is_hidden_by_heads", draft_config(head_dim=8)),
    Case("rms_norm_eps_large", draft_config(rms_norm_eps=0.05)),
    Case("attention_bias", draft_config(attention_bias=True), REWIND),
    Case("logit_facts", draft_config(**LOGIT_FACTS)),
    Case("rope_theta_1e7", draft_config(rope_parameters={"rope_type": "default", "rope_theta": 1e7}, rope_theta=None)),
    Case("rope_linear", draft_config(rope_scaling=LINEAR), REWIND),
    Case("rope_yarn", draft_config(rope_scaling=YARN), LONG),
    Case("rope_yarn_betas", draft_config(rope_parameters=YARN_BETAS | {"rope_theta": 10000.0}), REWIND),
    Case("rope_yarn_attention_factor", draft_config(rope_scaling=YARN_FACTOR, max_position_embeddings=64), REWIND),
    Case("rope_yarn_exact_range", draft_config(rope_scaling=YARN | {"truncate": False}), LONG),
    Case("rope_dynamic", draft_config(rope_scaling=DYNAMIC, max_position_embeddings=24), GROW_FAR),
    Case("rope_llama3", draft_config(rope_scaling=LLAMA3), LONG),
    Case("offset_5000", draft_config(**TWO_TAPS), REWIND, offset=5000),
    Case("offset_5000_yarn", draft_config(rope_scaling=YARN, **TWO_TAPS), offset=5000, tolerance=PHASE_ROUNDING),
    Case("full_is_causal", draft_config(is_causal=True), REWIND),
    Case("sliding_mixed", sliding_config("ssf")),
    Case("sliding_mixed_long", sliding_config("sf", block_size=16), LONG),
    Case("sliding_only_rewind", sliding_config("ss", num_key_value_heads=1), REWIND_IN_WINDOW),
    Case("sliding_not_causal", sliding_config("sf", is_causal=False)),
    Case("sliding_not_causal_long", sliding_config("ss", is_causal=False), LONG),
    Case("sliding_not_causal_rewind", sliding_config("sf", is_causal=False), REWIND_IN_WINDOW),
    Case("sliding_window_below_block", sliding_config("sf", sliding_window=5, block_size=12)),
    Case("sliding_window_below_block_not_causal", sliding_config("ss", sliding_window=5, is_causal=False)),
    Case("sliding_all_causal", sliding_config("sf", is_causal=True)),
    Case("sliding_offset_5000", sliding_config("sf", rope_scaling=LLAMA3), offset=5000),
    Case("sliding_by_max_window_layers", sliding_config("sss", layer_types=None, max_window_layers=1)),
    Case("sliding_without_use_sliding_window", sliding_config("sf", use_sliding_window=False)),
    Case("head_dim_of_qwen3", draft_config(head_dim=None, **TWO_TAPS)),
    Case("dflash2_kernel_2", dflash2(draft_config())),
    Case("dflash2_kernel_4_rewind", dflash2(draft_config(num_key_value_heads=1), kernel=4, group=4), REWIND),
    Case("dflash2_kernel_above_block", dflash2(draft_config(block_size=4, **TWO_TAPS), kernel=5)),
    Case("dflash2_short_blocks", dflash2(draft_config(block_size=10), kernel=3), SHORT_BLOCKS),
    Case("dflash2_kernel_1_one_group", dflash2(draft_config(block_size=2, **ONE_TAP), kernel=1, group=32)),
    Case("dflash2_groups_of_1_block_16", dflash2(draft_config(block_size=16, **TWO_TAPS), group=1), LONG),
    Case("dflash2_logit_facts", dflash2(draft_config(**LOGIT_FACTS), kernel=4, group=16), REWIND),
    Case("dflash2_all_candidates", dflash2(draft_config(**FIVE_TAPS), rank=24, top_k=64)),
    Case("dflash2_one_candidate", dflash2(draft_config(**TWO_TAPS), top_k=1)),
    Case("dflash2_sliding", dflash2(sliding_config("ss", is_causal=False)), REWIND_IN_WINDOW),
    Case("dflash2_sliding_long", dflash2(sliding_config("sss", is_causal=False, **LOGIT_FACTS), kernel=4), LONG),
]  # fmt: skip


def random_case(seed: int) -> Case:
    """A fresh case: every fact drawn from those that the reference knows."""
    random = np.random.RandomState(seed)
    pick = lambda *choices: choices[random.randint(len(choices))]  # noqa: E731
    kv_heads, layers, window = pick(1, 2, 4), pick(1, 2, 3), pick(5, 16, 40)
    config = draft_config(
        hidden_size=pick(32, 48), num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=pick(8, 16, 20),
        num_attention_heads=kv_heads * pick(1, 2, 4), block_size=int(random.randint(2, 17)),
        attention_bias=pick(True, False), rope_scaling=pick(None, LINEAR, YARN, LLAMA3),
        rope_theta=pick(10000.0, 1e6), target_layer_ids=pick([6], [7, 2], [0, 3, 5, 8, 11]),
        **pick({}, {"is_causal": True}, {"is_causal": False}), **pick({}, LOGIT_FACTS),
    )  # fmt: skip
    slides = pick(True, False)
    if slides:
        config.update(layer_types=[pick(SLIDING, FULL) for _ in range(layers)], use_sliding_window=True)
        config.update(sliding_window=window)
    rewinds = pick(True, False)
    steps: list[Step] = []
    rows = 0
    for _ in range(8):
        new = int(random.randint(1, min(30, window) if slides and rewinds else 60))
        steps.append(pick(Round, Round, Extend)(new))
        rows += new
        if rewinds and pick(True, False):
            rows = int(random.randint(max(0, rows - 20), rows + 1))
            steps.append(Crop(rows))
    offset = pick(0, 0, 200)
    if pick(True, False):
        kernel = min(pick(1, 2, 4), config["block_size"])  # far longer ones than the block the reference can't run
        config = dflash2(config, kernel, pick(1, 4, 16), pick(4, 8), pick(1, 8, 16, 64))
    return Case(f"random_{seed}", config, (*steps, Round(1)), offset=offset)


def draft_weights(case: Case) -> dict[str, np.ndarray]:
    """The draft's tensors under their checkpoint names: float32, large enough that attention is no plain mean."""
    config, random = case.config, case.random("weights")
    hidden, inter, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config["head_dim"] or 128
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        weights[f"{name}.weight"] = random.standard_normal((rows, columns)) * (1.2 / columns**0.5)
        if bias:
            weights[f"{name}.bias"] = random.standard_normal(rows) * 0.5

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = random.uniform(0.5, 1.8, size)

    linear("fc", hidden, hidden * len(config["dflash_config"]["target_layer_ids"]))
    norm("hidden_norm", hidden)
    norm("norm", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        norm(f"{layer}.self_attn.q_norm", head_dim)
        norm(f"{layer}.self_attn.k_norm", head_dim)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            linear(f"{layer}.self_attn.{name}_proj", size, hidden, config["attention_bias"])
        linear(f"{layer}.self_attn.o_proj", hidden, queries, config["attention_bias"])
        linear(f"{layer}.mlp.gate_proj", inter, hidden)
        linear(f"{layer}.mlp.up_proj", inter, hidden)
        linear(f"{layer}.mlp.down_proj", hidden, inter)
    if case.is_dflash2:
        kernel, group, rank, _ = (config["dflash_config"][name] for name in SELECTOR)
        for i in range(config["num_hidden_layers"]):
            for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                weights[f"{conv}.base_kernel"] = random.standard_normal((2, kernel, hidden)) * 0.6
                linear(f"{conv}.kernel_projection", 2 * kernel * (hidden // group), hidden)
                weights[f"{conv}.kernel_projection.weight"] *= 0.5
        linear("candidate_selector.hidden_projection", rank, hidden)
        for codebook in ("predecessor", "successor"):
            table = random.standard_normal((config["vocab_size"], rank))
            weights[f"candidate_selector.{codebook}_codebook"] = table
    return {name: array.astype(np.float32) for name, array in weights.items()}


def target_tables(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """A target's embedding and head, each `[V, H]` float32."""
    random, shape = case.random("target"), (case.config["vocab_size"], case.config["hidden_size"])
    embedding = random.standard_normal(shape)
    head = random.standard_normal(shape) * (1.5 / shape[1] ** 0.5)
    return embedding.astype(np.float32), head.astype(np.float32)


def inputs(case: Case) -> Iterator[tuple[Step, np.ndarray, np.ndarray]]:
    """Each step with its taps `[1, rows, taps * H]` and block ids `[1, L]`; empty where it has none.

    Rows fed again after a crop differ from those cropped away, so a stale row shows.
    """
    config, random = case.config, case.random("inputs")
    width = config["hidden_size"] * len(config["dflash_config"]["target_layer_ids"])
    for step in case.steps:
        rows = 0 if isinstance(step, Crop) else step.rows
        taps = random.standard_normal((1, rows, width)).astype(np.float32)
        ids = np.zeros((1, 0), np.int64)
        if isinstance(step, Round):
            ids = np.full((1, step.block or config["block_size"]), config["dflash_config"]["mask_token_id"])
            ids[0, 0] = random.randint(config["vocab_size"])
        yield step, taps, ids
