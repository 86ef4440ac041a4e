"""Cases C7 and C8 on the target's side: taps, embedding, head, and a target that stays as it was."""

from __future__ import annotations

import gc
import threading
import weakref

import matrix
import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_draft, make_hybrid, make_target

from dflash_mlx import TargetError, generate_step
from dflash_mlx.pairs.fit import check_family
from dflash_mlx.target import Target
from dflash_mlx.target import target as target_module
from dflash_mlx.target.intercept import intercept
from dflash_mlx.target.structure import named_modules

IDS = mx.array([[5, 9, 200, 31]])


def outputs_by_hand(model, ids):
    """Every layer's output, layer by layer."""
    from mlx_lm.models.base import create_attention_mask

    h = model.model.embed_tokens(ids)
    outputs = []
    for layer in model.layers:
        h = layer(h, create_attention_mask(h, None), None)
        outputs.append(h)
    return outputs


@pytest.mark.parametrize("family", ["qwen3", "qwen3-untied", "llama", "qwen2", "qwen3_moe"])
def test_a_tap_is_the_output_of_its_layer_and_keeps_the_lists_order(family):
    model = make_target(family, layers=6)
    target, by_hand = Target(model), outputs_by_hand(model, IDS)
    for before_norm in (True, False):
        target.taps_before_norm = before_norm
        expected = by_hand if before_norm else [*by_hand[:5], model.model.norm(by_hand[5])]
        target.check([0, 2, 5])
        for taps in ([0, 2, 5], [5, 0], [3]):
            _, captured = target.forward(IDS, target.make_cache(), taps)
            assert mx.allclose(captured, mx.concatenate([expected[i] for i in taps], -1), atol=1e-5)
    _, moved = target.forward(IDS, target.make_cache(), [1])
    assert not mx.allclose(moved, by_hand[0], atol=1e-2), "an id off by one is another tensor"


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("before_norm", [False, True])
def test_a_drafter_says_on_which_side_of_the_norm_its_last_tap_is(before_norm, lookup):
    seen = []

    class Taps(ScriptedDrafter):
        target_layer_ids = (3,)
        taps_before_norm = before_norm
        context = staticmethod(lambda taps: seen.append(taps) or taps)
        extend = staticmethod(lambda context, cache: None)

    model, prompt = make_target(), [5, 9, 200, 31]
    drafter = Taps([*prompt, *plain_tokens(model, prompt, 3)], lambda i: 8)
    list(generate_step(mx.array(prompt), model, drafter, max_tokens=3, lookup=lookup))
    plain = outputs_by_hand(model, IDS[:, :-1])[3]
    expected = plain if before_norm else model.model.norm(plain)
    assert mx.allclose(seen[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "norm"), [("gpt_neox", "final_layer_norm"), ("phixtral", "ln"), ("qwen3_5", "norm")]
)
def test_the_last_tap_is_normed_wherever_the_norm_is(family, norm):
    model = matrix.build(family)
    target = Target(model)
    last = [len(target.layers) - 1]
    target.check(last)
    _, normed = target.forward(IDS, target.make_cache(), last)
    target.taps_before_norm = True
    _, plain = target.forward(IDS, target.make_cache(), last)
    module = next(module for name, module in model.named_modules() if name.rpartition(".")[2] == norm)
    assert mx.allclose(normed, module(plain), atol=1e-5)
    assert not mx.allclose(normed, plain, atol=1e-1)


@pytest.mark.parametrize("taps", [[6], [-1]])
def test_taps_outside_the_target_are_refused(taps):
    with pytest.raises(TargetError, match="6 layers"):
        Target(make_target(layers=6)).check(taps)


