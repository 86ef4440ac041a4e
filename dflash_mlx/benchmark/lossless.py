"""Whether the measured texts are plain decoding's own: exact, or the first difference and how near a tie it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..check import Verdict, compare_with_plain
from .prompts import Task
from .runs import PLAIN, Pair, Run, Settings


@dataclass(frozen=True)
class Lossless:
    """The verdict on one arm at one context length.

    Attributes:
        exact: all texts are equal; None where the rule makes the text depend on the draft.
        near_tie: whether rounding explains every difference.
        text: a line for the table, with the place of the worst difference and how many there are; detail: it in full.
    """

    exact: bool | None
    near_tie: bool = False
    text: str = "exact"
    detail: str | None = None

    @property
    def fault(self) -> bool:
        return self.exact is False and not self.near_tie


def verdict(pair: Pair, tasks: Sequence[Task], runs: Sequence[Run], settings: Settings) -> Lossless:
    """Compare the runs of one arm with plain runs of the same tasks; texts that differ are decoded again plainly.

    Args:
        runs: of this arm and of plain mlx-lm. At a temperature our own plain decoding with the same seed is the
            reference, since mlx-lm has no noise by position.
    """
    sampled = settings.sampling.get("temp", 0) > 0
    if sampled and settings.sampling.get("acceptance") == "rejection":
        return Lossless(None, text="n/a", detail="with the rejection rule the text depends on the draft")
    n = settings.max_tokens
    verdicts = []
    for task in tasks:
        ours = _distinct(run.tokens[:n] for run in runs if run.task == task.name and run.arm != PLAIN.label)
        plain = [run.tokens[:n] for run in runs if run.task == task.name and run.arm == PLAIN.label]
        verdicts += [_compare(pair, task, tokens, settings) for tokens in ours if sampled or tokens != plain[0]]
    return _worst([found for found in verdicts if not found.identical])


def _compare(pair: Pair, task: Task, tokens: list[int], settings: Settings) -> Verdict:
    sampling: dict[str, Any] = {**settings.sampling}
    sampling.pop("acceptance", None)
    return compare_with_plain(
        pair.model,
        task.ids,
        tokens,
        max_tokens=settings.max_tokens,
        end_tokens=() if settings.ignore_end else pair.tokenizer.eos_token_ids,
        temp=sampling.pop("temp", 0.0),
        seed=sampling.pop("seed", None),
        sampling=sampling,
        prefill_step_size=settings.prefill_step_size,
    )


def _worst(differences: Sequence[Verdict]) -> Lossless:
    if not differences:
        return Lossless(True)
    worst = min(differences, key=lambda found: (found.near_tie, -_margin(found)))
    several = sum(found.differences for found in differences)
    text = f"{'tie' if worst.near_tie else 'NO,'} at {worst.worst}{f' (1 of {several})' if several > 1 else ''}"
    return Lossless(False, worst.near_tie, text, str(worst))


def _margin(found: Verdict) -> float:
    return math.inf if found.largest_margin is None else found.largest_margin


def _distinct(texts: Any) -> list[list[int]]:
    return [list(text) for text in dict.fromkeys(map(tuple, texts))]
