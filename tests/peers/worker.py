"""One engine in its own process and environment, told line by line what to run. Started by `compare.py`.

Reads one JSON object a line from stdin, answers with one a line on stdout; what an engine prints itself goes to
stderr. Imports nothing but the engine it is asked for. Knows how to call each engine, no statistics.

An engine is a class with `blocks` (what it can be pinned to; None is its own automatic choice) and
`run(ids, block, tokens) -> Rounds, widths`. End tokens never end a run, and no round is cut by the limit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import mlx.core as mx


class Rounds:
    """When each round came out, taken at one fixed place of it, so that two times are whole rounds apart.

    Figures begin with the first round: engines differ in what they have queued when the prefill's token comes out.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ends: list[int] = []  # tokens out behind each round; the first entry is the prefill's token
        self.tokens: list[int] = []

    def add(self, tokens: list[int], opens: bool) -> None:
        """Take tokens; `opens` says that they begin a round."""
        if opens:
            self.times.append(time.perf_counter())
            self.ends.append(0)
        self.tokens += tokens
        self.ends[-1] = len(self.tokens)

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": self.times[-1] - self.times[1], "rounds": len(self.times) - 2,
            "timed_tokens": self.ends[-1] - self.ends[1], "tokens": self.tokens,
        }  # fmt: skip


Result = tuple[Rounds, list[int]]


