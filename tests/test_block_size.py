"""The block is chosen from costs and acceptance: the best width, plain where drafting loses, learned from rounds."""

from __future__ import annotations

import json
import random
import threading
from itertools import chain, cycle, repeat

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_draft, make_target
from width_zoo import CURVES, STEP, Machine, best, cell, expected, request

import dflash_mlx.api as generation
from dflash_mlx import generate_step, stream_generate
from dflash_mlx.decode import DFlashDrafter
from dflash_mlx.decode import memory as memories
from dflash_mlx.decode.block_size import AutoBlockSize, Widths
from dflash_mlx.decode.costs import RoundCosts, WidthCosts
from dflash_mlx.decode.rates import RequestRates, SlotRates
from dflash_mlx.decode.stats import GenerationStats


def requests(memory, price, keeps, tokens=400, widest=16, seed=0):
    """Requests one after the other: (plain steps a token, widths) of each."""
    rng = random.Random(seed)
    machine = Machine(price, rng)
    outcomes = [request(memory, machine, keep, tokens, rng, widest) for keep in keeps]
    return [(outcome.real, outcome.widths) for outcome in outcomes]


def learned(price, keep=0.8):
    """What is known after a few requests."""
    memory = RoundCosts()
    requests(memory, price, [keep] * 4)
    return memory


ZOO = [(name, keep) for name in CURVES for keep in (0.0, 0.5, 0.75, 0.9, 0.97)]


# Where luck of wide blocks outweighs what they win (docs/experiments.md).
HARD = {("M3 Ultra", 0.9): 1.09}


def test_near_the_best_width_by_the_third_request_and_never_much_below_plain():
    """256 tokens a request, costs and acceptance unknown at first; `width_zoo.py` prints all of it."""
    cells = {which: cell(CURVES[which[0]], which[1], tokens=256, seeds=3) for which in ZOO}
    limits = {which: HARD.get(which, 1.05 if c.width > 1 else 1.03) for which, c in cells.items()}
    assert {which: c.mean(2) for which, c in cells.items() if c.mean(2) > limits[which]} == {}
    blocks = [c.mean(2) for c in cells.values() if c.width > 1]
    assert sum(blocks) / len(blocks) < 1.02
    assert {which: c.worst(n) for which, c in cells.items() for n in (1, 2) if c.worst(n) > 1.07} == {}
    assert {which: c.worst(0) for which, c in cells.items() if c.worst(0) > 1.12} == {}


@pytest.mark.parametrize("machine", ["noisy", "drifting", "growing"])
def test_a_machine_that_is_not_steady_costs_little_more(machine):
    curves = ("OpenBLAS", "M3 Max", "flat from 6 rows", "every row costs")
    cells = [cell(CURVES[name], keep, 256, 3, machine) for name in curves for keep in (0.0, 0.75, 0.95)]
    assert max(c.mean(2) for c in cells) < 1.10
    assert max(c.worst(n) for c in cells for n in (1, 2)) < 1.10


def test_a_first_request_of_100_tokens_finds_a_block_that_halves_its_time():
    for name, keep in ZOO:
        if best(CURVES[name], keep)[0] < 0.4:
            for outcome in cell(CURVES[name], keep, tokens=100, count=1).requests[0]:
                width = outcome.widths[-1]
                assert CURVES[name](width) / expected(keep, width) < 0.5, (name, keep, outcome.widths)


def test_a_draft_that_turns_bad_is_dropped_and_one_that_turns_good_is_taken():
    price = CURVES["memory bound"]
    rng, memory = random.Random(0), learned(price)
    for before, after in ((0.9, 0.0), (0.0, 0.9)):
        chooser, widths = AutoBlockSize(16, memory), []
        for i in range(400):
            width = chooser.next(100, 1000).verify
            keep = before if i < 150 else after
            accepted = next((j for j in range(width - 1) if rng.random() >= keep), width - 1)
            chooser.observe(100, width, accepted, STEP * price(width))
            widths.append(width)
        assert (sum(w > 1 for w in widths[50:150]) > 90) == (before > 0)
        assert (sum(w > 4 for w in widths[-100:]) > 90) == (after > 0)


