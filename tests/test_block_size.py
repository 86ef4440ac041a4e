"""The block is chosen from costs and acceptance: the best width, plain where drafting loses, nothing carried over."""

from __future__ import annotations

import json
import random
from itertools import chain, cycle, repeat

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_draft, make_target

import dflash_mlx.generation as generation
from dflash_mlx import generate_step, stream_generate
from dflash_mlx.decode import costs as cost_table
from dflash_mlx.decode.block_size import AutoBlockSize
from dflash_mlx.decode.costs import RoundCosts, WidthCosts
from dflash_mlx.decode.stats import GenerationStats

STEP = 0.02


def simulate(price, keep, tokens=400, costs=None, widest=16, seed=0):
    """Drive the chooser with rounds of known cost: (seconds a token / plain seconds a token, widths chosen)."""
    rng = random.Random(seed)
    chooser = AutoBlockSize(widest, RoundCosts() if costs is None else costs)
    emitted, seconds, widths = 0, 0.0, []
    while emitted < tokens:
        width = chooser.next(emitted, tokens - emitted).verify
        chance = keep(emitted)
        accepted = 0
        while accepted < width - 1 and rng.random() < chance:
            accepted += 1
        took = STEP * price(width)
        chooser.observe(emitted, width, accepted, took)
        emitted, seconds = emitted + accepted + 1, seconds + took
        widths.append(width)
    return seconds / (tokens * STEP), widths


REGIMES = {
    "memory bound": lambda w: 1.0 if w == 1 else 1.25 + 0.02 * w,
    "middling": lambda w: 1.0 if w == 1 else 1.4 + 0.1 * w,
    "every row costs": lambda w: 1.0 if w == 1 else 0.3 + w,
    "a wall at 6 rows": lambda w: 1.0 if w == 1 else 1.2 + 0.05 * w + (2.0 if w > 5 else 0.0),
}


def learned(price):
    """Costs after a few requests, as a user has them from the second day on."""
    costs = RoundCosts()
    for seed in range(6):
        simulate(price, lambda _: 0.8, costs=costs, seed=seed)
    return costs


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.8, 0.95])
def test_near_the_best_width_and_never_much_below_plain(regime, keep):
    price = REGIMES[regime]
    costs = learned(price)
    expected = [(1 - keep**w) / (1 - keep) for w in range(1, 17)]
    best = min(price(w) / expected[w - 1] for w in range(1, 17))
    runs = [simulate(price, lambda _: keep, tokens=600, costs=costs, seed=seed)[0] for seed in range(10)]
    mean = sum(runs) / len(runs)
    assert mean <= best * 1.09, "of the best width that an oracle would have pinned, learning included"
    assert mean <= 1 / 0.97


def test_a_draft_that_turns_bad_is_dropped_and_one_that_turns_good_is_taken():
    costs = learned(REGIMES["memory bound"])
    _, widths = simulate(REGIMES["memory bound"], lambda n: 0.9 if n < 150 else 0.0, 500, costs)
    assert max(widths[:20]) > 4
    assert widths[-150:].count(1) > 140
    _, widths = simulate(REGIMES["memory bound"], lambda n: 0.0 if n < 150 else 0.9, 600, costs)
    assert max(widths[-20:]) > 4


def test_a_useless_draft_is_not_probed_for_ever():
    costs = learned(REGIMES["middling"])
    _, widths = simulate(REGIMES["middling"], lambda _: 0.0, tokens=2000, costs=costs)
    assert sum(w > 1 for w in widths) < 60


def test_nothing_sticks_to_the_next_request():
    costs = learned(REGIMES["memory bound"])
    _, fresh = simulate(REGIMES["memory bound"], lambda _: 0.9, costs=costs, seed=3)
    simulate(REGIMES["memory bound"], lambda _: 0.0, costs=costs)
    _, after = simulate(REGIMES["memory bound"], lambda _: 0.9, costs=costs, seed=3)
    assert after[0] == fresh[0] > 1


def test_costs_taken_on_a_busy_machine_are_corrected():
    costs = WidthCosts()
    for width, seconds in ((1, 1.0), (2, 1.5), (4, 40.0)):
        for _ in range(3):
            costs.add(width, seconds)
    assert costs.curve(8)[3] == pytest.approx(3.5), "two further rows cost two plain steps at most"
    assert costs.curve(8)[2] == pytest.approx(2.5)
    for _ in range(4):
        costs.add(4, 1.7)
    assert costs.curve(8)[3] == pytest.approx(1.7)
    assert costs.curve(8)[7] == pytest.approx(2.1)


