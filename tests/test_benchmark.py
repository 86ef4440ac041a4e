"""The measurement: figures against a scripted clock, prompts, data sets, heavy targets, verdicts, the command."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from scripted import ScriptedDrafter, plain_tokens
from tiny import make_hybrid, make_target

from dflash_mlx import DFlashError, TargetError, benchmark
from dflash_mlx.benchmark import Arm, Pair, Settings, Task, dataset, figures, lossless, plots, prompts, runs
from dflash_mlx.check import Verdict

PROMPT = [5, 9, 200, 31, 7, 7, 64, 120, 3, 88, 41, 17, 250, 99, 12, 6, 73, 140]  # longer than a block
DRAFT, STEP, ROW = 0.25, 1.0, 0.1  # seconds of the scripted clock


class Clock:
    """Stands in for `time.perf_counter`; moves a hair at each look, so that nothing divides by zero."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


def slow(model: nn.Module, clock: Clock) -> nn.Module:
    """The same model, whose forward takes STEP seconds, and ROW more for each further row."""

    class Slow(type(model)):
        def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            clock.now += STEP + ROW * (inputs.shape[1] - 1)
            return super().__call__(inputs, *args, **kwargs)

    model.__class__ = Slow
    return model


class SlowDrafter(ScriptedDrafter):
    clock: Clock

    def propose(self, request: Any) -> Any:
        self.clock.now += DRAFT
        return super().propose(request)


@pytest.fixture
def scripted(monkeypatch, demo_pair):
    """A pair on a scripted clock: `pair(right)` drafts `right(round)` right tokens a round."""
    clock = Clock()
    model = make_target("qwen3")
    script = PROMPT + plain_tokens(model, PROMPT, 200)
    slow(model, clock)
    monkeypatch.setattr(time, "perf_counter", clock)

    def pair(right: Any) -> Pair:
        drafter = SlowDrafter(script, right)
        drafter.clock = clock
        return Pair(model, drafter, endless(demo_pair[2]))

    return pair


def endless(tokenizer: Any, *end: int) -> Any:
    tokenizer = copy.copy(tokenizer)
    tokenizer.eos_token_ids = set(end)
    return tokenizer


def task(name: str = "code 1", ids: list[int] = PROMPT, context: int | None = None) -> Task:
    return Task(name, name.split()[0], mx.array(ids, mx.int32), context)


def test_figures_are_those_of_the_clock(scripted):
    report = benchmark.run(scripted(lambda round: 2), [task()], [Arm("1", 1), Arm("4", 4)], Settings(20, repeat=2))
    plain, ours, row = report.rows
    assert (plain.tps, plain.tau, plain.rho, plain.speedup) == pytest.approx((1 / STEP, 1, 1, 1))
    assert (ours.tau, ours.rho, ours.speedup) == pytest.approx((1, 1, 1)), "our loop without a draft costs the same"
    round_seconds = DRAFT + STEP + 3 * ROW
    assert row.tau == 3
    assert row.rho == pytest.approx(round_seconds / STEP)
    assert row.round_ms == pytest.approx(1000 * round_seconds)
    assert row.speedup == pytest.approx(3 / round_seconds)
    assert row.speedup_range == pytest.approx((row.speedup, row.speedup))
    assert row.acceptance == [1, 1, 0]
    assert row.widths == {4: sum(len(run.accepted) for run in report.runs if run.arm == "4" and run.turn >= 0)}
    assert row.prefill_tps == pytest.approx((len(PROMPT) - 1) / (STEP + ROW * (len(PROMPT) - 2)))
    # Scripted models work while their graph is built: all of a profiled round is the host's.
    assert (row.draft, row.verify, row.host) == pytest.approx((0, 0, round_seconds), abs=1e-6)
    assert all(found.exact for found in report.verdicts)


