"""Case C14: sampling with a draft is sampling without one, for every filter, both rules, and any draft."""

from __future__ import annotations

from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_draft, make_target

from dflash_mlx import generate_step
from dflash_mlx.api import _tokens
from dflash_mlx.decode import GenerationStats, Proposal, session
from dflash_mlx.decode.acceptance import count_accepted, reject
from dflash_mlx.decode.filters import Filters
from dflash_mlx.decode.sampling import TokenPicker
from dflash_mlx.decode.session import Session

# With 144 cells, 20,000 draws alone are 0.034 off on average; more draws leave room for a fault to show.
V, N = 12, 60_000
RNG = np.random.default_rng(0)
TARGET = mx.array(RNG.normal(size=(V, V)) * 1.5, mx.float32)  # logits of the next token, by token
DRAFTS = {
    "the target": TARGET,
    "the opposite": -TARGET,
    "flat": mx.zeros((V, V)),
    "another": mx.array(RNG.normal(size=(V, V)), mx.float32),
}
FILTERS = {
    "none": {},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 4},
    "min-p": {"min_p": 0.1},
    "all": {"top_p": 0.9, "top_k": 6, "min_p": 0.05},
}


def plain_joint(filters: Filters, temp: float) -> np.ndarray:
    """The exact joint distribution of two tokens after token 0, in float64 with mlx-lm's filters."""
    rows = TARGET - mx.logsumexp(TARGET, axis=-1, keepdims=True)
    p = np.exp(np.array(filters(rows) / temp, np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    return p[0][:, None] * p


@cache
def noise(position: int, purpose: str, kind: str) -> mx.array:
    """The picker's own noise for N runs at once, gumbel `[N, V]` or uniform `[N]`: a run is N positions further."""
    picker, positions = TokenPicker(temp=1.0, seed=1), range(position, 4 * N, 4)
    return picker.gumbel(positions, V, purpose) if kind == "gumbel" else picker.uniform(positions, purpose)[:, 0]


def drawn(rule: str, draft: mx.array | None, filters: Filters, temp: float, wrong: bool = False) -> np.ndarray:
    """Empirical joint of the first two tokens after token 0 over N runs: a block of 3, and another if needed.

    The rule's own functions decide on the picker's own noise, that of many runs made in one go.
    """
    picker = TokenPicker(temp=temp, seed=1, filters=filters, rejection=rule == "rejection")
    pick_noise = [noise(i, "pick", "gumbel") for i in (1, 2)]
    draft_noise = [noise(i, "draft", "gumbel") if rule == "rejection" else pick_noise[i - 1] for i in (1, 2)]
    accept = [noise(i, "accept", "uniform") for i in (1, 2)]

    def proposals(first: mx.array, at: int) -> tuple[list, list]:
        tokens, scores = [], []
        token = first
        for i in range(at, 2):
            if draft is None:  # chosen without chance
                token = mx.full((N,), 3)
                scores.append(None)
            else:
                score = picker.scores(draft[token], None)
                token = mx.argmax(score + draft_noise[i], axis=-1)
                scores.append(score)
            tokens.append(token)
        return tokens, scores

    def one_round(anchor: mx.array, at: int) -> tuple[mx.array, mx.array]:
        tokens, scores = proposals(anchor, at)
        rows = [anchor, *tokens]
        target = mx.stack([picker.scores(TARGET[row], None) for row in rows], 1)  # [N, L, V]
        gumbel = mx.stack([*pick_noise[at:], noise(3, "pick", "gumbel")], 1)
        proposed = mx.stack(tokens, 1)
        if rule == "match":
            picks = mx.argmax(target + gumbel, axis=-1)
            if wrong:  # keeps a draft token whenever the target gives it some probability
                some = mx.take_along_axis(mx.softmax(target[:, :-1], -1), proposed[..., None], -1)[..., 0] > 0.02
                picks = mx.concatenate([mx.where(some, proposed, picks[:, :-1]), picks[:, -1:]], 1)
            kept = mx.vmap(count_accepted)(proposed, picks)
            return kept, picks
        uniform = mx.stack(accept[at:], 1)
        if scores[0] is None:
            results = mx.vmap(lambda d, t, u, g: reject(d, None, t, u, g))(proposed, target, uniform, gumbel)
        else:
            results = mx.vmap(reject)(proposed, mx.stack(scores, 1), target, uniform, gumbel)
        return results

    kept, picks = one_round(mx.zeros((N,), mx.int32), 0)
    first, second = picks[:, 0], picks[:, 1]
    _, again = one_round(first, 1)  # for runs in which the first draft token was refused
    second = mx.where(kept >= 1, second, again[:, 0])
    counts = np.zeros((V, V))
    np.add.at(counts, (np.array(first), np.array(second)), 1)
    return counts / N


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


@pytest.mark.parametrize(
    ("filters", "temp"),
    [("none", 0.7), ("none", 1.3), ("top-p", 0.7), ("top-k", 1.3), ("min-p", 0.7), ("all", 0.7), ("all", 1.3)],
)
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_the_joint_of_two_tokens_is_that_of_plain_sampling(rule, filters, temp):
    filtering = Filters(**FILTERS[filters])
    exact = plain_joint(filtering, temp)
    for draft in (*DRAFTS.values(), None):
        distance = total_variation(drawn(rule, draft, filtering, temp), exact)
        assert distance < 0.03


def test_a_wrong_rule_is_caught():
    distance = total_variation(
        drawn("match", DRAFTS["the opposite"], Filters(), 1.0, wrong=True), plain_joint(Filters(), 1.0)
    )
    assert distance > 0.08


class BigramDraft(ScriptedDrafter):
    """Draws each token from a table of logits `[V, V]` by the token before it, with the noise that it is given."""

    def __init__(self, table: mx.array):
        super().__init__([], lambda i: 0)
        self.table = table
        self.given: list[tuple[int, mx.array]] = []  # position of the first proposal, noise

    def propose(self, request):
        self.given.append((len(request.tokens), request.noise.gumbel))
        token, tokens, scores = request.anchor, [], []
        for row in request.noise.gumbel:
            scores.append(request.picker.scores(self.table[token], None))
            token = mx.argmax(scores[-1] + row, axis=-1)
            tokens.append(token)
        return Proposal(mx.concatenate(tokens), scores=mx.concatenate(scores))


def bigram_target(vocab: int = V):
    """A target in which a token depends on the one before it alone, and its logits `[V, V]`."""
    model = make_target(vocab=vocab, layers=2, seed=3)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    return model, model(mx.arange(vocab)[:, None])[:, 0]


def test_a_draft_that_knows_the_target_is_kept_whole():
    """By match it picks with the target's own noise at the target's own positions: nothing else tells them apart."""
    model, table = bigram_target()
    stats = GenerationStats()
    ours = list(_tokens(mx.array([3, 1]), model, BigramDraft(table), stats, max_tokens=57, temp=1.0, seed=5))
    assert stats.accepted == [7] * 7
    plain = [t for t, *_ in generate_step([3, 1], model, max_tokens=57, temp=1.0, seed=5)]
    assert [token.id for token in ours] == plain


def test_the_noise_of_each_purpose_and_position_is_its_own():
    picker = TokenPicker(temp=1.0, seed=0)
    for draw in (lambda *at: picker.gumbel([at[0]], 50, at[1]), lambda *at: picker.uniform([at[0]], at[1])):
        drawn = {at: draw(*at).tolist()[0][0] for at in product((5, 6), ("pick", "draft", "accept", "xtc"))}
        assert len(set(drawn.values())) == len(drawn)
    assert picker.gumbel([5], 50).tolist() != TokenPicker(temp=1.0, seed=1).gumbel([5], 50).tolist()


def test_by_rejection_neither_the_draft_nor_the_coins_share_the_picks_noise(monkeypatch):
    model, table = bigram_target()
    draft, calls, picker = BigramDraft(table), [], TokenPicker(temp=1.0, seed=5)
    real = session.reject
    monkeypatch.setattr(session, "reject", lambda *args: calls.append(args) or real(*args))
    list(generate_step([3, 1], model, draft, max_tokens=12, temp=1.0, seed=5, acceptance="rejection"))
    assert len(draft.given) == len(calls) > 1
    for (first, given), (proposed, _, _, uniform, gumbel) in zip(draft.given, calls, strict=True):
        positions = range(first, first + proposed.size)
        assert mx.array_equal(given, picker.gumbel(positions, V, "draft"))
        assert mx.array_equal(gumbel, picker.gumbel([*positions, positions.stop], V, "pick"))
        assert mx.array_equal(uniform, picker.uniform(positions, "accept")[:, 0])


@pytest.mark.parametrize("options", [{}, {"acceptance": "rejection"}])
def test_end_to_end_with_a_real_draft(options):
    """Seeds 0.. through the whole loop; the first token's distribution against the softmax, the second's as well."""
    taps = {"target_layer_ids": [0, 1], "mask_token_id": 255}
    model = make_target(seed=3, layers=2)
    draft = make_draft(num_hidden_layers=1, num_target_layers=2, dflash_config=taps)
    prompt, runs = [3, 1, 4], 400
    seen = {}
    for seed in range(runs):
        tokens = [t for t, *_ in generate_step(prompt, model, draft, max_tokens=3, temp=0.4, seed=seed, **options)]
        seen[tokens[0], tokens[1]] = seen.get((tokens[0], tokens[1]), 0) + 1
    first = mx.softmax(model(mx.array([prompt]))[0, -1] / 0.4)
    second = mx.softmax(model(mx.array([[*prompt, i] for i in range(256)]))[:, -1] / 0.4, axis=-1)
    joint = np.array(first[:, None] * second, np.float64)
    likely = [np.unravel_index(i, joint.shape) for i in np.argsort(joint, axis=None)[::-1][:6]]
    for a, b in likely:
        p = joint[a, b]
        assert abs(seen.get((int(a), int(b)), 0) / runs - p) < 4.5 * (p * (1 - p) / runs) ** 0.5


@pytest.mark.parametrize(
    "values", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 40, "min_p": 0.05}]
)
def test_filters_keep_what_mlx_lm_keeps(values):
    """Compared through mlx-lm's own sampler: what it can ever draw is what we keep."""
    from mlx_lm import sample_utils

    logits = mx.array(RNG.normal(size=(4, 500)) * 3, mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected = logprobs
    if "top_p" in values:
        expected = sample_utils.apply_top_p(expected, values["top_p"])
    if "min_p" in values:
        expected = sample_utils.apply_min_p(expected, values["min_p"])
    if "top_k" in values:
        expected = sample_utils.apply_top_k(expected, values["top_k"])
    assert mx.array_equal(Filters(**values)(logprobs), expected)
    assert make_sampler(1.0, **values)(logprobs).shape == (4,)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.7501, 4)])