def test_a_useless_draft_is_not_probed_for_ever():
    memory = learned(CURVES["middling"])
    (_, widths), *_ = requests(memory, CURVES["middling"], [0.0], tokens=2000)
    assert sum(w > 1 for w in widths) < 60


def test_the_next_request_starts_from_what_the_pair_showed():
    price = CURVES["a row costs 0.6"]
    good, bad = learned(price, 0.95), learned(price, 0.2)
    assert AutoBlockSize(16, good).next(100, 500).verify > 2
    assert AutoBlockSize(16, bad).next(100, 500).verify == 1
    mixed = RoundCosts()
    requests(mixed, price, [0.2, 0.9, 0.2, 0.9, 0.2])
    (better, widths), *_ = requests(mixed, price, [0.95])
    assert max(widths[-20:]) > 2, "and goes its own way from there, where requests are known to differ"
    assert better < 1


def test_acceptance_is_kept_by_temperature():
    memory = RoundCosts()
    for _ in range(40):
        memory.rates_at(0.0).add(8, 7)
    assert memory.rates_at(0.0).rates(1)[0] > 0.9
    warm = memory.rates_at(0.7)
    assert warm.rates(1)[0] > 0.85, "a new one starts from the nearest"
    for _ in range(10):
        warm.add(8, 0)
    assert warm.rates(1)[0] < 0.35
    assert memory.rates_at(0.0).rates(1)[0] > 0.9


def test_a_request_s_rates_are_the_pair_s_moved_by_what_it_showed():
    pair = SlotRates()
    for i in range(300):
        pair.add(4, i % 4)  # 3/4 of the first slot, 2/3 of the second, 1/2 of the third
    assert pair.rates(3) == pytest.approx([0.75, 0.667, 0.5], abs=0.02)
    same = RequestRates(pair, 3)
    tokens, deviation = same.expected(4)
    assert tokens == pytest.approx([1, 1.75, 2.25, 2.5], abs=0.05)
    assert deviation[3] == pytest.approx(1.118, abs=0.02), "of 1, 2, 3 and 4 tokens alike"
    good, bad = RequestRates(pair, 3), RequestRates(pair, 3)
    for _ in range(10):
        good.add(4, 3)
        bad.add(4, 0)
    assert good.expected(4)[0][3] > 3.4
    assert bad.expected(4)[0][3] < 1.4
    for _ in range(200):
        good.forget()
    assert good.expected(4)[0] == pytest.approx(tokens, abs=0.03), "what is long ago is forgotten"


def test_a_pair_shows_how_much_its_requests_differ():
    """Alike ones teach that the next is no other either; very different ones that it may be anything."""
    alike, different = SlotRates(), SlotRates()
    for pair, turns in ((alike, [(0, 1, 2, 3)]), (different, [(0, 0, 0, 1), (3, 3, 3, 2)])):
        assert pair.spread() == 1.0
        for number in range(8):
            request = RequestRates(pair, 3)
            for accepted in turns[number % len(turns)] * 10:
                pair.add(4, accepted)
                request.add(4, accepted)
    assert alike.spread() < 0.3
    assert different.spread() > 1.3
    assert alike.hint().spread() == alike.spread(), "at another temperature they differ as much"
    assert SlotRates.from_list(different.to_list()).spread() == pytest.approx(different.spread(), abs=0.01)
    assert SlotRates.from_list(different.to_list()[:2]).spread() == 1.0, "files of earlier versions keep none"
    first = RequestRates(alike, 3)
    first.add(4, 0)
    assert abs(first.shift) < 0.5, "one bad round of such a pair says little"


@pytest.mark.parametrize("widest", [9, 16, 64])
@pytest.mark.parametrize("missed", [0, 0.01])
def test_a_draft_that_is_always_right_stays_computable(widest, missed):
    """Slots lean on each other, so the last ones' rates come to 1 by rounding, which has no log-odds."""
    rng, chooser = random.Random(1), AutoBlockSize(widest, RoundCosts())
    for _ in range(400):
        width = chooser.next(100, 1000).verify
        accepted = next((i for i in range(width - 1) if rng.random() < missed), width - 1)
        chooser.observe(100, width, accepted, 0.01 + 0.0005 * width)
    assert chooser.next(100, 1000).verify > widest // 2
    assert memories.from_dict(memories.to_dict(chooser.costs)).rates_at(0.0).rates(widest - 1)[-1] < 1


