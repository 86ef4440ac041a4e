"""Prove on this machine that the draft changes no token: plain mlx-lm decodes the same text, and picks at each place.

The text is forced on mlx-lm token by token, so that it is judged everywhere and not up to the first difference. On a
GPU a block forward may round differently from single steps; then a token that differs must sit at a near-tie of the
target, within what `rounding` measures there, and the verdict names the worst.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.generate import generation_stream, wired_limit

from .decode.filters import Filters
from .decode.sampling import TokenPicker
from .rounding import Rounding


@dataclass(frozen=True)
class Verdict:
    """The comparison of two token lists.

    Attributes:
        tokens: how many were compared; first_difference: index of the first that differs, or None.
        ours, plain: the tokens there, None where that text had ended. margin: how much better plain's token
            scored there than ours, in logits.
        tie: the margin that rounding can turn round at the worst difference.
        reference: what was compared with. plain_tps: its speed, tokens a second without the prompt.
        differences: how many tokens differ; faults: how many of them rounding does not explain.
        worst: index of the one with the largest margin, what rounding does not explain first; largest_margin: there.
        wide_forward_off: mlx-lm's own forward of several rows is further from its single steps than rounding takes it.
    """

    tokens: int
    first_difference: int | None
    ours: int | None
    plain: int | None
    margin: float | None
    tie: float | None
    reference: str
    plain_tps: float
    differences: int = 0
    faults: int = 0
    worst: int | None = None
    largest_margin: float | None = None
    wide_forward_off: bool = False

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains every difference."""
        return not self.identical and self.faults == 0

    def __str__(self) -> str:
        if self.identical:
            return f"identical to plain decoding ({self.tokens} tokens, {self.reference})"
        head = f"differs from plain decoding ({self.reference})"
        if self.largest_margin is None:
            longer = "ours goes on" if self.plain is None else "plain decoding goes on"
            return f"{head}: after {self.worst} tokens {longer}"
        cause = "a near-tie that rounding explains" if self.near_tie else "NOT a near-tie: this is a fault, report it"
        if self.wide_forward_off:
            cause += "; mlx-lm's own forward of several tokens is further from its single steps than rounding takes it"
        several = f"{self.differences} of {self.tokens} tokens, the first " if self.differences > 1 else ""
        margin = "margin between them" if self.differences == 1 else f"largest margin, at token {self.worst},"
        place = f"{several}token {self.first_difference}: {self.ours} against {self.plain}"
        said = f"the target's {margin} is {self.largest_margin:.3g} ({cause}, limit {self.tie:.3g})"
        return f"{head} at {place}; {said}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "near_tie": self.near_tie}


@dataclass
class _Forced:
    """A sampler for mlx-lm that picks as the target does, notes it, and goes on with the text that is compared."""

    tokens: Sequence[int]
    pick: Callable[[mx.array, int], mx.array]  # log-probabilities [1, V], index of the token -> pick [1]
    picks: list[mx.array] = field(default_factory=list)

    def __call__(self, logprobs: mx.array) -> mx.array:
        i = len(self.picks)
        self.picks.append(self.pick(logprobs, i))
        if i >= len(self.tokens):
            return self.picks[-1]
        return mx.depends([mx.array([self.tokens[i]], mx.uint32)], self.picks[-1:])[0]  # computed with the step


