"""From runs to figures: for each prompt the median over its repeats, then totals over prompts. Knows no model.

Medians first, so that a hiccup of the machine in one run does not move a total; totals then, so that figures
reconcile: speed-up = (tokens / second with the draft) / (tokens / second plainly) = tau / rho.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..decode import GenerationStats
from ..errors import DFlashError
from .runs import PARTS, PLAIN, Run


@dataclass(frozen=True)
class Row:
    """One arm at one context length.

    Attributes:
        block_size: 1 is plain (see `arm`: mlx-lm or our loop), None auto. context: None for prompts as they are.
        prompts: how many were timed; a text that ends within a round or two can't be.
        prompt_tokens: mean over prompts. tps: tokens a second without the prompt.
        speedup: tps against plain mlx-lm's; tau: tokens a round; rho: time of a round in plain steps; round_ms.
        spread: (fastest - slowest) / tps of whole repeats; speedup_range: the repeats' least and greatest speed-up.
        draft, verify, host: parts of a round in plain steps, from profiled runs: two syncs a round, so their
            sum is a little more than rho. None where nothing was profiled.
        acceptance: share of the rounds that offered slot i (from 1) and kept its token.
        widths: how many rounds verified how many rows.
        first_token_seconds: median over runs. prefill_tps: prompt tokens a second, median over runs.
        peak_memory: GB (1e9 bytes), the greatest of the runs.
        draft_off: why the draft was not used in some run, or not to the end.
    """

    arm: str
    block_size: int | None
    context: int | None
    prompts: int
    prompt_tokens: float
    tau: float
    rho: float
    speedup: float
    speedup_range: tuple[float, float]
    tps: float
    spread: float
    round_ms: float
    draft: float | None
    verify: float | None
    host: float | None
    acceptance: list[float]
    widths: dict[int, int]
    first_token_seconds: float
    prefill_tps: float
    peak_memory: float
    draft_off: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows(runs: Sequence[Run], block_sizes: dict[str, int | None]) -> list[Row]:
    """A row for each context length and arm, in the order of the runs.

    Args:
        block_sizes: of each arm, by label.

    Raises `DFlashError` when the texts end too early to time.
    """
    result = []
    for context in _distinct(run.context for run in runs):
        here = [run for run in runs if run.context == context]
        for arm in block_sizes:
            result.append(_row(here, arm, block_sizes[arm]))
    return result


def by_kind(runs: Sequence[Run], arms: Iterable[str]) -> list[dict[str, Any]]:
    """Speed-up and tau of each arm for each kind of prompt; None where all its texts were too short to time."""
    result = []
    for context in _distinct(run.context for run in runs):
        for kind in _distinct(run.kind for run in runs):
            here = [run for run in _timed(runs) if run.kind == kind and run.context == context]
            plain = _of(here, PLAIN.label)
            for arm in arms:
                entry = {"context": context, "kind": kind, "arm": arm, "tau": None, "speedup": None}
                if plain and (mine := _of(here, arm)):
                    entry |= {"tau": _tau(mine), "speedup": _token_seconds(plain) / _token_seconds(mine)}
                result.append(entry)
    return result


def _row(runs: Sequence[Run], arm: str, block_size: int | None) -> Row:
    mine, plain = _of(_timed(runs), arm), _of(_timed(runs), PLAIN.label)
    if not mine or not plain:
        raise DFlashError(
            "the texts end after a round or two, too early to time them; try --ignore-end or other prompts"
        )
    tau, seconds, step = _tau(mine), _token_seconds(mine), _token_seconds(plain)
    rates = [1 / _token_seconds(turn) for turn in _turns(mine)]
    ratios = [_token_seconds(b) / _token_seconds(a) for a, b in zip(_turns(mine), _turns(plain), strict=True)]
    pooled = GenerationStats(
        accepted=[kept for run in mine for kept in run.accepted],
        block_sizes=[width for run in mine for width in run.block_sizes],
    )
    draft, verify, host = _parts([run for run in runs if run.arm == arm and run.turn < 0], step)
    return Row(
        arm=arm,
        block_size=block_size,
        context=runs[0].context,
        prompts=len({run.task for run in mine}),
        prompt_tokens=statistics.mean(run.prompt_tokens for run in mine),
        tau=tau,
        rho=tau * seconds / step,
        speedup=step / seconds,
        speedup_range=(min(ratios), max(ratios)),
        tps=1 / seconds,
        spread=(max(rates) - min(rates)) * seconds,
        round_ms=1000 * tau * seconds,
        draft=draft,
        verify=verify,
        host=host,
        acceptance=pooled.acceptance_by_position,
        widths=dict(sorted(Counter(pooled.block_sizes).items())),
        first_token_seconds=statistics.median(run.first_token_seconds for run in mine),
        prefill_tps=statistics.median(_prefill_tps(run) for run in mine),
        peak_memory=max(run.peak_memory for run in mine) / 1e9,
        draft_off=next((run.draft_off for run in mine if run.draft_off), None),
    )


def _timed(runs: Sequence[Run]) -> list[Run]:
    """The timed runs, of the prompts whose text was long enough with every arm."""
    short = {(run.task, run.context) for run in runs if run.turn >= 0 and not run.rounds}
    return [run for run in runs if run.turn >= 0 and (run.task, run.context) not in short]


def _of(runs: Iterable[Run], arm: str) -> list[Run]:
    return [run for run in runs if run.arm == arm]


def _turns(runs: Sequence[Run]) -> list[list[Run]]:
    return [[run for run in runs if run.turn == turn] for turn in sorted({run.turn for run in runs})]


def _token_seconds(runs: Sequence[Run]) -> float:
    """Seconds a token: each prompt's median over its repeats, prompts weighted by their tokens."""
    total = tokens = 0.0
    for task in _distinct(run.task for run in runs):
        mine = [run for run in runs if run.task == task]
        weight = statistics.mean(run.timed_tokens for run in mine)
        total += weight * statistics.median(run.seconds / run.timed_tokens for run in mine)
        tokens += weight
    return total / tokens


def _tau(runs: Sequence[Run]) -> float:
    return sum(run.timed_tokens for run in runs) / sum(run.rounds for run in runs)


def _prefill_tps(run: Run) -> float:
    return (run.prompt_tokens - 1) / run.prefill_seconds if run.prefill_seconds else 0.0


def _parts(profiled: Sequence[Run], step: float) -> list[float | None]:
    rounds = sum(run.rounds for run in profiled)
    if not rounds:
        return [None] * len(PARTS)
    return [sum(run.parts[i] for run in profiled if run.parts) / rounds / step for i in range(len(PARTS))]


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