def test_a_pair_in_debt_still_uses_a_block_that_is_known_to_pay():
    """Only rounds that try something wait for credit; bad luck of earlier requests does not stop a good width."""
    memory = learned(CURVES["OpenBLAS"], 0.9)
    memory.lost = 100 * STEP
    assert AutoBlockSize(16, memory).next(100, 500).verify > 4


def test_asking_changes_nothing():
    asked, silent = (AutoBlockSize(16, learned(CURVES["M3 Max"])) for _ in range(2))
    rng = random.Random(5)
    for i in range(60):
        for remaining in (200, 5, 1, 200):
            asked.next(100 + i, remaining, offered=3)
            assert asked.next(100 + i, remaining) == asked.next(100 + i, remaining)
        width = silent.next(100 + i, 200).verify
        assert asked.next(100 + i, 200).verify == width
        accepted = rng.randrange(width)
        for chooser in (asked, silent):
            chooser.observe(100 + i, width, accepted, STEP * CURVES["M3 Max"](width))
    assert memories.to_dict(asked.costs) == memories.to_dict(silent.costs)


def test_threads_share_what_is_known():
    """Requests of several threads learn at once, while others are begun and all of it is written."""
    memory, errors = RoundCosts(), []

    def work(seed):
        try:
            for i in range(12):
                chooser = AutoBlockSize(16, memory, temp=(seed + i) / 10)
                for n in range(40):
                    width = chooser.next(3000 * i + n, 100).verify
                    chooser.observe(3000 * i + n, width, min(1, width - 1), 0.01 * width)
        except Exception as error:
            errors.append(error)

    def read():
        try:
            while any(thread.is_alive() for thread in threads):
                with memory.lock:
                    memories.from_dict(json.loads(json.dumps(memories.to_dict(memory))))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in (*threads, reader):
        thread.join()
    assert errors == []
    assert sum(costs.rounds for costs in memory.ranges.values()) == 4 * 12 * 40


def test_costs_taken_on_a_busy_machine_are_corrected():
    costs = WidthCosts()
    for width, seconds in ((1, 1.0), (1, 1.0), (2, 1.5), (4, 40.0)):
        costs.add(width, seconds)
    assert costs.known()[4] == pytest.approx(4.5), "two further rows cost two plain steps and a draft at most"
    costs.add(4, 1.7)
    assert costs.known()[4] == pytest.approx(1.7)
    for _ in range(3):
        costs.add(8, 1.6)
    assert costs.known()[4] == pytest.approx(1.6), "and no more than what is measured of more rows"


def test_bounds_of_what_was_not_measured():
    costs = WidthCosts({1: (1.0, 0.0), 4: (1.5, 0.0), 8: (4.0, 0.0)})
    bounds = costs.bounds(16)
    assert bounds[4] == (1.5, 2.5, 0.75), "a step of the kernels lies anywhere between 4 and 8"
    assert bounds[6] == (1.5, 4.0, 0.25)
    assert bounds[15] == (4.0, 12.0, 0.5), "the last width's cost may reach as far again"
    low, high, _ = bounds[7]
    assert high == 4.0
    assert 3.8 < low < 4.0
    for _ in range(2000):
        costs.add(4, None)
    assert costs.bounds(16)[7].low == 1.5, "a figure that is old says little"


def test_a_lookup_starts_from_the_costs_of_the_draft_beside_it():
    memory = learned(CURVES["memory bound"])
    chooser = AutoBlockSize(16, memory, RoundCosts(dearer=memory))
    assert chooser.next(100, 100, offered=15).verify > 8, "nothing has to be measured first"
    lookup = chooser.lookup.costs
    for _ in range(4):
        lookup.add(100, 6, 0.5 * STEP)
    assert lookup.at(100).known()[6] == 0.5 * STEP, "what was measured of the lookup itself counts"
    assert set(memories.to_dict(lookup)["costs"]["0"]) == {"6"}, "and only that is its own"
    assert memory.at(100).known()[16] > STEP, "the draft's costs stay the draft's"


