"""Prompt lookup: the index against a plain scan, blocks only where the text repeats itself, tokens as ever."""

from __future__ import annotations

import copy
import json

import matrix
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from scripted import plain_tokens
from tiny import HYBRIDS, make_draft, make_hybrid, make_target

from dflash_mlx import PromptCache, PromptLookup, generate_step, load_prompt_cache, save_prompt_cache
from dflash_mlx.api import _tokens
from dflash_mlx.decode import GenerationStats
from dflash_mlx.decode.lookup import TokenIndex
from dflash_mlx.target import Target

LENGTHS = (2, 4, 8)
PHRASE = [(11 * i + 5) % 240 for i in range(24)]
REPEATING = [*PHRASE, *PHRASE, *PHRASE[:18]]  # ends in the middle of the phrase, 18 tokens matched


def decode(model, prompt, draft, n=40, **options) -> tuple[list[int], GenerationStats]:
    stats = GenerationStats()
    return [t.id for t in _tokens(mx.array(prompt), model, draft, stats, max_tokens=n, **options)], stats


def scripted(script):
    """A processor that makes the target say `script[i]` at position i."""
    return [lambda tokens, logits: logits + 1e4 * (mx.arange(logits.shape[-1]) == script[tokens.shape[0]])[None]]


def copying(strength=6.0):
    """A processor that draws the target to what follows its last token in the phrase; its own mind shows through."""
    follows = list(range(256))
    for token, following in zip(PHRASE, [*PHRASE[1:], PHRASE[0]], strict=True):
        follows[token] = following
    table = mx.array(follows)
    return [lambda tokens, logits: logits + strength * (mx.arange(logits.shape[-1]) == table[tokens[-1]])[None]]


# The index ------------------------------------------------------------------------------------------------------------


def scanned(tokens: list[int], lengths) -> tuple[int, int]:
    """The same by looking at every place."""
    for length in reversed(lengths):
        run = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == run and len(tokens) >= length:
                return length, end
    return 0, 0


@given(st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 9)), max_size=12))
def test_the_index_finds_what_a_scan_finds(steps):
    """Lists are appended, numbers dropped from the end."""
    index, tokens = TokenIndex(LENGTHS), []
    for step in steps:
        if isinstance(step, int):
            index.trim(step)
            tokens = tokens[: max(0, len(tokens) - step)]
        else:
            index.extend(step)
            tokens += step
        assert index.tokens == tokens
        length, end = index.match()
        assert (length, end) == scanned(tokens, LENGTHS)
        found = index.continuation(15)
        assert len(found) == (0 if length == 0 else min(15, 2 * length) if length < 8 else 15)
        text = list(tokens)
        for token in found:  # as if it were emitted: each is what followed the place before it
            assert token == text[end + len(text) - len(tokens)]
            text.append(token)


def test_tokens_that_are_not_known_match_nothing_and_are_never_proposed():
    index = TokenIndex((2,), offset=5)
    assert index.offset == 5
    assert index.match() == (0, 0)
    index.extend([7, 8])
    index.skip(3)
    index.extend([7, 8])
    assert index.match() == (2, 7)
    assert index.continuation(4) == [], "what followed is not known"
    assert index.offset == 12


def test_a_copy_of_a_long_index_and_a_cut_do_not_index_it_anew(monkeypatch):
    """A hit on a stored cache is copied, then the last token cut: 0.33 s at 128,000 tokens when each was anew."""
    index = TokenIndex(LENGTHS)
    index.extend([*PHRASE, 99, *PHRASE])
    found = index.match(), index.continuation(9)
    monkeypatch.setattr(TokenIndex, "extend", None)
    copied = copy.deepcopy(index)
    copied.trim(len(PHRASE))
    assert (copied.tokens, copied.match()) == ([*PHRASE, 99], (0, 0))
    assert (index.match(), index.continuation(9)) == found, "the copy is one of its own"
    monkeypatch.undo()
    copied.extend(PHRASE)
    assert (copied.match(), copied.continuation(9)) == found
    assert copied.state[0].tolist() == index.state[0].tolist()