def test_top_p_ends_where_the_mass_is_reached(top_p, kept):
    from mlx_lm.sample_utils import apply_top_p

    logprobs = mx.log(mx.array([[0.5, 0.25, 0.125, 0.125]]))
    assert mx.array_equal(Filters(top_p=top_p)(logprobs), apply_top_p(logprobs, top_p))
    assert (Filters(top_p=top_p)(logprobs) > -mx.inf).sum().item() == kept


def test_a_samplers_coin_falls_for_each_row():
    """mlx-lm's XTC draws one coin a call, so each token of a block needs a call of its own."""
    logits, xtc = mx.log(mx.array([[0.5, 0.3, 0.2]] * 64)), make_sampler(1.0, xtc_probability=0.5, xtc_threshold=0.25)
    mx.random.seed(3)
    picks, _ = TokenPicker(sampler=xtc).pick(logits, None)
    assert picks.shape == (64,)
    assert 4 < (picks == 0).sum().item() < 27, "0.25 of them; with one coin for all none, or half"

    shapes = []

    def sampler(logprobs):
        shapes.append(logprobs.shape)
        return mx.argmax(logprobs, axis=-1)

    model = make_target()
    truth = [token for token, *_ in generate_step([1, 2, 3], model, max_tokens=20)]
    assert [t for t, *_ in generate_step([1, 2, 3], model, make_draft(), max_tokens=20, sampler=sampler)] == truth
    assert set(shapes) == {(1, 256)}