def test_a_plain_step_measured_on_a_busy_machine_does_not_stick():
    price = lambda w: 1.0 if w == 1 else 1.0 + 0.125 * w  # noqa: E731
    memory = RoundCosts()
    requests(memory, lambda w: 5 * price(w), [0.0], tokens=24)
    assert requests(memory, price, [0.0] * 6, tokens=200)[-1][0] < 1.04, "a useless draft is found out"
    ranges = {1: 5 * STEP, 2: 1.25 * STEP, 3: 1.4 * STEP, 16: 3 * STEP}
    stored = memories.from_dict({"costs": {"0": {str(width): seconds for width, seconds in ranges.items()}}})
    first, second = requests(stored, price, [0.0] * 2, tokens=200)
    assert first[0] < 1.12, "in another process as well"
    assert second[0] < 1.04


@pytest.mark.parametrize("keep", [0.6, 0.8])
def test_blocks_measured_on_a_busy_machine_do_not_stick(keep):
    price = lambda w: 1.0 if w == 1 else 1.0 + 0.01 * w  # noqa: E731
    memory = RoundCosts()
    requests(memory, lambda w: price(w) * (8.0 if w > 1 else 1.0), [keep], tokens=24)
    assert requests(memory, price, [keep] * 6, tokens=200)[-1][0] < 0.6


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
    monkeypatch.setattr(memories, "_table", memories._Table())
    monkeypatch.setattr(memories, "KEEP_EVERY", 0.0)
    for _ in range(3):
        list(generate_step([1, 2, 3], model, draft, max_tokens=40, keep_costs=True))
    (key, stored), *others = json.loads((tmp_path / "costs.json").read_text()).items()
    assert not others
    assert "target" in key
    assert "1" in stored["costs"]["0"]
    assert stored["rates"]["0.0"][1][0] > 0, "draft tokens were offered"
    known = memories._table.pairs[key]
    monkeypatch.setattr(memories, "_table", memories._Table())
    again = memories.round_costs(key.partition("; ")[2], kept=True)
    assert again is not known
    assert memories.to_dict(again)["costs"].keys() == stored["costs"].keys()
    assert again.at(0).known()[1] == pytest.approx(stored["costs"]["0"]["1"][0])
    assert again.at(0).age(1) == stored["costs"]["0"]["1"][1]
    assert again.rates_at(0.0).rates(3) == pytest.approx(known.rates_at(0.0).rates(3), abs=0.01)


@pytest.mark.real_costs
def test_a_library_call_leaves_the_file_alone(tmp_path, monkeypatch):
    """It learns within its process; only the commands keep, and whoever asks."""
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(memories, "_table", memories._Table())
    monkeypatch.setattr(memories, "costs_file", None)
    list(generate_step([1, 2, 3], make_target(), make_draft(), max_tokens=40))
    (memory,) = memories._table.pairs.values()
    assert memory.at(0).count(1) > 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real_costs