def test_speedup_is_tau_over_rho_and_the_time_of_whole_rounds(scripted):
    report = benchmark.run(
        scripted(lambda round: (3, 0, 1, 7)[round % 4]), [task(), task("chat 2", PROMPT[3:])], [Arm("8", 8)],
        Settings(24, repeat=3),
    )  # fmt: skip
    plain, row = report.rows
    timed = [run for run in report.runs if run.arm == "8" and run.turn >= 0]
    assert len(timed) == 6
    for run in timed:
        assert run.seconds == pytest.approx(run.rounds * (DRAFT + STEP + 7 * ROW))
        assert run.timed_tokens == sum(run.accepted) + run.rounds
        assert 24 <= len(run.tokens) < 24 + 8
        first = len(run.tokens) - 1 - run.timed_tokens
        assert first in (1, 2, 4, 8), "the first round is outside, as is the prefill's token"
    tau = sum(run.timed_tokens for run in timed) / sum(run.rounds for run in timed)
    assert row.tau == pytest.approx(tau)
    assert row.speedup == pytest.approx(row.tau / row.rho)
    assert row.speedup == pytest.approx(row.tps / plain.tps)
    assert row.rho == pytest.approx(DRAFT + STEP + 7 * ROW, rel=0.05)  # repeats differ in tau here, hence medians
    kinds = {(entry["kind"], entry["arm"]): entry for entry in report.kinds}
    assert set(kinds) == {(kind, arm) for kind in ("code", "chat") for arm in ("plain", "8")}
    assert kinds["code", "plain"]["speedup"] == pytest.approx(1)


def test_the_window_ends_before_a_round_with_nothing_queued_behind_it(scripted):
    """A text that ends by itself: its last round is not timed, since none was queued while it came out."""
    pair = scripted(lambda round: 1)
    end = plain_tokens(pair.model, PROMPT, 40)
    first_seen = next(i for i in range(12, 40) if end[i] not in end[:i])
    pair = Pair(pair.model, pair.draft, endless(pair.tokenizer, end[first_seen]))
    run = runs.run(pair, task(), Arm("4", 4), Settings(40))
    assert run.tokens == end[: first_seen + 1]
    assert run.seconds == pytest.approx(run.rounds * (DRAFT + STEP + 3 * ROW))
    assert run.timed_tokens == 2 * run.rounds == sum(run.accepted) + run.rounds
    assert 0 < run.timed_tokens <= first_seen
    assert runs.run(pair, task(), runs.PLAIN, Settings(40)).tokens == run.tokens
    assert len(runs.run(pair, task(), Arm("4", 4), Settings(40, ignore_end=True)).tokens) >= 40


def test_texts_too_short_to_time_are_an_error_or_are_left_out(scripted):
    pair = scripted(lambda round: 3)
    tokens = plain_tokens(pair.model, PROMPT, 4)
    pair = Pair(pair.model, pair.draft, endless(pair.tokenizer, tokens[1]))
    with pytest.raises(DFlashError, match="--ignore-end"):
        benchmark.run(pair, [task()], [Arm("4", 4)], Settings(20, repeat=1))
    other = next(ids for n in range(1, 9) if tokens[1] not in plain_tokens(pair.model, ids := PROMPT[n:], 24))
    report = benchmark.run(pair, [task(), task("chat 2", other)], [Arm("4", 4)], Settings(20, repeat=1))
    assert [row.prompts for row in report.rows] == [1, 1]
    assert "1 of 2 prompts ended too soon to be timed" in report.notes()


def test_arms_are_interleaved_and_their_order_alternates(monkeypatch):
    order = []
    monkeypatch.setattr(runs, "run", lambda pair, task, arm, settings, turn: order.append((turn, task.name, arm.label)))
    arms = [runs.PLAIN, Arm("4", 4)]
    runs.measure(None, [task("a 1"), task("b 2")], arms, Settings(repeat=2, warm_up=1))
    assert order == [
        (None, "a 1", "plain"), (None, "a 1", "4"),
        (0, "a 1", "plain"), (0, "a 1", "4"), (0, "b 2", "4"), (0, "b 2", "plain"),
        (1, "a 1", "4"), (1, "a 1", "plain"), (1, "b 2", "plain"), (1, "b 2", "4"),
        (-1, "a 1", "4"), (-1, "b 2", "4"),
    ]  # fmt: skip


def test_a_hiccup_in_one_repeat_moves_no_median(scripted):
    report = benchmark.run(scripted(lambda round: 2), [task()], [Arm("4", 4)], Settings(20, repeat=3))
    rows = {"plain": 1, "4": 4}
    hit = [copy.copy(run) for run in report.runs]
    for run in hit:
        if run.turn == 1:
            object.__setattr__(run, "seconds", run.seconds * 9)
    for before, after in zip(report.rows, figures.rows(hit, rows), strict=True):
        assert after.speedup == pytest.approx(before.speedup)
        assert after.tps == pytest.approx(before.tps)
        assert (before.spread, after.spread) == (pytest.approx(0, abs=1e-6), pytest.approx(1 - 1 / 9))
        assert after.spread > 0.5 > before.spread


