"""Interrupts at every place where Python looks for signals, and what the caches hold afterwards.

`python tests/interrupts.py 1000` strikes so often over all families; `test_interrupts.py` runs a short form. Python
looks for a signal when a function begins and when a call into C returns: a profile function sees both and raises there,
so the n-th place is the same in every run. A second interrupt strikes while the first is cleaned up after.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import matrix
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scripted import plain_tokens
from tiny import make_draft, make_hybrid, make_target

from dflash_mlx import generate_step
from dflash_mlx.decode import Proposal, loop
from dflash_mlx.decode.block_size import AutoBlockSize, FixedBlockSize
from dflash_mlx.decode.caches import cached_tokens
from dflash_mlx.decode.costs import RoundCosts
from dflash_mlx.decode.dflash import DFlashDrafter
from dflash_mlx.target import Target

FAMILIES = {
    "full": lambda: make_target("qwen3"),
    "rotating": lambda: make_hybrid("gpt_oss"),
    "hybrid": lambda: make_hybrid("qwen3_5"),
    "list": lambda: matrix.build("falcon_h1"),
    "conv": lambda: matrix.build("lfm2"),
    "recurrent": lambda: matrix.build("mamba2"),
}
PROMPT = [(7 * i + 3) % 240 for i in range(19)]
TOKENS = 16
WATCHED = ("dflash_mlx", "mlx_lm", "contextlib", os.sep + "mlx" + os.sep + "nn")


class Often(DFlashDrafter):
    """The real draft with its cache and context, but right for a random number of tokens."""

    def __init__(self, draft: Any, script: list[int], seed: int):
        super().__init__(draft)
        self.script, self.rng, self.start = script, random.Random(seed), 0

    def propose(self, request: Any) -> Proposal:
        real = super().propose(request)
        at, n = self.start + len(request.tokens), request.width - 1
        keep = self.rng.choice([0, 1, 3, 5, 7, 7])
        truth = (self.script[at : at + n] + [0] * n)[:n]
        return Proposal(
            mx.array([t if i < keep else (t + 1) % 240 for i, t in enumerate(truth)], mx.int32), real.finite
        )


def mixed(seed: int) -> type[AutoBlockSize]:
    """A choice of widths that changes all the time, plain rounds among them."""

    class Mixed(AutoBlockSize):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.rng = random.Random(seed)

        def next(self, *args: Any, **kwargs: Any) -> Any:
            return FixedBlockSize(self.rng.choice([1, 1, 2, 4, 8])).next(*args, **kwargs)

        def observe(self, *args: Any) -> None:
            pass

    return Mixed


class Striker:
    """Raises at the n-th place from `arm` on; a run that ends before is not struck."""

    def __init__(self, first: int, second: int | None = None):
        self.left, self.second, self.struck, self.places = first, second, 0, 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in WATCHED):
            self.places += 1
            if self.places > self.left:
                self.struck += 1
                raise KeyboardInterrupt(f"{event} in {frame.f_code.co_qualname}, line {frame.f_lineno}")

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Python drops a profile function that raises; for a second strike it is set again where clean-up begins."""

        def again(clean_up: Callable[..., None]) -> Callable[..., None]:
            def entered(*args: Any) -> None:
                if self.struck == 1 and self.second is not None:
                    self.left, self.places = self.second, 0
                    sys.setprofile(self)
                try:
                    clean_up(*args)
                finally:
                    if self.struck:
                        sys.setprofile(None)

            return entered

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "recover", again(loop.recover))
            sys.setprofile(self)
            try:
                yield
            finally:
                sys.setprofile(None)


@cache
def target(family: str) -> tuple[Any, list[int], Any]:
    """A model, what it says and a real draft for it."""
    model = FAMILIES[family]()
    known = family in ("full", "rotating", "hybrid")
    draft = make_draft() if known else matrix.real_draft(Target(model), [0, 1])
    return model, plain_tokens(model, PROMPT, TOKENS + 12), draft