def test_each_token_is_indexed_once(monkeypatch):
    added, own = [], TokenIndex.extend
    monkeypatch.setattr(TokenIndex, "extend", lambda self, tokens: (added.extend(tokens), own(self, tokens))[1])
    model = make_target()
    kept = make_prompt_cache(model)  # or the last tokens are not indexed at all
    tokens, stats = decode(model, REPEATING, "lookup", logits_processors=copying(), prompt_cache=kept)
    assert stats.lookup_rounds > 0
    assert added == [*REPEATING, *tokens]


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_a_copy_is_proposed_in_blocks_and_prose_is_not():
    prose, copied = list(range(100, 120)), PHRASE
    script = [*PHRASE, 99, *prose, *copied, 98, 97]
    prompt, rest = script[:30], script[30:]
    tokens, stats = decode(make_target(), prompt, "lookup", len(rest), logits_processors=scripted(script))
    assert tokens == rest
    # 15 words of prose and five of the copy, the first of them with the prompt; then blocks that grow with the match.
    assert stats.block_sizes == [1] * 19 + [9, 12, 1]
    assert stats.accepted == [0] * 19 + [8, 10, 0], "the last proposal was what followed the first time"
    assert stats.lookup_rounds == 2


def test_plain_rounds_are_queued_ahead_until_something_matches():
    """A sync a token would cost more than a lookup gains on most texts."""
    model, prompt = make_target(), list(range(30))
    own, forwards = type(model).__call__, []

    class Counting(type(model)):
        def __call__(self, *args, **kwargs):
            forwards.append(1)
            return own(self, *args, **kwargs)

    model.__class__ = Counting
    script = [*range(60), *range(10)]
    steps = generate_step(prompt, model, "lookup", max_tokens=10, logits_processors=scripted(script))
    Target(model).check()  # once a model, by forwards of its own
    forwards.clear()
    next(steps)
    assert len(forwards) == 3, "prompt, first token, and the next step queued ahead"
    steps.close()


def test_a_match_that_appears_while_a_step_is_ahead_is_taken_up_one_token_later():
    script = [*PHRASE, 99, *PHRASE, 98]
    n = len(script) - 27
    tokens, stats = decode(make_target(), script[:27], "lookup", n, logits_processors=scripted(script))
    assert tokens == script[27:]
    # Tokens 25 to 28 match; 29 was queued when 28 was not known yet.
    assert stats.block_sizes[:3] == [1, 1, 9]


FAMILIES = ["qwen3", "llama-full", "qwen3_moe", *HYBRIDS, "deepseek_v3", "lfm2", "glm_moe_dsa", "gemma4"]


