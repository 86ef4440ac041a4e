"""Cases C6, C7 (tap lists) and C8: every spelling of a draft's config, and what is wrong with a bad one."""

from __future__ import annotations

import contextlib
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import draft_config, make_draft, save_draft

from dflash_mlx import DraftError
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.checkpoint.readers import read_headers
from dflash_mlx.checkpoint.reading import HEAD_DIMS
from dflash_mlx.draft import DFlashDraftModel, build_target_layer_ids, extract_context_feature
from dflash_mlx.pairs.fit import TargetFacts, check_fit

NESTED = {"target_layer_ids": [0, 2], "mask_token_id": 255}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def spelled(**changes):
    return draft_config(**changes)


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}


def dflash2(**changes):
    nested = {name: value for name, value in {**NESTED, **SELECTOR, **changes}.items() if value is not None}
    return draft_config(architectures=["DFlash2DraftModel"], dflash_config=nested)


# One weight file, many spellings: each must give the same block logits as the first.
SPELLINGS = {
    "z-lab": spelled(),
    "flat": spelled(dflash_config=None, **NESTED),
    "rope under rope_parameters": spelled(
        rope_theta=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}
    ),
    "rope_parameters without rope_theta": spelled(rope_parameters={"rope_type": "default"}),
    "rope in both, equal": spelled(rope_parameters={"rope_theta": 10000.0}),
    "block_size nested": spelled(block_size=None, dflash_config={**NESTED, "block_size": 8}),
    "block_size in both, equal": spelled(dflash_config={**NESTED, "block_size": 8}),
    "rope_scaling null": {**spelled(), "rope_scaling": None},
    "rope_scaling type default": spelled(rope_scaling={"type": "default"}),
    "head_dim derived": spelled(head_dim=None, model_type="qwen3_moe"),
    "layer_types explicit": spelled(layer_types=["full_attention"] * 2),
    "soft-cap off": spelled(final_logit_softcapping=0),
    "torch_dtype": spelled(dtype=None, torch_dtype="float32"),
    "dtype as torch prints it": spelled(dtype="torch.float32"),
    "no num_target_layers": spelled(num_target_layers=None),
}
YARNS = {
    "over max_position_embeddings": spelled(
        max_position_embeddings=YARN["original_max_position_embeddings"],
        rope_scaling={**YARN, "original_max_position_embeddings": None},
    ),
    "original length at the top level": spelled(
        rope_scaling={**YARN, "original_max_position_embeddings": 7},
        original_max_position_embeddings=YARN["original_max_position_embeddings"],
    ),
    "rope_scaling": spelled(rope_scaling=YARN),
    "rope_scaling with type": spelled(rope_scaling={**YARN, "rope_type": None, "type": "yarn"}),
    "rope_parameters": spelled(rope_theta=None, rope_parameters={**YARN, "rope_theta": 10000.0}),
    "mscale alone is ignored, as in transformers": spelled(rope_scaling={**YARN, "mscale": 0.7}),
    "mscale_all_dim alone likewise": spelled(rope_scaling={**YARN, "mscale_all_dim": 1.0}),
    "attention_factor before mscale": spelled(
        rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.138629}
    ),
    "attention_factor as derived": spelled(rope_scaling={**YARN, "attention_factor": 1.138629}),
}


def block_logits(config) -> mx.array:
    draft = DFlashDraftModel(parse_config(config))
    draft.load_weights(tree_flatten(make_draft().parameters()))
    mx.random.seed(5)
    context = draft.context_feature(mx.random.normal((1, 20, 128)))
    table = mx.random.normal((256, 64))
    ids = mx.array([[4] + [255] * 7])
    return draft.logits(ids, context, draft.make_cache(), embed=lambda i: table[i], head=lambda h: h @ table.T)


@pytest.mark.parametrize("name", SPELLINGS)
def test_valid_spellings_give_identical_block_logits(name):
    assert mx.array_equal(block_logits(SPELLINGS[name]), block_logits(SPELLINGS["z-lab"]))