def run(family: str, seed: int, places: int, twice: bool = False) -> str:
    """One text that is struck somewhere, and the turn after it.

    Returns: "held" or "said" (a warning says what the caches hold), or "missed" where the text ended before.
    """
    rng = random.Random(seed)
    model, truth, draft = target(family)
    drafted, auto = rng.random() < 0.85, rng.random() < 0.6
    drafter = Often(draft, [*PROMPT, *truth], seed) if drafted else None
    caches = make_prompt_cache(model) + (draft.make_cache() if drafted else [])
    striker = Striker(rng.randrange(places), rng.randrange(places // 12) if twice else None)
    options = {"prefill_step_size": rng.choice([7, 64]), "max_tokens": rng.choice([TOKENS, TOKENS - 6])}
    if rng.random() < 0.2:
        options["logits_processors"] = [lambda tokens, logits: logits]
    told, emitted = [0], []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if auto:
            patch.setattr("dflash_mlx.api.AutoBlockSize", mixed(seed))
            patch.setattr("dflash_mlx.api.round_costs", lambda *args, **kwargs: RoundCosts())
        elif drafted:
            options["block_size"] = drafter.block_size
        try:
            with striker.armed():
                for token, *_ in generate_step(
                    PROMPT, model, drafter, prompt_cache=caches, prompt_progress_callback=lambda n, _: told.append(n),
                    **options,
                ):  # fmt: skip
                    emitted.append(token)
        except KeyboardInterrupt:
            assert striker.struck
        if not striker.struck:
            return "missed"
    assert emitted == truth[: len(emitted)]
    if any("prompt cache" in str(warning.message) for warning in said):
        return "said"
    length = told[-1] if not emitted else len(PROMPT) + len(emitted)
    goes_on(model, truth, drafter, caches, length)
    return "held"


def goes_on(model: Any, truth: list[int], drafter: Any, caches: list[Any], length: int) -> None:
    """The caches hold the first `length` tokens of the text, and a next turn says what follows."""
    n = len(make_prompt_cache(model))
    assert cached_tokens(caches[:n]) in (length, 0), f"{cached_tokens(caches[:n])} tokens instead of {length}"
    assert {cache.offset for cache in caches[n:]} <= {length}, "the draft's rows"
    text, at = [*PROMPT, *truth], max(length, len(PROMPT)) + 1
    steps = generate_step(text[length:at], model, drafter, max_tokens=5, prompt_cache=caches)
    assert [token for token, *_ in steps] == text[at : at + 5], f"the next turn behind {length} tokens"


def places(family: str) -> int:
    """How many places a text has, about."""
    model, truth, draft = target(family)
    striker = Striker(1 << 60)
    with striker.armed():
        caches = make_prompt_cache(model) + draft.make_cache()
        for _ in generate_step(PROMPT, model, Often(draft, [*PROMPT, *truth], 0), max_tokens=TOKENS,
                               prompt_cache=caches, block_size=4):  # fmt: skip
            pass
    return striker.places


def strike(each: int, families: list[str]) -> tuple[Counter, list[str]]:
    """So many interrupts a family; what was found, and what went wrong."""
    found: Counter = Counter()
    wrong = []
    for family in families:
        span, struck, seed = places(family), 0, 0
        while struck < each:
            twice = seed % 3 == 2
            try:
                outcome = run(family, seed, span, twice)
            except BaseException as error:
                outcome = "wrong"
                wrong.append(f"{family}, seed {seed}: {type(error).__name__}: {error}")
            struck += outcome != "missed"
            found[f"{family} {outcome}"] += 1
            seed += 1
    return found, wrong


if __name__ == "__main__":
    names = sys.argv[2:] or list(FAMILIES)
    found, wrong = strike(int(sys.argv[1]) // len(names), names)
    print(dict(found))
    print("\n".join(wrong))
    sys.exit(bool(wrong))