def test_every_command_keeps_what_it_measured(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    for name, *more in (["generate", "-p", "def f("], ["benchmark", "--block-sizes", "auto", "--samples", "1"]):
        monkeypatch.setattr(memories, "_table", memories._Table())
        short = ("--repeat", "1", "--warm-up", "0") if name == "benchmark" else ()
        assert cli(name, "--model", "demo", *more, *short, "--max-tokens", "24").code == 0
        assert len(json.loads((tmp_path / "costs.json").read_text())) == 1
        (tmp_path / "costs.json").unlink()


@pytest.mark.real_costs
@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[1]",
        "[" * 100_000,
        "%s 3",
        '%s {"0": {"x": 1}}',
        '%s {"costs": 1, "rates": []}',
        '%s {"costs": {"0": {"1": [], "2": [1], "4": ["a", 1], "8": {}}, "1": 7}, "rates": {"0.0": 3, "x": [[], []]}}',
        '%s {"costs": {"0": {"1": 1%%s}}}' % ("0" * 400),
        '%s {"costs": {"0": {"1": [NaN, 1], "2": [-1, 1], "4": [1, -1], "99999999999": [1, 1]}}}',
        '%s {"costs": {"-1": {"1": 0.1}, "999999999999": {"1": 0.1}}, "rates": {"0.0": [[2.0], [1.0]]}}',
        '%s {"costs": {"²": {"1": 0.1}, "0": {"²": 0.1, "1' + 5000 * "0" + '": 0.1}}}',
        '%s {"rates": {"0.0": [[1], [1' + 400 * "0" + "]]}}",
        '%s {"rates": {"0.0": [[], [], [0, 600000]], "0.5": [[990000.0], [990000.0]]}}',
        '%s {"rates": {"0.0": [[1.0], [2.0], [NaN, 1.0]], "0.5": [[1.0], [2.0], [1.0]]}}',
        '%s {"rates": {"0.0": [[NaN], [1.0]], "nan": [[1.0], [2.0]], "0.7": [[1.0], [2.0, 3.0]]}}',
    ],
)
def test_a_damaged_file_of_costs_is_measured_again(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(memories, "_table", memories._Table())
    model, draft = make_target(), make_draft()
    pair = memories.describe_pair(model, DFlashDrafter(draft), ["greedy"])
    key = json.dumps(f"{memories.machine()}; {pair}")
    (tmp_path / "costs.json").write_text("{" + damage.replace("%s", f"{key}:") + "}" if "%s" in damage else damage)
    tokens = [t for t, *_ in generate_step([1, 2], model, draft, max_tokens=30, keep_costs=True)]
    assert tokens == plain_tokens(model, [1, 2], 30)
    stored = json.loads((tmp_path / "costs.json").read_text())
    assert set(stored[json.loads(key)]["costs"]["0"]) >= {"1"}


@pytest.mark.real_costs
def test_a_file_of_an_earlier_version_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(memories, "_table", memories._Table())
    stored = {f"{memories.machine()}; pair": {"0": {"1": 0.1, "4": 0.2}, "3": {"1": 0.4}}}
    (tmp_path / "costs.json").write_text(json.dumps(stored))
    memory = memories.round_costs("pair", kept=True)
    assert memory.at(0).known() == {1: 0.1, 4: 0.2}
    assert set(memory.ranges) == {0, 3}


@pytest.mark.real_costs
def test_a_folder_that_can_not_be_written_is_said_and_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "file" / "sub"))
    monkeypatch.setattr(memories, "_table", memories._Table())
    model, draft = make_target(), make_draft()
    with pytest.warns(UserWarning, match="can't be kept"):
        tokens = [t for t, *_ in generate_step([1, 2], model, draft, max_tokens=30, keep_costs=True)]
    assert tokens == plain_tokens(model, [1, 2], 30)


@pytest.mark.real_costs
@pytest.mark.parametrize("right", [0, 3, 7])
def test_whatever_is_chosen_the_tokens_are_plain_decoding_s(right, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(memories, "_table", memories._Table())
    model, prompt = make_target(), [3, 1, 4, 1, 5]
    truth = plain_tokens(model, prompt, 120)
    draft = ScriptedDrafter([*prompt, *truth], lambda i: right if i % 5 else 0)
    stats = GenerationStats()
    tokens = [t.id for t in generation._tokens(prompt, model, draft, stats, max_tokens=120)]
    assert tokens == truth
    assert stats.auto
    assert len(set(stats.block_sizes)) > 2, "widths are tried"


class Dear(RoundCosts):
    """Every row of a block costs 1.2 plain steps, whatever is measured."""

    def __init__(self):
        super().__init__({0: {1: (1.0, 0.0), **{width: (1.2 * width, 0.0) for width in (2, 4, 8, 16)}}})

    def add(self, context, width, seconds):
        pass


def test_a_run_without_the_draft_says_why(demo_pair, monkeypatch):
    model, draft, tokenizer = demo_pair
    monkeypatch.setattr(generation, "round_costs", lambda *args, **kwargs: Dear())
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
            def next(self, context, remaining, room=None, offered=None):
                width = min(remaining, next(widths))
                return Widths(width, width)

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
    from dflash_mlx.decode.session import Session

    clock, queue = [0.0], Session.dispatch

    def dispatch(self, widths, anchor=None):
        clock[0] += 2.5 if widths.verify > 1 else 1.0
        return queue(self, widths, anchor)

    monkeypatch.setattr(Session, "dispatch", dispatch)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    seen = []

    class Scripted:
        reason = ""

        def __init__(self, *args, **kwargs):
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