# The verdict ----------------------------------------------------------------------------------------------


def test_a_target_that_computes_otherwise_in_wide_calls_is_found_out(demo_pair):
    model = make_target("qwen3")

    class Perturbed(type(model)):
        def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            logits = super().__call__(inputs, *args, **kwargs)
            return logits + 50 * (mx.arange(logits.shape[-1]) == 7) if inputs.shape[1] == 4 else logits

    script = PROMPT + plain_tokens(model, PROMPT, 80)
    model.__class__ = Perturbed
    pair = Pair(model, ScriptedDrafter(script, lambda round: 3), endless(demo_pair[2]))
    report = benchmark.run(pair, [task()], [Arm("1", 1), Arm("4", 4)], Settings(12, repeat=1))
    plain, ours, wide = report.verdicts
    assert plain.exact
    assert ours.exact
    assert wide.exact is False
    assert wide.fault
    assert re.fullmatch(r"NO, at \d+ \(1 of 11\)", wide.text), "all but the prefill's own token"
    assert "NOT a near-tie" in wide.detail
    assert any(wide.detail in note for note in report.notes())
    assert report.to_dict()["rows"][2]["lossless"] is False


def test_the_worst_difference_is_told():
    def verdict(margin: float | None, differences: int = 1) -> Verdict:
        fault = margin is None or margin > 1e-3
        return Verdict(9, 3, 1, 2, margin, 1e-3, "mlx-lm", 1.0, differences, int(fault), 3, margin)

    assert lossless._worst([]) == lossless.Lossless(True)
    tie = lossless._worst([verdict(1e-4), verdict(5e-4)])
    assert (tie.exact, tie.near_tie, tie.fault, tie.text) == (False, True, False, "tie at 3 (1 of 2)")
    assert "0.0005" in tie.detail
    assert lossless._worst([verdict(1e-4)]).text == "tie at 3"
    wrong = lossless._worst([verdict(1e-4), verdict(2.0, differences=4)])
    assert (wrong.fault, wrong.text) == (True, "NO, at 3 (1 of 5)")
    assert lossless._worst([verdict(2.0), verdict(None)]).detail == str(verdict(None))


@pytest.mark.parametrize(("acceptance", "exact"), [("match", True), ("rejection", None)])
def test_sampled_runs_are_compared_with_the_same_seed(demo_pair, acceptance, exact):
    model, draft, tokenizer = demo_pair
    sampling = {"temp": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.0, "top_k": 0, "acceptance": acceptance}
    ids = tokenizer.encode("def f(x):\n    return")
    settings = Settings(12, repeat=1, warm_up=0, ignore_end=True, sampling=sampling)
    report = benchmark.run(Pair(model, draft, tokenizer), [task(ids=ids)], [Arm("4", 4)], settings)
    assert report.verdicts[1].exact is exact
    assert not report.verdicts[1].fault


# Prompts --------------------------------------------------------------------------------------------------


