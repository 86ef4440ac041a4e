"""The family matrix: every causal language model of the installed mlx-lm, built tiny, driven by drafts.

`python tests/matrix.py --write [--batch] [family ...]` runs it in full (or the batches alone) and writes
`dflash_mlx/pairs/families.json`, which `dflash-mlx models --families` shows; `test_families.py` runs a shorter form and
compares. `families.json` here holds the configs; a module of mlx-lm that is not in it is reported by a test.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # on a CPU each traced shape costs a run of the C++ compiler

import batch_matrix
import mlx.core as mx
import mlx_lm.models
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from random_weights import randomise, slow
from scripted import ScriptedDrafter, plain_tokens

from dflash_mlx import TargetError, generate_step
from dflash_mlx.api import _tokens
from dflash_mlx.check import compare_with_plain
from dflash_mlx.decode import GenerationStats
from dflash_mlx.decode.caches import cache_names
from dflash_mlx.draft import DFlashDraftModel, DraftConfig
from dflash_mlx.target import Target

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "families.json").read_text())
TABLE = Path(__file__).parents[1] / "dflash_mlx" / "pairs" / "families.json"
TOKENS, FEW = 26, 16  # in full, and in the short form


@dataclasses.dataclass
class Outcome:
    """What became of one family: "verified", "lookup only", "refused" (no draft can drive it) or "not built"."""

    status: str
    reason: str | None = None
    caches: list[str] = dataclasses.field(default_factory=list)


def modules() -> list[str]:
    """Every module of mlx_lm.models."""
    return sorted(info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__))


def batched(name: str, full: bool = False) -> str:
    """What requests of this family say in a batch, see `batch_matrix`."""
    return batch_matrix.verdict(slow(build(name)), full)


def build(name: str, seed: int = 0) -> nn.Module:
    """A tiny random float32 model of a module."""
    source = importlib.import_module(f"mlx_lm.models.{name}")
    model = source.Model(source.ModelArgs.from_dict(copy.deepcopy(CONFIGS[name]["config"])))
    return randomise(model, seed)


def run(name: str, full: bool = False) -> Outcome:
    """Drive one family with scripted and real drafts; raises AssertionError where a token or a cache is wrong."""
    if "skip" in CONFIGS[name]:
        return Outcome("not built", CONFIGS[name]["skip"])
    model = build(name)
    caches = cache_names(make_prompt_cache(model))
    target = Target(model)
    taps = [0, len(target.layers) // 2, len(target.layers) - 1]
    prompt = prompt_of(30)
    plain = plain_tokens(model, prompt, 6)
    assert [token for token, *_ in generate_step(prompt, model, max_tokens=6)] == plain, "without a draft"
    try:
        target.require_rewindable(target.make_cache())
        target.check()
    except TargetError as error:
        return Outcome("refused", reason(error), caches)
    try:
        target.check(taps)
    except TargetError as error:
        outcome = Outcome("lookup only", reason(error), caches)
    else:
        outcome = Outcome("verified", None, caches)
    window = CONFIGS[name].get("window") or 24
    lengths = (1, window - 1, window, window + 1, 60) if full else (window - 3,)
    n = TOKENS if full else FEW
    for length in lengths:
        prompt = prompt_of(length)
        truth = plain_tokens(model, prompt, n)
        for block, right in patterns(full):
            tokens = [t.id for t in steps(model, prompt, ScriptedDrafter([*prompt, *truth], right, block, 250), n)]
            same_tokens(model, prompt, tokens)
        if outcome.status == "verified":
            tokens = [t.id for t in steps(model, prompt, real_draft(target, taps), n)]
            if full or tokens != truth:
                same_tokens(model, prompt, tokens)
    for stop in (3, 7) if full else (7,):
        closing_leaves_a_clean_cache(model, prompt, truth, stop)
    return outcome


def reason(error: TargetError) -> str:
    return str(error).partition(": ")[2].partition(", so no draft")[0]


def patterns(full: bool) -> list[tuple[int, Callable[[int], int]]]:
    """Block sizes and how many proposals are right, round by round: every count, none, all; short: some, none, all."""
    if not full:
        return [(8, lambda i: (3, 0, 7)[i % 3])]
    return [(block, lambda i, b=block: i % b) for block in (2, 5, 8, 16)] + [(8, lambda i: 0), (8, lambda i: 7)]


def steps(model: nn.Module, prompt: list[int], draft: Any, n: int) -> Any:
    return _tokens(mx.array(prompt), model, draft, GenerationStats(), max_tokens=n)


def same_tokens(model: nn.Module, prompt: list[int], tokens: list[int]) -> None:
    verdict = compare_with_plain(model, mx.array(prompt), tokens)
    assert verdict.identical or verdict.near_tie, str(verdict)


def closing_leaves_a_clean_cache(model: nn.Module, prompt: list[int], truth: list[int], stop: int) -> None:
    """Stop in the middle of a block, then go on as if nothing had been proposed."""
    cache = make_prompt_cache(model)
    draft = ScriptedDrafter([*prompt, *truth], lambda i: 4, 8, 250)
    tokens = _tokens(mx.array(prompt), model, draft, GenerationStats(), max_tokens=TOKENS, prompt_cache=cache)
    assert [next(tokens).id for _ in range(stop)] == truth[:stop]
    tokens.close()
    rest = generate_step(truth[stop : stop + 1], model, max_tokens=8, prompt_cache=cache)
    rest = [token for token, *_ in rest]
    assert len(rest) == 8
    assert rest == truth[stop + 1 : stop + 9], "after closing early"


def real_draft(target: Target, taps: list[int]) -> DFlashDraftModel:
    """A random draft of the target's sizes, so that taps, embedding and head are really used."""
    config = DraftConfig(
        hidden_size=target.hidden_size, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, vocab_size=target.vocab_size, rms_norm_eps=1e-6, rope_theta=10000.0, block_size=6,
        mask_token_id=3, target_layer_ids=tuple(dict.fromkeys(taps)), layer_types=("full_attention",),
    )  # fmt: skip
    draft = DFlashDraftModel(config)
    mx.eval(draft.parameters())
    return draft


def prompt_of(n: int) -> list[int]:
    return [(7 * i + 3) % 240 for i in range(n)]


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or sorted(CONFIGS)
    old = json.loads(TABLE.read_text())["families"]
    table = {}
    for name in names:
        start = time.perf_counter()
        if "--batch" in sys.argv:
            row = dict(old[name])
        else:
            try:
                outcome = run(name, full=True)
            except AssertionError as error:
                outcome = Outcome("WRONG", str(error)[:300])
            row = dataclasses.asdict(outcome)
        row["batch"] = None if "skip" in CONFIGS[name] else batched(name, full=True)
        table[name] = {key: row[key] for key in ("status", "reason", "batch", "caches") if row.get(key)}
        seconds = time.perf_counter() - start
        print(f"{name}: {row['status']} {row.get('reason') or ''}, batch: {row['batch']} ({seconds:.1f} s)", flush=True)
    counts = {
        status: sum(row["status"] == status for row in table.values())
        for status in ("verified", "lookup only", "refused", "not built", "WRONG")
    }
    print(counts)
    if "--write" in sys.argv:
        import mlx_lm

        rows = {name: row for name, row in sorted({**old, **table}.items()) if name in CONFIGS}
        TABLE.write_text(json.dumps({"mlx_lm": mlx_lm.__version__, "families": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