def test_a_lookup_starts_from_the_costs_of_the_draft_beside_it():
    costs = learned(REGIMES["memory bound"])
    chooser = AutoBlockSize(16, costs, RoundCosts(dearer=costs))
    assert chooser.next(100, 100, offered=15).verify > 8, "nothing has to be measured first"
    lookup = chooser.lookup.costs
    for _ in range(4):
        lookup.add(100, 6, 0.5 * STEP)
    assert lookup.at(100).known()[6] == 0.5 * STEP, "what was measured of the lookup itself counts"
    assert set(lookup.worth_keeping()["0"]) == {"6"}, "and only that is its own"
    assert costs.at(100).curve(6)[5] > STEP, "the draft's costs stay the draft's"


def requests(costs, keep, price, busy=lambda width: 1.0):
    """Three requests of 200 tokens behind one of 24 on a busy machine; plain steps that each token took."""
    simulate(lambda w: price(w) * busy(w), keep, tokens=24, costs=costs)
    return [simulate(price, keep, tokens=200, costs=costs, seed=seed)[0] for seed in range(1, 7)]


def test_a_plain_step_measured_on_a_busy_machine_does_not_stick():
    price = lambda w: 1.0 if w == 1 else 1.0 + 0.125 * w  # noqa: E731
    times = requests(RoundCosts(), lambda _: 0.0, price, busy=lambda _: 5.0)
    assert times[-1] < 1.04, "a useless draft is found out"
    stored = RoundCosts({0: {1: 5 * STEP, 2: 1.25 * STEP, 3: 1.4 * STEP, 16: 3 * STEP}})
    assert simulate(price, lambda _: 0.0, tokens=200, costs=stored)[0] < 1.25, "in another process as well"
    assert simulate(price, lambda _: 0.0, tokens=200, costs=stored)[0] < 1.04


@pytest.mark.parametrize("keep", [0.6, 0.8])
def test_blocks_measured_on_a_busy_machine_do_not_stick(keep):
    price = lambda w: 1.0 if w == 1 else 1.0 + 0.01 * w  # noqa: E731
    times = requests(RoundCosts(), lambda _: keep, price, busy=lambda width: 8.0 if width > 1 else 1.0)
    assert times[-1] < 0.6


def test_a_longer_context_starts_from_the_costs_of_a_shorter_one():
    costs = RoundCosts()
    for _ in range(4):
        costs.add(100, 1, 1.0)
    assert costs.at(50_000).known() == {1: 1.0}
    for _ in range(30):
        costs.add(50_000, 1, 3.0)
    assert costs.at(50_000).known()[1] == 3.0
    assert costs.at(100).known()[1] == 1.0


@pytest.mark.real_costs
def test_costs_are_kept_between_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    model, draft = make_target(), make_draft()
    for _ in range(3):
        list(generate_step([1, 2, 3], model, draft, max_tokens=40))
    (key, ranges), *others = json.loads((tmp_path / "costs.json").read_text()).items()
    assert not others
    assert "target" in key
    assert {"1", "2"} <= set(ranges["0"])
    monkeypatch.setattr(cost_table, "_known", {})
    pair = key.partition("; ")[2]
    assert cost_table.round_costs(pair).at(0).known()[1] == pytest.approx(ranges["0"]["1"])


@pytest.mark.real_costs
@pytest.mark.parametrize(
    "damage",
    ["{", "[1]", '{"a": 3}', '{"a": {"0": {"x": 1}}}', "[" * 100_000, '{"a": {"0": {"1": 1%s}}}' % ("0" * 400)],
)
def test_a_damaged_file_of_costs_is_measured_again(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_table, "_known", {})
    (tmp_path / "costs.json").write_text(damage)
    model, draft = make_target(), make_draft()
    assert [t for t, *_ in generate_step([1, 2], model, draft, max_tokens=30)] == plain_tokens(model, [1, 2], 30)
    assert json.loads((tmp_path / "costs.json").read_text())


@pytest.mark.real_costs
def test_ranges_that_no_context_has_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_table, "_known", {})
    stored = {f"{cost_table.machine()}; pair": {key: {"1": 0.1} for key in ["-1", "0", "999999999999"]}}
    (tmp_path / "costs.json").write_text(json.dumps(stored))
    assert set(cost_table.round_costs("pair", dearer=RoundCosts()).ranges) == {0}