def test_a_layer_whose_output_is_changed_behind_it_is_refused():
    model = make_target()
    inner = type(model.model)

    class Meddling(inner):
        def __call__(self, inputs, cache=None, input_embeddings=None):
            from mlx_lm.models.base import create_attention_mask

            h = self.embed_tokens(inputs)
            cache = cache or [None] * len(self.layers)
            for layer, c in zip(self.layers, cache, strict=True):
                h = layer(h, create_attention_mask(h, c), c) * 1.5
            return self.norm(h)

    model.model.__class__ = Meddling
    with pytest.raises(TargetError, match="layer 0"):
        Target(model).check([0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_target_that_computes_a_row_differently_when_another_follows_is_refused(dtype):
    model = make_target(dtype=dtype)
    own = type(model)

    class Wider(own):
        def __call__(self, inputs, cache=None, input_embeddings=None):
            logits = super().__call__(inputs, cache, input_embeddings)
            return logits + 0.3 * (inputs.shape[1] - 1) * logits

    model.__class__ = Wider
    with pytest.raises(TargetError, match="differently when another follows"):
        Target(model).check()


@pytest.mark.parametrize("family", ["qwen3", "qwen3-untied", "llama"])
def test_embedding_and_head_are_the_models_own(family):
    model = make_target(family)
    target = Target(model)
    target.check([0])
    assert mx.array_equal(target.embed(IDS), model.model.embed_tokens(IDS))
    assert mx.array_equal(target.head(model.model(IDS)), model(IDS))
    assert (target.hidden_size, target.vocab_size) == (64, 256)


@pytest.mark.parametrize("name", ["a_table", "z_table"])
def test_the_embedding_is_the_table_that_is_looked_up_by_token(name):
    """Another may hold positions, before or behind it among the modules."""
    model = make_target()
    inner = type(model.model)

    class Positioned(inner):
        def __call__(self, inputs, cache=None, input_embeddings=None):
            self[name](mx.arange(inputs.shape[1]))
            return super().__call__(inputs, cache, input_embeddings)

    model.model.__class__ = Positioned
    model.model[name] = nn.Embedding(8, 64)
    assert Target(model).embed_tokens is model.model.embed_tokens


def test_embedding_scale_is_found():
    from mlx_lm.models import gemma

    args = gemma.ModelArgs(
        model_type="gemma", hidden_size=64, num_hidden_layers=3, intermediate_size=96, num_attention_heads=4,
        head_dim=16, rms_norm_eps=1e-6, vocab_size=256, num_key_value_heads=2,
    )  # fmt: skip
    model = gemma.Model(args)
    target = Target(model)
    target.check([0])
    assert target.embed_scale == pytest.approx(8.0, rel=1e-5)
    again = Target(model)
    again.check([0])
    assert again.embed_scale == target.embed_scale, "also when the taps were checked before"


def test_the_target_is_untouched_by_a_draft():
    model, draft, prompt = make_target(), make_draft(), [3, 1, 4, 1, 5]
    names = [name for name, _ in tree_flatten(model.parameters())]
    classes = {name: type(module) for name, module in model.named_modules()}
    logits, steps = model(IDS), generate_step(prompt, model, draft, max_tokens=30)
    for _ in range(7):
        next(steps)
    for _ in range(2):  # while a generator is alive, and after it is closed
        assert [name for name, _ in tree_flatten(model.parameters())] == names
        assert {name: type(module) for name, module in model.named_modules()} == classes
        assert mx.array_equal(model(IDS), logits)
        steps.close()


def test_the_end_of_one_watch_leaves_another_of_the_same_module():
    layer, seen = nn.Linear(2, 2), []

    def watch(name):
        return [(layer, lambda own, x: seen.append(name) or own(x))]

    with intercept(watch("outer")):
        with intercept(watch("inner")):
            layer(mx.zeros(2))
        layer(mx.zeros(2))
    layer(mx.zeros(2))
    assert seen == ["inner", "outer", "outer"]


def test_two_drafts_with_different_taps_share_a_target():
    model, prompt = make_target(), [3, 1, 4, 1, 5]
    drafts = [
        make_draft(seed=1),
        make_draft(seed=2, dflash_config={"target_layer_ids": [3, 1, 0], "mask_token_id": 255}),
    ]
    truth = plain_tokens(model, prompt, 30)
    alone = [list(generate_step(prompt, model, draft, max_tokens=30)) for draft in drafts]
    both = list(zip(*(generate_step(prompt, model, draft, max_tokens=30) for draft in drafts), strict=True))
    for i in range(2):
        assert [token for token, *_ in alone[i]] == truth
        assert [pair[i][0] for pair in both] == truth
        assert [pair[i][2] for pair in both] == [step[2] for step in alone[i]], "each draft saw its own taps"


def test_threads_that_share_a_target_do_not_see_each_others_taps():
    model = make_target(layers=6)
    target = Target(model)
    by_hand = outputs_by_hand(model, IDS)
    by_hand[5] = model.model.norm(by_hand[5])
    wrong = []

    def tap(layer):
        for _ in range(50):
            with mx.stream(mx.new_stream(mx.cpu)):
                _, out = target.forward(IDS, target.make_cache(), [layer])
            if not mx.allclose(out, by_hand[layer], atol=1e-5):
                wrong.append(layer)

    mx.eval(by_hand)
    threads = [threading.Thread(target=tap, args=(layer,)) for layer in (0, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert type(model.layers[3]).__call__.__qualname__ == "TransformerBlock.__call__"


@pytest.mark.parametrize("mask", [0, 77, 255])
def test_the_mask_token_is_an_ordinary_token_when_the_target_emits_it(mask):
    """C8: also when it is the end token or id 0; the text is the target's."""
    model, prompt = make_target(), [3, 1, 4, 1, 5]
    truth = plain_tokens(model, prompt, 30)
    config = {"target_layer_ids": [0, 2], "mask_token_id": truth[4] if mask == 77 else mask}
    tokens = [t for t, *_ in generate_step(prompt, model, make_draft(dflash_config=config), max_tokens=30)]
    assert tokens == truth


def test_families_that_can_not_be_rewound_are_refused_by_name():
    model = make_target()

    class Odd:
        offset = 0

    model.make_cache = lambda: [Odd() for _ in model.layers]
    with pytest.raises(TargetError, match=r"qwen3.*Odd"):
        next(generate_step([1, 2], model, make_draft()))


def test_recurrent_state_that_no_layer_is_given_is_refused():
    from mlx_lm.models.cache import ArraysCache, KVCache

    model = make_target()
    model.make_cache = lambda: [*(KVCache() for _ in model.layers), ArraysCache(1)]
    with pytest.raises(TargetError, match=r"qwen3.*recurrent cache 4"):
        Target(model).require_rewindable(model.make_cache())


def drafters(model, prompt, n):
    """Everything that wants no taps, as `draft_model`, and further options."""
    script = [*prompt, *plain_tokens(model, prompt, n)]
    return [("lookup", {}), (None, {"lookup": True}), (ScriptedDrafter(script, lambda i: (3 * i) % 8, vocab=200), {})]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("plamo3", "window mask"),
        ("phi3small", "later tokens"),
        ("kimi_k3", "run again"),
        ("deepseek_v41", "LayerCache"),
        ("longcat_flash_ngram", "recurrent cache"),
    ],
)
def test_a_target_that_blocks_can_not_drive_is_refused_for_drafters_without_taps_too(family, why):
    """plamo3 gave other text with prompt lookup, kimi_k3 broke off in the middle: the check hung on the taps."""
    model = matrix.build(family)
    for draft, options in drafters(model, [1, 2, 3], 2):
        with pytest.raises(TargetError, match=f"{family}: .*{why}"):
            next(generate_step([1, 2, 3], model, draft, **options))
    assert len(list(generate_step([1, 2, 3], model, max_tokens=3))) == 3, "without a draft it runs"


@pytest.mark.parametrize("family", ["gemma3n", "nanbeige", "iquestloopcoder"])
def test_a_target_without_taps_runs_with_drafters_that_want_none(family):
    model, prompt = matrix.build(family), matrix.prompt_of(21)
    truth = plain_tokens(model, prompt, 24)
    for draft, options in drafters(model, prompt, 24):
        assert [token for token, *_ in generate_step(prompt, model, draft, max_tokens=24, **options)] == truth
    with pytest.raises(TargetError, match=f"{family}: layer 0"):
        Target(model).check([0])
    config = matrix.CONFIGS[family]["config"]
    check_family("here", config, taps=False)
    with pytest.raises(TargetError, match="draft-model lookup"):
        check_family("here", config)


def forwards(model, monkeypatch):
    """A list that grows with each forward of the model."""
    calls, own = [], type(model).__call__

    def counted(self, *args, **kwargs):
        calls.append(args[0].shape)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    return calls


@pytest.mark.parametrize("make", [lambda: make_target(layers=24), lambda: make_hybrid("qwen3_5")])
def test_a_call_looks_for_the_targets_parts_once(make, monkeypatch):
    """It cost 12 ms (36 layers) to 21 ms (61) before every first forward."""
    model, draft = make(), make_draft(num_target_layers=None)
    list(generate_step([1, 2], model, draft, max_tokens=2))
    monkeypatch.setattr(nn.Module, "apply_to_modules", None)  # mlx's walk, which maps every array of the model
    calls = forwards(model, monkeypatch)
    assert len(dict(named_modules(model, Target(model).layers))) < 10 + len(model.layers)
    list(generate_step([1, 2], model, draft, max_tokens=0))
    assert calls == [(1, 1)], "nothing is proven again: the prompt alone is fed"


def test_what_was_proven_goes_with_the_part_it_is_about():
    model, draft = make_target(), make_draft()
    list(generate_step([1, 2], model, draft, max_tokens=2))
    layer = model.layers[1]

    class Meddling(nn.Module):
        def __call__(self, x, *args, **kwargs):
            return layer(x, *args, **kwargs)[:, ::-1]

    model.layers[1] = Meddling()
    with pytest.raises(TargetError):
        list(generate_step([1, 2], model, draft, max_tokens=2))
    model.layers[1] = layer
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 50.0, "dropout": 0.0})
    model.update(tree_map(lambda w: w + 0.05, model.trainable_parameters()))
    model.eval()
    truth = plain_tokens(model, [1, 2], 20)
    assert [token for token, *_ in generate_step([1, 2], model, draft, max_tokens=20)] == truth
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, module: isinstance(module, nn.Embedding))
    target = Target(model)
    assert mx.array_equal(target.embed(IDS), model.model.embed_tokens(IDS)), "an embedding put in since then"


def test_nothing_proven_keeps_a_model_alive():
    model = make_target()
    list(generate_step([1, 2], model, make_draft(), max_tokens=2))
    known, layer = weakref.ref(model), weakref.ref(model.layers[0])
    before = len(target_module._proofs)
    del model
    gc.collect()
    assert known() is None
    assert layer() is None
    assert len(target_module._proofs) == before - 1
