"""Paired, interleaved runs: every prompt plainly with mlx-lm and with the draft, in alternating order.

A rate is taken over whole rounds between two moments of the same kind: a round's first token comes out while
the next round is already queued. So the window holds exactly the rounds it counts, on a device that works
ahead as on one that does not. Knows models and the clock, nothing of statistics or tables.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import stream_generate as plain_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..api import stream_generate
from ..decode import GenerationStats, as_drafter
from .prompts import Task

PARTS = ("draft_seconds", "verify_seconds", "host_seconds")


@dataclass(frozen=True)
class Arm:
    """One way of decoding: block size None is auto, 1 our loop without a draft; `plain` is mlx-lm itself.

    With `lookup` proposals are copied from the text where it repeats itself.
    """

    label: str
    block_size: int | None = None
    plain: bool = False
    lookup: bool = False


PLAIN = Arm("plain", 1, plain=True)


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        max_tokens: of a run; a run with a draft ends with the round that reaches it.
        repeat: timed runs of each prompt and arm. warm_up: untimed runs of each arm before them.
        cool_down: seconds of rest before each run. ignore_end: whether end tokens are passed over.
        sampling: temp, seed, top_p, ..., acceptance of `stream_generate`.
        keep_costs: as there.
    """

    max_tokens: int = 96
    repeat: int = 3
    warm_up: int = 1
    cool_down: float = 0.0
    ignore_end: bool = False
    prefill_step_size: int = 2048
    sampling: dict[str, Any] = field(default_factory=dict)
    keep_costs: bool = False


@dataclass(frozen=True)
class Run:
    """One decoded prompt; times in seconds, memory in bytes.

    Attributes:
        turn: which repeat it belongs to; -1 is the profiled run, whose rate means nothing (two syncs a round).
        tokens: all that came out.
        seconds, timed_tokens, rounds: the window that rates are taken from; 0 when the text ended too soon.
        accepted, block_sizes: draft tokens kept and rows verified, round by round, within the window.
        first_token_seconds: from the call to the first token. prefill_seconds: to the end of the prompt but its
            last token.
        parts: draft, verify and host seconds within the window, of a profiled run.
        draft_off: why the draft was not used, or not to the end.
    """

    task: str
    kind: str
    context: int | None
    arm: str
    turn: int
    prompt_tokens: int
    tokens: list[int]
    seconds: float
    timed_tokens: int
    rounds: int
    accepted: list[int]
    block_sizes: list[int]
    first_token_seconds: float
    prefill_seconds: float
    peak_memory: int
    parts: list[float] | None = None
    draft_off: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Pair:
    """What is measured. `draft` None leaves only plain decoding."""

    model: nn.Module
    draft: Any
    tokenizer: TokenizerWrapper


def measure(
    pair: Pair,
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Run]:
    """Run every task with every arm, `settings.repeat` times, then once more profiled where there is a draft.

    Neighbours alternate in order, so that a drift of the machine meets all arms alike.
    """
    turns = list(_schedule(tasks, arms, settings))
    runs = []
    for done, (turn, task, arm) in enumerate(turns):
        progress(done, len(turns))
        time.sleep(settings.cool_down)
        result = run(pair, task, arm, settings, turn)
        if turn is not None:
            runs.append(result)
    progress(len(turns), len(turns))
    return runs


def run(pair: Pair, task: Task, arm: Arm, settings: Settings, turn: int | None = 0) -> Run:
    """Decode one task with one arm; turn -1 profiles."""
    tokenizer = copy.copy(pair.tokenizer)
    if settings.ignore_end:
        tokenizer.eos_token_ids = set()
    mx.clear_cache()
    mx.reset_peak_memory()
    stats = GenerationStats()
    window = _Window(stats, task.ids.shape[0])
    if arm.plain:
        window.take(_plain(pair.model, tokenizer, task, settings, window.prefill), settings.max_tokens, steady=True)
    else:
        window.take(
            stream_generate(
                pair.model,
                tokenizer,
                task.ids,
                settings.max_tokens + 3 * _widest(pair.draft),  # no round in the window is cut short by a limit
                pair.draft,
                block_size=1 if pair.draft is None else arm.block_size,
                lookup=arm.lookup,
                stats=stats,
                profile=turn == -1,
                prefill_step_size=settings.prefill_step_size,
                prompt_progress_callback=window.prefill,
                keep_costs=settings.keep_costs,
                **settings.sampling,
            ),
            settings.max_tokens,
        )
    rounds, seconds, timed_tokens, parts = window.figures()
    return Run(
        task.name, task.kind, task.context, arm.label, 0 if turn is None else turn, task.ids.shape[0],
        window.tokens, seconds, timed_tokens, rounds, stats.accepted[1 : rounds + 1], stats.block_sizes[1 : rounds + 1],
        window.marks[0].time - window.start, window.prefilled - window.start, mx.get_peak_memory(),
        parts if turn == -1 else None,
        None if arm.block_size == 1 else stats.draft_off_reason,
    )  # fmt: skip