@pytest.mark.real_costs
def test_a_folder_that_can_not_be_written_is_said_and_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "file" / "sub"))
    monkeypatch.setattr(cost_table, "_known", {})
    model, draft = make_target(), make_draft()
    with pytest.warns(UserWarning, match="can't be kept"):
        tokens = [t for t, *_ in generate_step([1, 2], model, draft, max_tokens=30)]
    assert tokens == plain_tokens(model, [1, 2], 30)


@pytest.mark.real_costs
@pytest.mark.parametrize("right", [0, 3, 7])
def test_whatever_is_chosen_the_tokens_are_plain_decoding_s(right, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_table, "_known", {})
    model, prompt = make_target(), [3, 1, 4, 1, 5]
    truth = plain_tokens(model, prompt, 120)
    draft = ScriptedDrafter([*prompt, *truth], lambda i: right if i % 5 else 0)
    stats = GenerationStats()
    tokens = [t.id for t in generation._tokens(prompt, model, draft, stats, max_tokens=120)]
    assert tokens == truth
    assert stats.auto
    assert {1, 2, 4} <= set(stats.block_sizes), "widths are measured before one is chosen"


class Dear(RoundCosts):
    """Every row of a block costs 1.2 plain steps, whatever is measured."""

    def __init__(self):
        super().__init__({0: {1: 1.0, **{width: 1.2 * width for width in (2, 4, 8, 16)}}})

    def add(self, context, width, seconds):
        pass


def test_a_run_without_the_draft_says_why(demo_pair, monkeypatch):
    model, draft, tokenizer = demo_pair
    monkeypatch.setattr(generation, "round_costs", lambda pair, dearer=None: Dear())
    monkeypatch.setattr(generation, "keep_costs", lambda pair: None)
    *_, last = stream_generate(model, tokenizer, "def f(", 20, draft)
    assert not last.stats.draft_used
    assert "costs 2.40 plain steps" in last.stats.draft_off_reason
    assert last.stats.draft_off_reason in last.stats.summary()


def test_context_of_plain_rounds_reaches_the_draft(demo_pair, monkeypatch):
    """Plain rounds only keep their taps; a later block sees them, and the caches end at the same rows."""
    model, draft, tokenizer = demo_pair
    prompt = tokenizer.encode("class Stack:\n    def __init__(self):\n        self.items = []\n")

    def rows(widths):
        class Scripted(AutoBlockSize):
            def _choose(self, proposer, context, limit):
                return min(limit, next(widths))

        monkeypatch.setattr(generation, "AutoBlockSize", Scripted)
        cache = make_prompt_cache(model) + draft.make_cache()
        tokens = [t for t, *_ in generate_step(prompt, model, draft, max_tokens=300, prompt_cache=cache)]
        return tokens, cache[-1]

    blocks, a = rows(cycle([8]))
    mixed, b = rows(chain(repeat(1, 280), cycle([8])))
    assert blocks == mixed
    assert a.offset == b.offset == len(prompt) + 300
    assert mx.allclose(a.keys[..., : a.rows, :], b.keys[..., : b.rows, :], atol=1e-4)


def test_a_round_is_measured_alone_where_plain_ones_are_queued_ahead(monkeypatch):
    """A device that works while rounds are queued, as MLX on a CPU does: plain rounds come out one late."""
    from dflash_mlx.decode import loop
    from dflash_mlx.decode.block_size import Widths
    from dflash_mlx.decode.round import Session

    clock, queue = [0.0], Session.dispatch

    def dispatch(self, widths, anchor=None):
        clock[0] += 2.5 if widths.verify > 1 else 1.0
        return queue(self, widths, anchor)

    monkeypatch.setattr(Session, "dispatch", dispatch)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    seen = []

    class Scripted:
        reason = ""

        def __init__(self, *args):
            self.widths = iter([1, 1, 1, 4, 4, 1, 1, 1, 1, 4, 1, 4] + [1] * 60)

        def next(self, context, remaining, room=None, offered=None):
            width = min(next(self.widths), remaining)
            return Widths(width, width)

        def observe(self, context, width, accepted, seconds, lookup=False):
            seen.append((width, seconds))

    monkeypatch.setattr(generation, "AutoBlockSize", Scripted)
    list(generate_step([1, 2, 3], make_target(), make_draft(), max_tokens=40))
    assert {seconds for width, seconds in seen if width > 1} == {2.5}
    assert {seconds for width, seconds in seen if width == 1} == {1.0, None}
    assert [seconds for width, seconds in seen].count(None) < 8