def test_what_processors_are_given_is_copied_once():
    """100,000 tokens would take milliseconds a round."""
    read = []

    class Watched(list):
        def __getitem__(self, at):
            found = super().__getitem__(at)
            read.append(len(found) if isinstance(at, slice) else 1)
            return found

        def __iter__(self):
            read.append(len(self))
            return super().__iter__()

    class Watching(Session):
        def prefill(self, *args):
            super().prefill(*args)
            self.tokens = Watched(self.tokens)

    prompt, model, seen = [(7 * i + 3) % 250 for i in range(100)], make_target(), []

    def note(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    truth = plain_tokens(model, prompt, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_mlx.api.Session", Watching)
        for right in (0, 5):
            read.clear()
            draft = ScriptedDrafter([*prompt, *truth], lambda i, right=right: right)
            tokens = [t for t, *_ in generate_step(prompt, model, draft, max_tokens=24, logits_processors=[note])]
            assert tokens == truth
            assert sum(read) <= 24
    for n in range(100, 124):
        assert [*prompt, *truth][:n] in seen, "every prefix once at least"


def test_xtc_drops_all_but_the_least_likely_choice_where_its_coin_says_so():
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]] * 2))
    kept = Filters(xtc_probability=0.5, xtc_threshold=0.1)(logprobs, mx.array([[0.4], [0.6]]))
    assert (kept > -mx.inf).tolist() == [[False, False, True, True], [True] * 4]
    at_it = Filters(xtc_probability=1.0, xtc_threshold=0.25)(mx.log(mx.array([[0.5, 0.25, 0.25]])), mx.zeros((1, 1)))
    assert (at_it > -mx.inf).all(), "one at the threshold is not above it"
    special = Filters(xtc_probability=1.0, xtc_threshold=0.1, xtc_special_tokens=[0])(logprobs, mx.zeros((2, 1)))
    assert (special > -mx.inf).tolist() == [[True, False, True, True]] * 2