def test_built_in_prompts_have_several_of_each_kind_in_both_forms():
    chat, completion = prompts.built_in(True), prompts.built_in(False)
    for kind in ("chat", "code", "math", "copy"):
        assert sum(prompt.kind == kind for prompt in chat) >= 3
    assert [prompt.kind for prompt in chat] == [prompt.kind for prompt in completion]
    assert not {prompt.text for prompt in chat} & {prompt.text for prompt in completion}
    assert len({prompt.kind for prompt in prompts.evenly(chat, 4)}) == 4


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.txt", "one\n---\n\ntwo\nlines\n---\n", ["one", "two\nlines"]),
        ("p.jsonl", '"one"\n\n{"prompt": "two"}\n{"question": "three", "kind": "math"}\n', ["one", "two", "three"]),
    ],
)
def test_a_file_holds_prompts(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    found = prompts.read_file(tmp_path / name)
    assert [prompt.text for prompt in found] == expected
    assert found[-1].kind == ("math" if name == "p.jsonl" else "file")


def test_prompts_are_padded_with_real_text_to_each_length(demo_pair):
    tokenizer = demo_pair[2]

    def render(text: str) -> mx.array:
        return mx.array(tokenizer.encode(text), mx.int32)

    some = [prompts.Prompt("code", "def f(x):\n"), prompts.Prompt("chat", "Why is the sky blue?")]
    found = prompts.tasks(some, [64, 200], render, tokenizer)
    assert [(t.name, t.context) for t in found] == [
        (name, length) for length in (64, 200) for name in ("code 1", "chat 2")
    ]
    for t, prompt in zip(found, some * 2, strict=True):
        assert t.context - 4 <= t.ids.shape[0] <= t.context
        assert tokenizer.decode(t.ids.tolist()).endswith("\n\n" + prompt.text)
    assert found[2].ids.tolist()[:40] == found[3].ids.tolist()[:40]


def test_a_filler_that_is_too_short_says_so(demo_pair, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(DFlashError, match=r"short\.txt has only \d+ tokens"):
        prompts.tasks(
            [prompts.Prompt("x", "y")], [512], lambda text: mx.array([1]), demo_pair[2], tmp_path / "short.txt"
        )


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", dataset.DATASETS)
def test_a_data_set_is_read_from_a_local_copy(tmp_path, monkeypatch, name, form):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    entry = dataset.DATASETS[name]
    questions: list[Any] = [f"question {i}" for i in range(6)]
    if name == "mt-bench":
        questions = [[question, "and then?"] for question in questions]
    rows = datasets.Dataset.from_dict({entry.column: questions, "other": list(range(6))})
    file = tmp_path / f"copy.{form}"
    (rows.to_parquet if form == "parquet" else rows.to_json)(str(file))
    found = dataset.load(name, 3, file)
    assert [prompt.kind for prompt in found] == [name] * 3
    for i, prompt in zip((0, 2, 4), found, strict=True):
        assert f"question {i}" in prompt.text
        assert "and then" not in prompt.text


def test_a_data_set_comes_from_its_repo_or_says_why_not(monkeypatch):
    import datasets

    asked = []

    def load(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"question": ["one"], "answer": ["1"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert "one" in dataset.load("gsm8k")[0].text
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    with pytest.raises(DFlashError, match="no column 'problem', only question, answer"):
        dataset.load("math500")

    def offline(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DFlashError, match="no route to the hub; --dataset-file"):
        dataset.load("humaneval")


# Heavy targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-untied"])
def test_a_heavier_target_computes_the_same(family):
    model = make_target(family)
    before = plain_tokens(model, PROMPT, 24)
    logits = model(mx.array([PROMPT]))
    benchmark.widen(model, 512)
    for layer in model.layers:
        assert layer.mlp.gate_proj.weight.shape == (512, 64)
        assert layer.mlp.down_proj.weight.shape == (64, 512)
    assert mx.allclose(model(mx.array([PROMPT])), logits, atol=1e-5, rtol=0)
    assert plain_tokens(model, PROMPT, 24) == before


def test_the_bundled_target_may_be_made_heavier(demo_pair):
    from dflash_mlx import load

    model, draft, tokenizer = load("demo")
    ids = tokenizer.encode("class Stack:\n    def __init__(self):\n")
    benchmark.widen(model, 1024)
    assert plain_tokens(model, ids, 32) == plain_tokens(demo_pair[0], ids, 32)
    report = benchmark.run(
        Pair(model, draft, tokenizer), [task(ids=ids)], [Arm("auto"), Arm("4", 4)], Settings(16, repeat=1, warm_up=0)
    )
    assert all(found.exact for found in report.verdicts)


def test_a_target_that_can_not_be_widened_is_refused_by_name_and_left_alone():
    moe = make_target("qwen3_moe")
    with pytest.raises(TargetError, match=r"qwen3_moe: --heavy needs dense.*layer 0: gate_proj is missing"):
        benchmark.widen(moe, 512)
    with pytest.raises(TargetError, match="gpt_oss"):
        benchmark.widen(make_hybrid("gpt_oss"), 512)
    quantised = make_target("qwen3")
    nn.quantize(quantised.layers[1].mlp, group_size=32)
    with pytest.raises(TargetError, match=r"layer 1: gate_proj is a QuantizedLinear"):
        benchmark.widen(quantised, 512)
    assert quantised.layers[0].mlp.gate_proj.weight.shape == (96, 64)
    with pytest.raises(TargetError, match=r"--heavy 95 is less than the 96 units"):
        benchmark.widen(make_target("qwen3"), 95)


# The command ----------------------------------------------------------------------------------------------

COMMAND = ["benchmark", "--model", "demo", "--max-tokens", "8", "--repeat", "1", "--warm-up", "0"]


def test_the_command_writes_tables_json_and_plots(cli, tmp_path):
    file, folder = tmp_path / "figures.json", tmp_path / "plots"
    flags = ["--samples", "2", "--context", "48,64", "--block-sizes", "4,auto", "--heavy", "768"]
    done = cli(*COMMAND, *flags, "--json", file, "--plots", folder)
    assert done.code == 0, done.err
    assert "speed-up (tau) by kind of prompt" in done.out
    assert "2 prompts, 8 tokens" in done.out
    figures = json.loads(file.read_text())
    assert set(figures) == {"environment", "about", "settings", "rows", "by_kind", "runs"}
    assert {"chip", "system", "mlx", "mlx-lm", "dflash-mlx", "preload", "commit", "load"} <= set(figures["environment"])
    assert figures["about"]["heavy"] == 768
    assert [(row["context"], row["arm"], row["block_size"]) for row in figures["rows"]] == [
        (context, arm, size) for context in (48, 64) for arm, size in (("plain", 1), ("4", 4), ("auto", None))
    ]
    for row in figures["rows"]:
        assert row["speedup"] == pytest.approx(row["tau"] / row["rho"])
        assert row["lossless"]
        assert row["peak_memory"] > 0
        assert (row["draft"] is None) == (row["block_size"] == 1)
    assert sum(run["turn"] >= 0 for run in figures["runs"]) == 2 * 2 * 3
    assert sum(run["parts"] is not None for run in figures["runs"]) == 2 * 2 * 2
    names = {"speedup-by-block.png", "acceptance-by-position.png", "rho-by-context.png"}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 5000


def test_without_a_draft_our_plain_loop_is_measured(cli, tmp_path):
    file = tmp_path / "figures.json"
    assert cli(*COMMAND, "--samples", "1", "--draft-model", "none", "--json", file).code == 0
    assert [row["arm"] for row in json.loads(file.read_text())["rows"]] == ["plain", "1"]


def test_plots_need_rows_with_a_draft(tmp_path):
    assert plots.write([], tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--block-sizes", "4,x"], "--block-sizes x"),
        (["--block-sizes", "0"], "--block-sizes 0"),
        (["--block-sizes", "4,99"], "--block-sizes 99: this draft's blocks have 2 to 16"),
        (["--block-sizes", "auto", "--draft-model", "none"], "--block-sizes auto: there is no draft"),
        (["--context-lengths", "64,y"], "--context-lengths 64,y"),
        (["--context-lengths", "8"], "16 is the least"),
        (["--context-lengths", "16"], "alone has"),
        (["--context-lengths", "100000"], "--context-lengths 100000: 100000 tokens and 8 new ones exceed"),
        (["--dataset", "gsm9k"], "--dataset gsm9k: unknown, there are gsm8k"),
        (["--dataset-file", "x.parquet"], "--dataset-file needs --dataset"),
        (["--dataset", "gsm8k", "--dataset-file", "nowhere.parquet"], "nowhere.parquet"),
        (["--dataset", "gsm8k", "--dataset-file", "x.zip"], ".parquet"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--json", "/nowhere/x.json"], "--json"),
        (["--plots", __file__], "is no folder"),
        (["--heavy", "16"], "--heavy 16"),
        (["--cool-down", "-1"], "--cool-down"),
        (["--prompts", "x", "--dataset", "gsm8k"], "not allowed with"),
    ],
)
def test_what_can_not_be_measured_ends_in_one_line(cli, flags, named):
    done = cli(*COMMAND, *flags)
    assert done.code != 0
    assert not done.out
    assert named in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("text", "named"), [("[1]\n", "line 1"), ("{\n", "not valid JSON"), ("\n", "no prompt")])
def test_a_damaged_file_of_prompts_names_the_line(cli, tmp_path, text, named):
    (tmp_path / "p.jsonl").write_text(text)
    done = cli(*COMMAND, "--prompts", tmp_path / "p.jsonl")
    assert done.code == 1
    assert "p.jsonl" in done.err
    assert named in done.err


@pytest.mark.parametrize(
    ("flags", "library", "extra"),
    [(["--plots", "x"], "matplotlib", "plot"), (["--dataset", "gsm8k"], "datasets", "bench")],
)
def test_a_missing_extra_is_named_before_anything_loads(cli, monkeypatch, flags, library, extra):
    from dflash_mlx import loading

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == library else find(name, *a))
    monkeypatch.setattr(loading, "plan", lambda *a, **k: pytest.fail("the pair was loaded"))
    done = cli(*COMMAND, *flags)
    assert done.code == 1
    assert f"pip install 'dflash-mlx[{extra}]'" in done.err