def model_of(family):
    if family in HYBRIDS:
        return make_hybrid(family)
    if family in matrix.CONFIGS and family not in ("qwen3", "qwen3_moe"):
        return matrix.build(family)
    return make_target(family.removesuffix("-full"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_every_family_are_those_of_plain_decoding(family):
    model = model_of(family)
    right = wrong = 0
    for prompt, strength in ((REPEATING, 6), (REPEATING[:30], 4), (REPEATING, 3)):
        options = {"logits_processors": copying(strength)}
        tokens, stats = decode(model, prompt, "lookup", 28, **options)
        assert tokens == plain_tokens(model, prompt, 28, **options)
        right += sum(stats.accepted)
        wrong += sum(stats.block_sizes) - stats.rounds - sum(stats.accepted)
    assert right > 0
    assert wrong > 0


def test_beside_a_draft_the_long_match_wins_and_the_draft_does_the_rest():
    model, draft = make_target(), make_draft()
    script = [*REPEATING, *PHRASE[18:], *range(100, 140)]
    options = {"logits_processors": scripted(script), "n": 30}
    tokens, stats = decode(model, REPEATING, draft, lookup=True, **options)
    assert tokens == script[len(REPEATING) :][:30]
    assert stats.accepted[0] == 5, "what is left of the phrase behind the first token"
    assert 0 < stats.lookup_rounds < stats.rounds
    assert stats.block_sizes[0] == draft.config.block_size


def test_the_drafts_context_goes_on_below_a_lookup():
    model, draft = make_target(), make_draft()
    caches = []
    for lookup in (False, True):
        drafter = PromptLookup(draft) if lookup else draft
        cache = make_prompt_cache(model) + drafter.make_cache()
        tokens, stats = decode(model, REPEATING, drafter, prompt_cache=cache, logits_processors=copying())
        assert tokens == plain_tokens(model, REPEATING, 40, logits_processors=copying())
        assert (stats.lookup_rounds > 0) == lookup
        assert {c.offset for c in cache} == {len(REPEATING) + 40}
        caches.append(cache[len(model.layers) :])
    for plain, beside in zip(*caches, strict=False):
        assert plain.rows == beside.rows
        for a, b in ((plain.keys, beside.keys), (plain.values, beside.values)):
            assert mx.allclose(a[..., : plain.rows, :], b[..., : plain.rows, :], atol=1e-5)


def test_a_draft_that_goes_wrong_takes_the_lookup_with_it_and_the_text_goes_on():
    model, draft = make_target(), make_draft()
    draft.norm.weight = draft.norm.weight * mx.nan
    with pytest.warns(RuntimeWarning, match="NaN"):
        tokens, stats = decode(model, REPEATING, draft, lookup=True)
    assert tokens == plain_tokens(model, REPEATING, 40)
    assert "float32" in stats.draft_off_reason


@pytest.mark.parametrize("block", [2, 5])
def test_a_block_size_limits_the_lookup(block):
    model = make_target()
    tokens, stats = decode(model, REPEATING, "lookup", block_size=block, logits_processors=copying())
    assert tokens == plain_tokens(model, REPEATING, 40, logits_processors=copying())
    assert max(stats.block_sizes) == block


# Sampling -------------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_with_a_lookup():
    model = make_target()
    options = {"temp": 0.8, "seed": 7, "logits_processors": copying()}
    truth, _ = decode(model, REPEATING, None, **options)
    for draft in ("lookup", PromptLookup(make_draft()), PromptLookup(min_match=2, block_size=6)):
        tokens, stats = decode(model, REPEATING, draft, **options)
        assert tokens == truth
        assert stats.lookup_rounds > 0


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_the_distribution_is_that_of_plain_sampling(acceptance):
    """Three tokens behind a prompt whose lookup proposes likely ones."""
    model, runs, temp = make_target(seed=3, layers=1), 500, 0.3
    prompt = [3, 1, 4]
    best = plain_tokens(model, prompt, 2)
    prompt = [7, 8, *prompt, *best, 9, 7, 8, *prompt]  # the lookup proposes `best`
    first = mx.softmax(model(mx.array([prompt]))[0, -1] / temp)
    second = mx.softmax(model(mx.array([[*prompt, i] for i in range(256)]))[:, -1] / temp, axis=-1)
    joint = np.array(first[:, None] * second, np.float64)
    seen, looked_up = np.zeros_like(joint), 0
    for seed in range(runs):
        draft = PromptLookup(min_match=2)
        tokens, stats = decode(model, prompt, draft, 3, temp=temp, seed=seed, acceptance=acceptance)
        seen[tokens[0], tokens[1]] += 1
        looked_up += stats.lookup_rounds
    assert looked_up > runs / 10
    for i in np.argsort(joint, axis=None)[::-1][:8]:
        p, share = joint.flat[i], seen.flat[i] / runs
        assert abs(share - p) < 4.5 * (p * (1 - p) / runs) ** 0.5


# Turns ----------------------------------------------------------------------------------------------------------------


def turn(cache, model, draft, ids):
    rest = cache.rest(ids)
    tokens, stats = decode(model, rest, draft, 14, prompt_cache=cache.caches, logits_processors=copying(10))
    cache.extend(rest, tokens)
    return tokens, stats, rest


@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
@pytest.mark.parametrize("beside", [False, True])
def test_a_later_turn_copies_from_an_earlier_one(family, beside):
    model = model_of(family)
    draft = PromptLookup(make_draft() if beside else None)
    cache = PromptCache(model, draft)
    first, _, _ = turn(cache, model, draft, PHRASE)
    second = [*PHRASE, *first, 250, *PHRASE[:10]]
    warm, stats, rest = turn(cache, model, draft, second)
    assert len(rest) == 11, "the phrase itself is not fed again"
    assert stats.lookup_rounds > 0
    cold, cold_stats = decode(model, second, draft, 14, logits_processors=copying(10))
    assert warm == cold
    assert stats.accepted == cold_stats.accepted
    third = [*second[:30], 7]  # an edited history
    tokens, _, _ = turn(cache, model, draft, third)
    assert tokens == plain_tokens(model, third, 14, logits_processors=copying(10))


def test_an_index_survives_a_file(tmp_path):
    model, draft = make_target(), PromptLookup(make_draft())
    cache = make_prompt_cache(model) + draft.make_cache()
    tokens, _ = decode(model, PHRASE, draft, 9, prompt_cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert loaded[-1].tokens == [*PHRASE, *tokens]
    assert loaded[-1].lengths == draft.lengths
    follow = [250, *PHRASE[:10]]
    warm, stats = decode(model, follow, draft, 12, prompt_cache=loaded, logits_processors=copying())
    assert warm == plain_tokens(model, [*PHRASE, *tokens, *follow], 12, logits_processors=copying())
    assert stats.lookup_rounds > 0


def test_a_cache_whose_tokens_nobody_knows():
    model, cache = make_target(), make_prompt_cache(make_target())
    tokens, _ = decode(model, PHRASE, None, 9, prompt_cache=cache)
    follow, whole = [250, *PHRASE[:10]], [*PHRASE, *tokens, 250, *PHRASE[:10]]
    assert decode(model, follow, "lookup", 30, prompt_cache=cache)[0] == plain_tokens(model, whole, 30)
    assert {c.offset for c in cache} == {len(whole) + 30}


@pytest.mark.parametrize("taken", [1, 2, 5, 7, 20])
def test_closing_early_leaves_the_index_at_what_was_taken(taken):
    model, draft = make_target(), PromptLookup()
    cache = make_prompt_cache(model) + draft.make_cache()
    options = {"prompt_cache": cache, "logits_processors": copying(10)}
    steps = generate_step(REPEATING, model, draft, max_tokens=40, **options)
    tokens = [next(steps)[0] for _ in range(taken)]
    steps.close()
    assert cache[-1].tokens == [*REPEATING, *tokens]
    assert {c.offset for c in cache} == {len(REPEATING) + taken}
    rest, _ = decode(model, [5], draft, 10, prompt_cache=cache)
    assert rest == plain_tokens(model, [*REPEATING, *tokens, 5], 10)


# The commands ---------------------------------------------------------------------------------------------------------

LIST = "names = [\n" + "".join(f'    "alpha_{i}",\n' for i in range(4))


def report(cli, *flags):
    outcome = cli("generate", "--model", "demo", "--prompt", LIST, "--max-tokens", 64, "--json", "--check", *flags)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out), outcome.err


@pytest.mark.parametrize("flags", [["--draft-model", "lookup"], ["--draft-model", "none", "--lookup"], ["--lookup"]])
def test_the_bundled_pair_copies_a_list(cli, flags):
    result, err = report(cli, *flags)
    assert result["check"]["identical"]
    assert result["stats"]["tau"] > 3
    assert result["stats"]["lookup_rounds"] > 2
    assert f"({result['stats']['lookup_rounds']} by lookup)" in err
    assert result["draft_model"] == ("demo" if flags == ["--lookup"] else "lookup")


def test_prose_is_decoded_plainly(cli):
    outcome = cli(
        "generate", "--model", "demo", "--prompt", "import os\n", "--draft-model", "lookup", "--temp", 1.5, "--seed", 3,
        "--max-tokens", 60, "--json",
    )  # fmt: skip
    stats = json.loads(outcome.out)["stats"]
    assert set(stats["block_sizes"]) == {1}
    assert not stats["draft_used"]
    assert "no draft used: the text ended before anything was proposed" in outcome.err


def test_a_block_beyond_the_lookups_is_refused(cli):
    outcome = cli("generate", "--model", "demo", "--prompt", "x", "--draft-model", "lookup", "--block-size", 20)
    assert outcome.code != 0
    assert "--block-size 20 is out of range: this draft's blocks have 1 to 16 tokens" in outcome.err


def test_a_family_that_can_not_be_rewound_is_refused_before_it_loads(cli, tmp_path):
    name = next(
        n for n, row in matrix.json.loads(matrix.TABLE.read_text())["families"].items() if row["status"] == "refused"
    )
    (tmp_path / "config.json").write_text(json.dumps(matrix.CONFIGS[name]["config"]))
    outcome = cli("generate", "--model", tmp_path, "--prompt", "x", "--draft-model", "none", "--lookup")
    assert outcome.code != 0
    assert "no draft can drive" in outcome.err


def test_a_chat_looks_up_in_earlier_turns(cli, monkeypatch):
    lines = iter([LIST, "/stats", LIST, "/stats", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    outcome = cli("chat", "--model", "demo", "--draft-model", "lookup", "--max-tokens", 24)
    last = [line for line in outcome.err.splitlines() if "prompt tokens cached" in line][-1]
    assert "by lookup" in last
    assert not last.endswith("; 0 prompt tokens cached")