@pytest.mark.parametrize(("temp", "top_p"), [(0.7, 0.9), (0.7, 1.0), (1.0, 0.9), (1.0, 1.0)])
def test_bfloat16_logits_of_a_large_vocabulary(temp, top_p):
    """Cumulative sums in bfloat16 keep the wrong tokens; against a float64 twin nothing may be off by 1e-6."""
    vocab = 150_000
    logits = mx.array(RNG.normal(size=(1, vocab)) * 2.5, mx.float32).astype(mx.bfloat16)
    picker = TokenPicker(temp=temp, seed=1, filters=Filters(top_p=top_p))
    # Scores are compared up to a constant: the pick is an argmax, so their normaliser never matters.
    scores = np.array(picker.scores(logits, None)[0], np.float64)
    ours = np.exp(scores - scores.max())
    ours /= ours.sum()
    x = np.array(logits.astype(mx.float32)[0], np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(p, kind="stable")
        above = p.sum() - np.cumsum(p[order])
        threshold = p[order][(above >= top_p).sum()]
        p = np.where(p < threshold, 0, p)
    p = p ** (1 / temp)
    p /= p.sum()
    assert np.abs(ours - p).max() < 1e-6


@pytest.mark.parametrize(
    "bad", [{"top_p": 1.5}, {"min_p": -0.1}, {"top_k": -1}, {"min_tokens_to_keep": 0}, {"xtc_threshold": 0.7}]
)
def test_filters_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Filters(**bad)


def test_the_rejection_rule_needs_the_distributions():
    with pytest.raises(ValueError, match="rejection"):
        list(generate_step([1], make_target(), sampler=make_sampler(1.0), acceptance="rejection"))
    with pytest.raises(ValueError, match="acceptance"):
        list(generate_step([1], make_target(), acceptance="guess"))


@pytest.mark.parametrize("values", [{"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}, {"xtc_probability": 0.5}])
def test_a_seed_gives_one_text_with_filters_too(values):
    model, prompt = make_target(), [3, 1, 4, 1, 5]
    options = {"max_tokens": 30, "temp": 0.9, "seed": 7, **values}
    truth = [t for t, *_ in generate_step(prompt, model, **options)]
    for block in (2, 8):
        assert [t for t, *_ in generate_step(prompt, model, make_draft(), block_size=block, **options)] == truth


def test_a_seed_gives_the_same_text_in_a_fresh_process_and_after_another_request(capsys):
    import subprocess
    import sys

    from dflash_mlx.cli import main

    argv = ["generate", "--model", "demo", "--prompt", "def f(", "--max-tokens", "24", "--temp", "0.9", "--seed", "7"]
    argv += ["--top-p", "0.95", "--xtc-probability", "0.2"]
    fresh = subprocess.run([sys.executable, "-m", "dflash_mlx", *argv], capture_output=True, text=True, check=True)
    assert main([*argv[:-2], "--seed", "8", "--block-size", "4"]) == 0
    capsys.readouterr()
    for flags in (["--block-size", "1"], ["--block-size", "4"], ["--draft-model", "none"]):
        assert main([*argv, *flags]) == 0
        assert capsys.readouterr().out == fresh.stdout


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv7", "falcon_h1"])
def test_a_seeded_second_turn_of_recurrent_caches_uses_new_noise(monkeypatch, family):
    """They do not say how many tokens they hold, and from a file nothing else does either."""
    import matrix

    from dflash_mlx.target import Target

    model = matrix.build(family)
    draft = matrix.real_draft(Target(model), [0, 1])
    used: list[list[int]] = []
    keys = TokenPicker._keys
    monkeypatch.setattr(TokenPicker, "_keys", lambda self, at, purpose: used[-1].extend(at) or keys(self, at, purpose))

    def turns(*draft_models, reloaded=False):
        cache, text = model.make_cache(), []
        if any(draft_models):
            cache += draft.make_cache()
        for prompt, draft_model in zip(([1, 2, 3, 4, 5], [6, 7], [8]), draft_models, strict=True):
            used.append([])
            steps = generate_step(prompt, model, draft_model, max_tokens=7, temp=0.9, seed=5, prompt_cache=cache)
            text += [[token for token, *_ in steps]]
            if reloaded:
                cache = [type(entry).from_state(entry.state) for entry in cache]
        return text

    # In the last run the draft's own rows lag behind by a turn that was decoded without it.
    assert turns(None, None, None) == turns(draft, draft, draft) == turns(draft, None, draft)
    for first, second, third in (used[:3], used[3:6], used[6:]):
        assert max(first) < max(second) < max(third)
        assert not set(first[:7]) & set(second), "noise of tokens that were emitted"
    used.clear()
    turns(None, None, None, reloaded=True)
    assert not set(used[0]) & set(used[1])