@pytest.mark.parametrize("name", YARNS)
def test_yarn_spellings_agree_and_differ_from_the_default_rope(name):
    logits = block_logits(YARNS[name])
    assert mx.array_equal(logits, block_logits(YARNS["rope_scaling"]))
    assert not mx.allclose(logits, block_logits(SPELLINGS["z-lab"]), atol=1e-3)


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("more", [{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_yarn_over_an_exact_range_is_transformers(theta, partial, more):
    """`truncate: false`: the dimensions between which it interpolates are not rounded to whole ones."""
    scaling = {**YARN, **more, "truncate": False}
    config = parse_config(spelled(rope_theta=theta, partial_rotary_factor=partial, rope_scaling=scaling))
    rope, size = config.rope.build(64, None), int(64 * partial)
    low, high = (  # transformers' find_correction_dim
        size * np.log(YARN["original_max_position_embeddings"] / (turns * 2 * np.pi)) / (2 * np.log(theta))
        for turns in (more.get("beta_fast", 32), more.get("beta_slow", 1))
    )
    ramp = np.clip((np.arange(size // 2) - max(low, 0)) / (min(high, size - 1) - max(low, 0)), 0, 1)
    waves = theta ** (np.arange(0, size, 2) / size)
    frequencies = ramp / (YARN["factor"] * waves) + (1 - ramp) / waves
    assert 1 / np.array(rope._freqs) == pytest.approx(frequencies, rel=1e-5)
    rounded = parse_config(spelled(rope_theta=theta, rope_scaling={**YARN, **more})).rope.build(64, None)
    assert rope.mscale == rounded.mscale
    assert parse_config(config.to_dict()).rope == config.rope, "a converted draft keeps it"


def test_yarn_truncated_is_the_usual():
    assert parse_config(spelled(rope_scaling={**YARN, "truncate": True})) == parse_config(YARNS["rope_scaling"])


@pytest.mark.parametrize("stated", [{}, {"sliding_window": None}, {"sliding_window": 6}])
@pytest.mark.parametrize("use", [{}, {"use_sliding_window": True}, {"use_sliding_window": False}])
@pytest.mark.parametrize("first", [{}, {"max_window_layers": 0}, {"max_window_layers": 1}])
def test_the_layers_that_slide_are_transformers(stated, use, first):
    from transformers import Qwen3Config

    config = {**spelled(), **stated, **use, **first}
    own, theirs = parse_config(config), Qwen3Config(**config)
    window = theirs.sliding_window if "sliding_attention" in theirs.layer_types else None
    assert (list(own.layer_types), own.sliding_window) == (theirs.layer_types, window)


def test_an_attention_factor_of_its_own_is_kept():
    """Only one that is the derived one, rounded, says nothing."""
    own = parse_config(spelled(rope_scaling={**YARN, "attention_factor": 1.139}))
    assert own.rope_scaling["attention_factor"] == 1.139
    assert "attention_factor" not in parse_config(YARNS["attention_factor as derived"]).rope_scaling


# Spellings of one DFlash 2 draft.
SECOND = {
    "nested": dflash2(),
    "flat": draft_config(architectures=["DFlash2DraftModel"], **SELECTOR),
    "ModelOpt": dflash2(projector_type="dflash2"),
    "by its fields": dflash2() | {"architectures": ["DFlashDraftModel"]},
}


@pytest.mark.parametrize("name", SECOND)
def test_spellings_of_dflash_2_agree(name):
    config = parse_config(SECOND[name])
    assert config == parse_config(SECOND["nested"])
    assert (config.kind, config.to_dict()["architectures"]) == ("dflash2", ["DFlash2DraftModel"])
    assert SELECTOR.items() <= config.to_dict()["dflash_config"].items()


def test_default_head_dims_are_those_of_transformers():
    from transformers import AutoConfig

    assert {kind: AutoConfig.for_model(kind).get_text_config().head_dim for kind in HEAD_DIMS} == HEAD_DIMS


def test_fields_of_dflash_2_that_are_0_say_nothing():
    assert parse_config(spelled(conv_kernel_size=0, selector_top_k=0)).kind == "dflash"


@pytest.mark.parametrize("name", [*SPELLINGS, *YARNS, *SECOND])
def test_to_dict_round_trips(name):
    config = parse_config({**SPELLINGS, **YARNS, **SECOND}[name])
    assert parse_config(json.loads(json.dumps(config.to_dict()))) == config


SLIDING = ["sliding_attention", "full_attention"]
# what is wrong, and what the error must name
FAULTS = {
    "block_size in both, different": (spelled(dflash_config={**NESTED, "block_size": 16}), "block_size"),
    "taps in both, different": (spelled(target_layer_ids=[0, 1]), "target_layer_ids"),
    "rope_theta in both, different": (spelled(rope_parameters={"rope_theta": 1e6}), "rope_theta"),
    "rope types disagree": (spelled(rope_scaling={**YARN, "type": "linear"}), "rope_scaling"),
    "rope_scaling against rope_parameters": (
        spelled(rope_scaling=YARN, rope_parameters={**YARN, "factor": 8.0}),
        "rope_scaling",
    ),
    "no rope_theta": (spelled(rope_theta=None), "rope_theta"),
    "rope_theta of text": (spelled(rope_theta="big"), "rope_theta"),
    "no block_size": (spelled(block_size=None), "block_size"),
    "block_size 1": (spelled(block_size=1), "block_size"),
    "block_size of text": (spelled(block_size="8"), "block_size"),
    "unknown rope type": (spelled(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "rope_scaling.rope_type"),
    "dynamic rope without a length": (
        spelled(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=None),
        "max_position_embeddings",
    ),
    "dynamic rope of two elements": (
        spelled(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, partial_rotary_factor=0.125),
        "head_dim: 16: rope_type 'dynamic'",
    ),
    "yarn without factor": (spelled(rope_scaling={"rope_type": "yarn"}), "rope_scaling.factor"),
    "yarn without original length": (
        spelled(rope_scaling={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=None),
        "original_max_position_embeddings",
    ),
    "yarn with truncate of text": (
        spelled(rope_scaling={**YARN, "truncate": "no"}),
        "rope_scaling.truncate: 'no' is not true or false",
    ),
    "yarn with an attention factor alone": (
        spelled(rope_scaling={**YARN, "factor": 1.0, "attention_factor": 2.0}),
        "attention_factor",
    ),
    "no taps key": (spelled(dflash_config={"mask_token_id": 255}), "target_layer_ids"),
    "empty taps": (spelled(dflash_config={**NESTED, "target_layer_ids": []}), "target_layer_ids"),
    "tap beyond the target": (spelled(dflash_config={**NESTED, "target_layer_ids": [0, 4]}), "num_target_layers 4"),
    "negative tap": (spelled(dflash_config={**NESTED, "target_layer_ids": [-1]}), "target_layer_ids"),
    "taps_before_norm of text": (
        spelled(dflash_config={**NESTED, "target_layer_ids": [3], "taps_before_norm": "no"}),
        "taps_before_norm",
    ),
    "tap twice": (spelled(dflash_config={**NESTED, "target_layer_ids": [2, 2]}), "target_layer_ids"),
    "taps of text": (spelled(dflash_config={**NESTED, "target_layer_ids": "0,2"}), "target_layer_ids"),
    "no mask": (spelled(dflash_config={"target_layer_ids": [0, 2]}), "mask_token_id"),
    "mask = vocabulary": (spelled(dflash_config={**NESTED, "mask_token_id": 256}), "mask_token_id"),
    "mask negative": (spelled(dflash_config={**NESTED, "mask_token_id": -1}), "mask_token_id"),
    "no hidden_size": (spelled(hidden_size=None), "hidden_size"),
    "hidden_size 0": (spelled(hidden_size=0), "hidden_size"),
    "no eps": (spelled(rms_norm_eps=None), "rms_norm_eps"),
    "heads no multiple": (spelled(num_key_value_heads=3), "num_key_value_heads"),
    "head_dim not derivable": (
        spelled(head_dim=None, model_type="llama", num_attention_heads=6, num_key_value_heads=2),
        "head_dim",
    ),
    "layer_types too short": (spelled(layer_types=["full_attention"]), "layer_types"),
    "layer_types unknown": (spelled(layer_types=["full_attention", "linear_attention"]), "layer_types"),
    "sliding without window": (spelled(layer_types=SLIDING), "sliding_window"),
    "is_causal of text": (spelled(is_causal="yes"), "is_causal"),
    "another activation": (spelled(hidden_act="gelu"), "hidden_act"),
    "partial rotary of the rope": (
        spelled(rope_scaling={"rope_type": "default", "partial_rotary_factor": 1.5}),
        "rope_scaling.partial_rotary_factor",
    ),
    "partial rotary": (spelled(partial_rotary_factor=0.1), "partial_rotary_factor"),
    "dtype of no weights": (spelled(dtype="float8"), "dtype: 'float8' is not one of float32, float16, bfloat16"),
    "escapes as dtype": (spelled(dtype=None, torch_dtype="x\n\x1b[31m"), r"torch_dtype: 'x\n\x1b[31m' is not"),
    "DFlash 2 by name only": (spelled(architectures=["DFlash2DraftModel"]), "conv_kernel_size"),
    "DFlash 2 by one field": (spelled(dflash_config={**NESTED, "selector_rank": 8}), "conv_kernel_size"),
    **{f"DFlash 2 without {name}": (dflash2(**{name: None}), name) for name in SELECTOR},
    "group that does not divide": (dflash2(conv_group_size=24), "conv_group_size: 24 does not divide hidden_size 64"),
    "group wider than the hidden state": (dflash2(conv_group_size=128), "conv_group_size"),
    "more candidates than tokens": (dflash2(selector_top_k=257), "selector_top_k"),
    "endless candidates": (dflash2(selector_top_k=257) | {"vocab_size": 151936}, "selector_top_k: 257 is out of range"),
    "no candidates": (dflash2(selector_top_k=0), "selector_top_k"),
    "rank of text": (dflash2(selector_rank="8"), "selector_rank"),
    "endless kernel": (dflash2(conv_kernel_size=10**6), "conv_kernel_size"),
    "kernel in both, different": (dflash2() | {"conv_kernel_size": 4}, "conv_kernel_size"),
    "speculators": (spelled(transformer_layer_config={}), "transformer_layer_config"),
    "a target": (spelled(architectures=["Qwen3ForCausalLM"], dflash_config=None), "Qwen3ForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_with_field_and_file(name):
    config, named = FAULTS[name]
    with pytest.raises(DraftError) as caught:
        parse_config(config, "somewhere/config.json")
    message = str(caught.value)
    assert named in message
    assert "somewhere/config.json" in message
    assert "\n" not in message


# taps, what else is stated -> layers, and whether the last one is tapped before the norm
TAPS = [
    ({"target_layer_ids": [3, 0]}, {}, (3, 0), False),
    ({"layer_ids": [4, 1]}, {}, (3, 0), True),
    ({"layer_ids": [4, 1]}, {"num_target_layers": None}, (3, 0), True),
    ({"layer_ids": [3, 1]}, {}, (2, 0), False),  # the last layer is not tapped
    ({"target_layer_ids": [3, 0], "layer_ids": [4, 1]}, {}, (3, 0), False),
    ({"target_layer_ids": [3, 0], "taps_before_norm": True}, {}, (3, 0), True),
]


@pytest.mark.parametrize(("taps", "more", "layers", "before_norm"), TAPS)
def test_taps_keep_their_order_and_say_on_which_side_of_the_norm_the_last_is(taps, more, layers, before_norm):
    config = parse_config(spelled(**more, dflash_config={"mask_token_id": 255, **taps}))
    assert (config.target_layer_ids, config.taps_before_norm) == (layers, before_norm)
    assert parse_config(json.loads(json.dumps(config.to_dict()))) == config


# layer_types, use_swa, is_causal, nested causal -> (window, causal) by layer
ATTENTION = [
    ({}, [(None, False), (None, False)]),
    ({"layer_types": SLIDING, "sliding_window": 16}, [(16, True), (None, False)]),
    ({"layer_types": SLIDING, "sliding_window": 16, "is_causal": False}, [(16, False), (None, False)]),
    ({"is_causal": True}, [(None, True), (None, True)]),
    ({"dflash_config": {**NESTED, "use_swa": True, "swa_window_size": 32}}, [(32, False), (32, False)]),
    ({"dflash_config": {**NESTED, "use_swa": True, "causal": True}, "sliding_window": 8}, [(8, True), (8, True)]),
    ({"dflash_config": {**NESTED, "causal": True}, "is_causal": False}, [(None, False), (None, False)]),
    ({"layer_types": SLIDING, "sliding_window": 16, "swa_window_size": 4}, [(4, True), (None, False)]),
]


@pytest.mark.parametrize(("changes", "expected"), ATTENTION)
def test_attention_shape_follows_the_published_precedence(changes, expected):
    config = parse_config(draft_config(**changes))
    assert [(config.window(i), config.causal(i)) for i in range(2)] == expected


def test_build_target_layer_ids_spreads_evenly():
    assert build_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert build_target_layer_ids(24, 5) == [1, 6, 11, 16, 21]
    assert build_target_layer_ids(32, 1) == [16]


def test_extract_context_feature_skips_the_embedding_and_keeps_the_order():
    states = [mx.full((1, 2, 3), float(i)) for i in range(5)]
    assert extract_context_feature(states, [2, 0])[0, 0].tolist() == [3.0] * 3 + [1.0] * 3


def test_a_draft_that_taps_one_layer_beyond_the_target_does_not_fit():
    for taps, fits in (([0, 3], True), ([0, 4], False)):
        draft = parse_config(spelled(num_target_layers=None, dflash_config={**NESTED, "target_layer_ids": taps}))
        with contextlib.nullcontext() if fits else pytest.raises(DraftError, match="taps layer 4 of 4 layers"):
            check_fit(draft, TargetFacts("t", 64, 256, 4), "d")


def test_a_file_that_lacks_one_byte_is_cut_short(tmp_path):
    file = save_draft(tmp_path / "draft", make_draft()) / "model.safetensors"
    read_headers(file.parent)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DraftError, match="cut short"):
        read_headers(file.parent)
