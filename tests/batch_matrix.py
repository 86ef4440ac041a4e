"""Whether requests of a family may share a batch: mlx-lm's batch generator against plain mlx-lm, row by row.

Fed together at unequal lengths, in batches of two, three and four (a mask that meets the KV heads in place of the rows
broadcasts where their numbers are equal), and joined late: fresh, with caches of their own, and handed over behind the
first tokens. Rows leave at different times, in their prompts too, and go on alone from the caches that they leave.
Part of the matrix; `serve` reads the verdict.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.models.cache import make_prompt_cache

SIZES = (2, 3, 4)
LENGTHS = (37, 5, 61, 18)  # of the prompts, over the windows of the tiny models and below
SAYS = (9, 14, 6, 11)  # tokens of the rows
CLOSE = 1e-3  # how far log-probabilities may be apart; seen are 2e-5 where a family is right, 0.5 where it is not


class Differs(Exception):
    """A row says something else than alone."""


class Row:
    """A prompt and what mlx-lm says to it alone."""

    def __init__(self, model: nn.Module, prompt: list[int], n: int):
        said = list(plain_step(mx.array(prompt), model, max_tokens=n))
        self.prompt, self.whole = prompt, [*prompt, *(token for token, _ in said)]
        self.rows = {len(prompt) + i: row for i, (_, row) in enumerate(said)}  # log-probabilities by position

    def check(self, position: int, token: int, logprobs: mx.array, where: str) -> None:
        apart = mx.abs(logprobs - self.rows[position]).max().item()
        if token != self.whole[position] or not apart < CLOSE:  # NaN is not close
            raise Differs(f"other text {where}")


def verdict(model: nn.Module, full: bool = True) -> str:
    """What goes wrong in a batch, "verified" where nothing does.

    Args:
        model: with weights that show it (`random_weights.slow`). full: every size; else joined late only, fewer tokens,
            and only those go on that were taken out.
    """
    if missing := [type(c).__name__ for c in make_prompt_cache(model) if not hasattr(c, "merge")]:
        return f"its {missing[0]} does not merge"
    rows = [Row(model, prompt_of(i, n), SAYS[i] if full else (SAYS[i] + 2) // 2) for i, n in enumerate(LENGTHS)]
    try:
        for size in SIZES if full else ():
            together(model, rows[:size])
        late(model, rows, full)
    except Differs as why:
        return str(why)
    except Exception as error:  # a family's forward raises what it likes
        return f"raises {type(error).__name__}"
    return "verified"


def together(model: nn.Module, rows: list[Row]) -> None:
    """All at once; each leaves when it has said its part."""
    batch = Batch(model)
    for row in rows:
        batch.add(row)
    batch.run()


def late(model: nn.Module, rows: list[Row], full: bool) -> None:
    """One after the other, in every state that the server has them in."""
    batch = Batch(model, turns=full)
    batch.add(rows[0])
    batch.run(until=len(rows[0].prompt) + 2)
    batch.add(rows[1])
    batch.add(rows[2], held=40)  # an earlier prompt began alike
    batch.add(rows[3], held=len(rows[3].prompt) + 2)  # it ran alone so far
    batch.run(until=len(rows[0].prompt) + 4)
    batch.take_out(rows[0])
    leaving = Row(model, prompt_of(4, 50), 1)
    batch.add(leaving)
    batch.run(steps=2)
    batch.take_out(leaving)
    batch.run()


class Batch:
    """mlx-lm's generator; whatever it says is compared, with `turns` what its rows say when they go on as well."""

    def __init__(self, model: nn.Module, turns: bool = True):
        self.model, self.turns = model, turns
        self.generator = BatchGenerator(model, prefill_step_size=16)
        self.rows: dict[int, Row] = {}
        self.ends: dict[int, int] = {}  # tokens so far, those that are not fed yet included

    def add(self, row: Row, held: int = 0) -> None:
        """Feed a row, from caches that hold its first `held` tokens."""
        caches, end = None, max(len(row.prompt), held + 1)
        if held:
            caches = make_prompt_cache(self.model)
            self.model(mx.array([row.whole[:held]]), cache=caches)
        (uid,) = self.generator.insert_segments(
            [[row.whole[held:end]]],
            max_tokens=[len(row.whole) - end],
            caches=[caches],
            all_tokens=[row.whole[:held]],
        )
        self.rows[uid], self.ends[uid] = row, end

    def run(self, until: int | None = None, steps: int = 1000) -> None:
        """Go on until a row is so long, or for so many steps, or to the end."""
        while self.rows and steps and until not in self.ends.values():
            size = len(self.rows)
            for response in self.generator.next()[1]:
                row = self.rows[response.uid]
                row.check(self.ends[response.uid], response.token, response.logprobs, f"with {size} rows")
                self.ends[response.uid] += 1
                if response.finish_reason is not None:
                    del self.rows[response.uid], self.ends[response.uid]
                    if self.turns:
                        self.goes_on(row, response.prompt_cache, response.all_tokens)
            steps -= 1

    def take_out(self, row: Row) -> None:
        uid = next(uid for uid, other in self.rows.items() if other is row)
        caches, tokens = self.generator.remove([uid], return_prompt_caches=True)[uid]
        del self.rows[uid], self.ends[uid]
        assert 0 < len(tokens) < len(row.whole)
        self.goes_on(row, caches, list(tokens))

    def goes_on(self, row: Row, caches: list[Any], tokens: list[int]) -> None:
        """What a row leaves is good for a next turn."""
        assert tokens == row.whole[: len(tokens)], "its tokens are not those that were fed"
        turn = Row(self.model, [*tokens, 7, 8, 9], 2)
        said = plain_step(mx.array(turn.prompt[len(tokens) :]), self.model, max_tokens=2, prompt_cache=caches)
        for position, (token, logprobs) in enumerate(said, len(turn.prompt)):
            turn.check(position, token, logprobs, "in the turn behind a batch")


def prompt_of(i: int, n: int) -> list[int]:
    step = (7, 11, 13, 17, 19)[i]
    return [(step * j + 3 + i) % 240 for j in range(n)]