def _schedule(tasks: Sequence[Task], arms: Sequence[Arm], settings: Settings) -> Iterator[tuple[int | None, Task, Arm]]:
    """(turn, task, arm) in order; turn None warms up: once for each context length, since lengths compile apart."""
    firsts = list({task.context: task for task in reversed(tasks)}.values())
    for task in reversed(firsts):
        for _ in range(settings.warm_up):
            yield from ((None, task, arm) for arm in arms)
    for turn in range(settings.repeat):
        for i, task in enumerate(tasks):
            yield from ((turn, task, arm) for arm in (arms if (turn + i) % 2 == 0 else arms[::-1]))
    for task in tasks:
        yield from ((-1, task, arm) for arm in arms if arm.block_size != 1)


def _plain(
    model: nn.Module, tokenizer: TokenizerWrapper, task: Task, settings: Settings, progress: Callable[[int, int], None]
) -> Iterator[Any]:
    options = settings.sampling
    mx.random.seed(options.get("seed") or 0)
    names = ("top_p", "min_p", "top_k")
    sampler = make_sampler(options.get("temp", 0.0), **{name: options[name] for name in names if name in options})
    return plain_generate(
        model,
        tokenizer,
        task.ids,
        settings.max_tokens,
        sampler=sampler,
        prefill_step_size=settings.prefill_step_size,
        prompt_progress_callback=progress,
    )


def _widest(draft: Any) -> int:
    return 1 if draft is None else as_drafter(draft).block_size


@dataclass(frozen=True)
class _Mark:
    """The first token of a round: when, after how many tokens, and the profiled parts so far."""

    time: float
    tokens: int
    parts: list[float]


class _Window:
    """Watches a run's responses and says which rounds can be timed."""

    def __init__(self, stats: GenerationStats, prompt_tokens: int):
        self.stats, self.prompt_tokens = stats, prompt_tokens
        self.tokens: list[int] = []
        self.marks: list[_Mark] = []
        self.last = 0  # mark that the window ends with
        self.start = self.prefilled = time.perf_counter()

    def prefill(self, done: int, total: int) -> None:
        if done == self.prompt_tokens - 1:
            self.prefilled = time.perf_counter()

    def take(self, responses: Any, wanted: int, steady: bool = False) -> None:
        """Consume responses up to the end of the round that reaches `wanted` tokens, and of so many that one is timed.

        Args:
            steady: whether another round is queued even behind the last, as mlx-lm does.
        """
        opens, ended = True, False  # a round's last token is the target's own
        for response in responses:
            if opens:
                parts = [getattr(self.stats, name) or 0.0 for name in PARTS]
                self.marks.append(_Mark(time.perf_counter(), len(self.tokens), parts))
            self.tokens.append(response.token)
            opens, ended = not response.from_draft, response.finish_reason is not None
            if opens and len(self.tokens) >= wanted and len(self.marks) >= 3 and not ended:
                break
        responses.close()
        # Behind the round that ended a text nothing was queued: the window ends one round before.
        self.last = max(len(self.marks) - (1 if steady or not ended else 2), 0)

    def figures(self) -> tuple[int, float, int, list[float]]:
        """(rounds, seconds, tokens, parts) of the window.

        It begins with the first round's first token: when the prefill's token comes out, no block may be queued yet.
        """
        if self.last < 2:
            return 0, 0.0, 0, [0.0] * len(PARTS)
        first, last = self.marks[1], self.marks[self.last]
        following = self.marks[self.last + 1 :]
        emitted = (following[0].tokens if following else len(self.tokens)) - self.marks[2].tokens
        parts = [after - before for before, after in zip(first.parts, last.parts, strict=True)]
        return self.last - 1, last.time - first.time, emitted, parts
