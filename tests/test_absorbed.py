"""Latent attention of a block: the absorbed form is the wide one in other words, and only a verify takes it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import matrix
import mlx.core as mx
import mlx_lm.models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import deepseek_v3
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache
from random_weights import randomise
from scripted import ScriptedDrafter, plain_tokens

from dflash_mlx import generate_step
from dflash_mlx.target import Target, absorbed

LATENT = [
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25",
    "kimi_k3", "kimi_linear", "longcat_flash", "longcat_flash_ngram", "mistral4",
]  # fmt: skip
# One row gathers the chosen keys where several rows mask the others, or a scan replaces a step.
OTHERWISE_ROUNDED = ["bailing_hybrid", "deepseek_v32", "glm_moe_dsa"]
BLOCK = mx.array([[(5 * i + 1) % 240 for i in range(8)]])


class Choices:
    """Counts how often the absorbed form was asked about; answers as told, or as the count says."""

    def __init__(self, monkeypatch, answer=None):
        self.taken, count = [], absorbed.absorbed_is_cheaper
        monkeypatch.setattr(
            absorbed,
            "absorbed_is_cheaper",
            lambda *sizes: self.taken.append(count(*sizes) if answer is None else answer) or self.taken[-1],
        )


def verified(target: Target, context: int) -> mx.array:
    """Logits of a block behind a prompt, as a round computes them."""
    caches = target.make_cache()
    target.forward(mx.array([matrix.prompt_of(context)]), caches)
    logits, _ = target.forward(BLOCK, caches, watch=[])
    return logits


def wide(model: nn.Module, context: int) -> mx.array:
    caches = Target(model).make_cache()
    model(mx.array([matrix.prompt_of(context)]), cache=caches)
    return model(BLOCK, cache=caches)


def one_by_one(model: nn.Module, context: int) -> mx.array:
    caches = Target(model).make_cache()
    model(mx.array([matrix.prompt_of(context)]), cache=caches)
    return mx.concatenate([model(BLOCK[:, i : i + 1], cache=caches) for i in range(BLOCK.shape[1])], axis=1)


def difference(a: mx.array, b: mx.array) -> float:
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def latent_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module, _ in absorbed.absorbing(model.layers)]


def test_every_family_with_latent_attention_is_listed():
    """A module of mlx-lm that gains it has to be tested here."""
    folder = Path(mlx_lm.models.__path__[0])
    latent = {name for name in matrix.modules() if "MultiLinear(" in (folder / f"{name}.py").read_text()}
    assert latent - {"mla"} <= {*LATENT}


@pytest.mark.parametrize("name", LATENT)
def test_a_block_has_the_logits_of_the_wide_path(monkeypatch, name):
    model = matrix.build(name)
    for context in (5, 60, 300):  # at 200 a sparse index of deepseek_v32 has a near-tie, see docs/experiments.md
        choices = Choices(monkeypatch, answer=True)
        logits = verified(Target(model), context)
        assert choices.taken == [True] * len(latent_modules(model)), "each latent attention, once"
        assert difference(logits, wide(model, context)) < 1e-5
        if name not in OTHERWISE_ROUNDED:
            assert mx.array_equal(logits, one_by_one(model, context)), "one row and a block share a formula"
        monkeypatch.undo()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_latent_projections(monkeypatch, bits):
    config = copy.deepcopy(matrix.CONFIGS["deepseek_v3"]["config"])
    config.update(qk_nope_head_dim=32, v_head_dim=32, num_hidden_layers=2, first_k_dense_replace=2)
    model = randomise(deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(config)), 0)
    nn.quantize(model, group_size=32, bits=bits)
    assert type(model.layers[0].self_attn.embed_q).__name__ == "QuantizedMultiLinear"
    choices = Choices(monkeypatch, answer=True)
    assert difference(verified(Target(model), 60), wide(model, 60)) < 1e-5
    assert choices.taken == [True, True]


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear", "longcat_flash", "mistral4", "glm_moe_dsa"])
@pytest.mark.parametrize("length", [1, 30, 90])
def test_tokens_of_every_acceptance_pattern(monkeypatch, name, length):
    model, prompt = matrix.build(name), matrix.prompt_of(length)
    truth = plain_tokens(model, prompt, 30)
    choices = Choices(monkeypatch)
    for block in (2, 8):
        draft = ScriptedDrafter([*prompt, *truth], lambda i, block=block: i % block, block, 250)
        assert [token for token, *_ in generate_step(prompt, model, draft, max_tokens=30)] == truth
    assert any(choices.taken), "and the absorbed form had its part in it"


def test_only_a_block_takes_it(monkeypatch):
    model, prompt = matrix.build("deepseek_v3"), matrix.prompt_of(40)
    truth = plain_tokens(model, prompt, 12)
    choices = Choices(monkeypatch)
    assert [token for token, *_ in generate_step(prompt, model, max_tokens=12, prefill_step_size=7)] == truth
    assert not choices.taken, "neither the chunks of a prompt nor single steps"
    draft = ScriptedDrafter([*prompt, *truth], lambda i: 7)
    assert [t for t, *_ in generate_step(prompt, model, draft, max_tokens=12, prefill_step_size=7)] == truth
    assert len(choices.taken) == 2 * 4, "two blocks, four layers"


@pytest.mark.parametrize("make", [lambda: RotatingKVCache(max_size=32), lambda: BatchKVCache([0])])
def test_a_cache_that_keeps_its_rows_otherwise_is_read_by_the_model_alone(monkeypatch, make):
    model, prompt = matrix.build("deepseek_v3"), mx.array([matrix.prompt_of(60)])
    outputs, choices = [], Choices(monkeypatch, answer=True)
    for forward in (lambda *call: model(*call), lambda *call: Target(model).forward(*call, watch=[])[0]):
        caches = [make() for _ in model.layers]
        model(prompt, caches)
        outputs.append(forward(BLOCK, caches))
    assert difference(*outputs) < 1e-5
    assert not choices.taken


def test_the_model_is_the_same_afterwards_and_meanwhile():
    model, prompt = matrix.build("deepseek_v3"), matrix.prompt_of(20)
    other = matrix.build("deepseek_v3")
    attention = latent_modules(model)
    types, before, truth = [type(m) for m in attention], wide(model, 60), plain_tokens(model, prompt, 20)
    drafts = [ScriptedDrafter([*prompt, *truth], lambda i, n=n: (i + n) % 8) for n in (1, 4)]
    runs = [generate_step(prompt, model, draft, max_tokens=20) for draft in drafts]
    for i, steps in enumerate(zip(*runs, strict=True)):
        assert [token for token, *_ in steps] == [truth[i]] * 2
        assert [type(m) for m in attention] == types
        if i == 9:
            assert mx.array_equal(wide(model, 60), before)
    assert mx.array_equal(wide(model, 60), before)
    assert mx.array_equal(wide(other, 60), before)
    assert sys.modules["mlx_lm.models.deepseek_v3"].scaled_dot_product_attention is scaled_dot_product_attention


def multiply_adds(rows: int, context: int, rank: int, head: int) -> tuple[int, int]:
    """Of the absorbed and the wide form, product by product."""
    queries_and_outputs, attention_to_latents = rows * rank * head, 2 * rows * context * rank
    keys_and_values, attention = context * rank * head, rows * context * head
    return queries_and_outputs + attention_to_latents, keys_and_values + attention


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([32, 128, 512]), st.sampled_from([32, 256, 448]))
def test_the_cheaper_form_is_chosen(rows, context, rank, head):
    absorbed_cost, wide_cost = multiply_adds(rows, context, rank, head)
    assert absorbed.absorbed_is_cheaper(rows, context, rank, head) == (absorbed_cost < wide_cost)


def test_the_crossover_of_deepseek_v3():
    for context, last in ((100, 63), (2048, 157)):
        assert absorbed.absorbed_is_cheaper(last, context, 512, 256)
        assert not absorbed.absorbed_is_cheaper(last + 1, context, 512, 256)
    assert not absorbed.absorbed_is_cheaper(8, 8, 512, 256), "nothing is cached yet"