def compare_with_plain(
    model: nn.Module,
    prompt: mx.array,
    tokens: Sequence[int],
    *,
    max_tokens: int | None = None,
    end_tokens: Collection[int] = (),
    temp: float = 0.0,
    seed: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    logits_processors: Sequence[Any] = (),
    **options: Any,
) -> Verdict:
    """Force a text on plain mlx-lm and compare each token with its pick.

    Args:
        prompt: `[n]` ids. tokens: what was generated with the draft. options: cache options of both runs.
        max_tokens: limit of that run, so that a text which ended too early is found; default: `len(tokens)`.
        temp, seed, sampling: of a sampled run (`sampling` holds top_p and its like). mlx-lm's logits are then picked
            from with our noise, since it has none by position.
    """
    picker = TokenPicker(temp, seed, Filters(**(sampling or {})), logits_processors=tuple(logits_processors or ()))
    judge = _Judge(picker, cast(list[int], prompt.tolist()), list(tokens))
    reference = "mlx-lm generate_step" if temp == 0 else "mlx-lm's logits, our noise of the same seed"
    sampler, count, limit = _Forced(tokens, judge.pick), 0, max_tokens or max(len(tokens), 1)
    processors = [*picker.logits_processors, judge.see] if temp > 0 else list(picker.logits_processors)
    steps = plain_step(
        prompt, model, max_tokens=limit, sampler=sampler, logits_processors=processors or None, **options
    )
    first = time.perf_counter()
    with wired_limit(model, [cast(Any, generation_stream)]):
        for i, (token, _) in enumerate(steps):
            if i == 0:
                first = time.perf_counter()
            count += 1
            pick = cast(int, sampler.picks[i].item())
            if i >= len(tokens) or pick != tokens[i]:
                judge.found[i] = pick
            if i >= len(tokens) or token in end_tokens:
                break
    seconds = time.perf_counter() - first
    tps = (count - 1) / seconds if count > 1 else 0.0
    if longer := count != len(tokens):  # one text goes on behind the end of the other
        judge.found.setdefault(min(count, len(tokens)), None)
    if not judge.found:
        return Verdict(count, None, None, None, None, None, reference, tps)
    start = min(judge.found)
    ours, plain = tokens[start] if start < len(tokens) else None, judge.found[start]
    if longer:
        place = max(judge.found)
        return Verdict(count, start, ours, plain, None, None, reference, tps, len(judge.found), 1, place)
    rounding = Rounding(model, judge.prompt, judge.tokens[: max(judge.found) + 1], judge.see_rows, **options)
    judged = [(not judge.explained(rounding, i), judge.margins[i], i) for i in judge.found]
    faults, (_, largest, worst) = sum(fault for fault, *_ in judged), max(judged)
    return Verdict(
        count, start, ours, plain, judge.margins[start], rounding.limit(worst), reference, tps, len(judged), faults,
        worst, largest, not rounding.explains,
    )  # fmt: skip


class _Judge:
    """Picks of the target for a text, and how far one pick is from another."""

    def __init__(self, picker: TokenPicker, prompt: list[int], tokens: list[int]):
        self.picker, self.prompt, self.tokens = picker, prompt, tokens
        self.logits: mx.array | None = None
        self.found: dict[int, int | None] = {}  # token that differs -> plain's pick, None where plain's text had ended
        self.margins: dict[int, float] = {}
        self.swaps: dict[int, bool] = {}

    def see(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The last processor: a seeded pick is made from the logits, which a sampler is not given."""
        self.logits = logits
        return logits

    def pick(self, logprobs: mx.array, i: int) -> mx.array:
        """The pick `[1]` of token i."""
        if not self.picker.seeded:
            return mx.argmax(logprobs, axis=-1)
        assert self.logits is not None
        return mx.argmax(self._scores(self.logits, i), axis=-1)

    def see_rows(self, i: int, single: mx.array, wide: list[mx.array]) -> None:
        """Note how much better plain's pick scores than token i, and whether a wide forward makes the same swap."""
        if i in self.found:
            scores, token, pick = self._processed(single, i)[0], self.tokens[i], self.found[i]
            self.margins[i] = cast(float, (scores[pick] - scores[token]).item())
            self.swaps[i] = any(mx.argmax(self._processed(row, i), axis=-1).item() == token for row in wide)

    def explained(self, rounding: Rounding, i: int) -> bool:
        """Whether rounding explains the difference at token i.

        A filter cuts: a token just inside or outside has no finite margin, and is explained where mlx-lm's own wide
        forward, right but for rounding, makes the same swap.
        """
        cut = self.margins[i] == math.inf and rounding.explains and self.swaps[i]
        return cut or self.margins[i] <= rounding.limit(i)

    def _processed(self, logits: mx.array, i: int) -> mx.array:
        """What token i is picked by, `[1, V]` float32 in units of logits, from the model's own logits `[V]`."""
        before, logits = mx.array([*self.prompt, *self.tokens[:i]], mx.int32), logits[None]
        for process in self.picker.logits_processors:
            logits = process(before, logits)
        return self.picker.temp * self._scores(logits, i) if self.picker.seeded else logits.astype(mx.float32)

    def _scores(self, logits: mx.array, i: int) -> mx.array:
        noise = self.picker.noise(len(self.prompt) + i, 1, logits.shape[-1])
        assert noise is not None
        return self.picker.scores(logits, noise.coin) + noise.gumbel