class Plain:
    """mlx-lm itself, and the target's forward alone."""

    blocks = (1,)
    packages = ("mlx", "mlx-lm")

    def __init__(self, target: str, draft: str):
        from mlx_lm import load

        self.model, self.tokenizer = load(target)[:2]

    def run(self, ids: list[int], block: int | None, tokens: int) -> Result:
        from mlx_lm import stream_generate

        self.tokenizer.eos_token_ids, rounds = set(), Rounds()
        for response in stream_generate(self.model, self.tokenizer, ids, tokens):
            rounds.add([response.token], opens=True)
        return rounds, [1] * (tokens - 1)

    def forward(self, ids: list[int], width: int, repeat: int = 9) -> float:
        """Median seconds of one forward of `width` rows behind `ids`, the argmax included."""
        from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

        cache = make_prompt_cache(self.model)
        mx.eval(self.model(mx.array([ids]), cache=cache))
        rows, times = mx.array([ids[:1] * width]), []
        for _ in range(repeat + 2):
            start = time.perf_counter()
            mx.eval(mx.argmax(self.model(rows, cache=cache), axis=-1))
            times.append(time.perf_counter() - start)
            trim_prompt_cache(cache, width)
        return sorted(times[2:])[repeat // 2]


class Ours:
    blocks = (None, 4, 8, 16)
    packages = ("mlx", "mlx-lm")  # run from the checkout
    lookup = False

    def __init__(self, target: str, draft: str):
        from mlx_lm import load

        from dflash_mlx import load_draft

        self.model, self.tokenizer = load(target)[:2]
        self.tokenizer.eos_token_ids = set()
        self.draft = load_draft(draft, self.model)

    def run(self, ids: list[int], block: int | None, tokens: int) -> Result:
        from dflash_mlx.api import stream_generate
        from dflash_mlx.decode import GenerationStats

        rounds, stats, opens = Rounds(), GenerationStats(), True
        responses = stream_generate(
            self.model, self.tokenizer, ids, tokens + 64, self.draft, block_size=block, lookup=self.lookup, stats=stats
        )
        for response in responses:
            rounds.add([response.token], opens)
            opens = not response.from_draft  # a round's last token is the target's own
            if opens and len(rounds.tokens) >= tokens:
                break
        responses.close()
        return rounds, stats.block_sizes


class OursWithLookup(Ours):
    lookup = True


class Reference:
    """z-lab's `dflash`, its MLX file. It takes repos only, so its download is replaced by the folder."""

    blocks = (4, 8, 16)
    packages = ("dflash", "mlx", "mlx-lm")

    def __init__(self, target: str, draft: str):
        import dflash.model_mlx as reference
        from mlx_lm import load

        reference.snapshot_download = lambda path, **_: path
        self.reference = reference
        self.model, self.tokenizer = load(target)[:2]
        self.tokenizer.eos_token_ids = set()
        self.draft = reference.load_draft(draft)

    def run(self, ids: list[int], block: int | None, tokens: int) -> Result:
        rounds = Rounds()
        responses = self.reference.stream_generate(
            self.model, self.draft, self.tokenizer, mx.array(ids), block_size=block, max_tokens=tokens + 64
        )
        for response in responses:  # one a round, the first token before them
            rounds.add(response.tokens, opens=True)
            if len(rounds.tokens) >= tokens:
                break
        responses.close()
        return rounds, [block or 0] * (len(rounds.times) - 1)


class Bstnxbt:
    """`dflash-mlx` of PyPI; its copying of n-grams from the prompt is always on, its adaptive block is `None`."""

    blocks = (None, 4, 8, 16)
    packages = ("dflash-mlx", "mlx", "mlx-lm")

    def __init__(self, target: str, draft: str):
        from dflash_mlx.runtime.bundle import load_runtime_bundle
        from dflash_mlx.runtime.context import build_offline_runtime_context

        self.contexts = {mode: build_offline_runtime_context(verify_mode=mode) for mode in ("dflash", "adaptive")}
        self.bundle = load_runtime_bundle(
            model_ref=target, draft_ref=draft, draft_quant="none", verify_config=self.contexts["dflash"].verify
        )

    def run(self, ids: list[int], block: int | None, tokens: int) -> Result:
        from dflash_mlx.engine.events import TokenEvent
        from dflash_mlx.runtime import stream_dflash_generate

        rounds, cycles = Rounds(), -1
        events = stream_dflash_generate(
            target_model=self.bundle.target_model,
            target_ops=self.bundle.target_ops,
            tokenizer=self.bundle.tokenizer,
            draft_model=self.bundle.draft_model,
            draft_backend=self.bundle.draft_backend,
            prompt_tokens_override=ids,
            max_new_tokens=tokens + 64,
            block_tokens=block,
            stop_token_ids=[],
            runtime_context=self.contexts["adaptive" if block is None else "dflash"],
        )
        for event in events:
            if not isinstance(event, TokenEvent):
                continue
            if event.fallback_ar:
                raise RuntimeError(f"decodes plainly: {event.fallback_reason}")
            opens, cycles = event.cycles_completed != cycles, event.cycles_completed
            if opens and len(rounds.tokens) >= tokens:
                break
            rounds.add([int(event.token_id)], opens)
        events.close()
        return rounds, [] if block is None else [block] * (len(rounds.times) - 1)


class Dspark:
    """`mlx-dspark` in its DFlash mode; `None` is its calibrated cap. Its draft always fills the full block."""

    blocks = (None, 4, 8, 16)
    packages = ("mlx-dspark", "mlx", "mlx-lm")

    def __init__(self, target: str, draft: str):
        from mlx_dspark import generate
        from mlx_dspark.load import load_dflash, load_target

        generate.eos_token_ids = lambda tokenizer: set()
        self.generate, self.paths = generate.dflash_generate, (target, draft)
        self.target, self.tokenizer = load_target(target, require_tap=True)
        self.draft = load_dflash(draft, quantize=False)[0]
        self.draft.bind(self.target.model)
        self.controller: Any = None

    def run(self, ids: list[int], block: int | None, tokens: int) -> Result:
        if block is None and self.controller is None:
            from mlx_dspark.calibrate import calibrate

            target, draft = self.paths
            with tempfile.TemporaryDirectory() as folder:
                self.controller = calibrate(
                    self.target, self.draft, mode="dflash", target_repo=target, drafter_repo=draft, cache_dir=folder
                )
        rounds, widths = Rounds(), []

        def on_round(drafted: int, committed: int, **_: Any) -> None:
            rounds.add([0] * committed, opens=True)  # it tells tokens at the end only
            widths.append(drafted + 1)

        result = self.generate(
            self.target,
            self.tokenizer,
            self.draft,
            prompt_ids=ids,
            max_new_tokens=tokens,
            max_draft_tokens=None if block is None else block - 1,
            cap_controller=self.controller if block is None else None,
            on_round=on_round,
        )
        rounds.tokens = result.token_ids
        return rounds, widths[1:]


ENGINES: dict[str, Any] = {
    "plain": Plain, "ours": Ours, "ours with lookup": OursWithLookup,
    "dflash": Reference, "dflash-mlx 0.1.8": Bstnxbt, "mlx-dspark": Dspark,
}  # fmt: skip


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if "forward" in request:
        return {"seconds": engine.forward(request["ids"], request["forward"])}
    rounds, widths = engine.run(request["ids"], request["block"], request["tokens"])
    return {**rounds.figures(), "widths": widths}


def main() -> None:
    name, target, draft = sys.argv[1:]
    replies, sys.stdout = sys.stdout, sys.stderr

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        engine = ENGINES[name](target, draft)
    except Exception as error:  # each engine refuses in its own way; the reason belongs in the table
        return reply({"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"})
    reply({"blocks": engine.blocks, "versions": {package: version(package) for package in engine.packages}})
    for line in sys.stdin:
        try:
            reply(answer(engine, json.loads(line)))
        except Exception as error:
            reply({"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})


if __name__ == "__main__":
    main()
