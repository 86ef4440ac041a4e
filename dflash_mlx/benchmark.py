"""Measure DFlash against plain mlx-lm: interleaved runs of the same prompts, medians, ratios.

Knows models and prompts; the terminal is `cli.benchmark`'s.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.generate import generation_stream, wired_limit

from .decode import GenerationStats
from .generation import stream_generate

# Of our own writing: chat, code, mathematics, and text that copies from itself.
PROMPTS = {
    "code": "def merge_sorted(left, right):\n    result = []\n    i = j = 0\n    while i < len(left):\n",
    "class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "chat": "A friend asks how a bicycle stays upright while it rolls. Explain it to her in a few sentences.",
    "maths": "A train leaves at 9:40 and covers 84 km at 56 km/h. When does it arrive? Work it out step by step.",
    "copy": "Repeat this list and add one entry:\n- alpha = 1\n- beta = 2\n- gamma = 3\n- alpha = 1\n- beta = 2\n",
}


@dataclass(frozen=True)
class Row:
    """One way of decoding, medians over prompts and repeats.

    Attributes:
        block_size: 1 is plain mlx-lm. tau: tokens a round. rho: time of a round in plain steps.
        speedup: tau / rho, equal to the ratio of tokens a second. lossless: tokens equal plain mlx-lm's.
        draft_ms, verify_ms, host_ms: parts of a round, from a separate profiled run (it syncs twice a round).
        spread: (slowest - fastest) / median of the tokens a second over repeats.
    """

    block_size: int
    tau: float
    rho: float
    speedup: float
    tps: float
    spread: float
    first_token_seconds: float
    acceptance: list[float]
    lossless: bool
    draft_ms: float | None = None
    verify_ms: float | None = None
    host_ms: float | None = None


@dataclass
class _Run:
    tps: float
    first: float
    tokens: list[int]
    stats: GenerationStats | None = None


def run(
    model: nn.Module,
    draft: Any,
    tokenizer: Any,
    prompts: Sequence[mx.array],
    block_sizes: Sequence[int],
    max_tokens: int,
    repeat: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Decode every prompt plainly and at every block size, `repeat` times, interleaved, after a warm-up.

    Args:
        prompts: token ids `[n]` each. block_sizes: widths above 1.

    Returns:
        The plain row, then one row a block size. End tokens do not end a run, so that lengths agree.
    """
    widths = [1, *block_sizes]
    runs: dict[int, list[_Run]] = {width: [] for width in widths}
    total, done = len(prompts) * (repeat + 1) * len(widths), 0
    plain: dict[tuple[int, int], _Run] = {}
    for i, prompt in enumerate(prompts):
        for turn in range(repeat + 1):
            for width in widths:
                result = (
                    _plain(model, prompt, max_tokens)
                    if width == 1
                    else _dflash(model, draft, tokenizer, prompt, width, max_tokens)
                )
                if turn:  # the first turn compiles and warms up
                    runs[width].append(result)
                    if width == 1:
                        plain[i, turn] = result
                done += 1
                progress(done, total)
    reference = [plain[i, turn].tokens for i in range(len(prompts)) for turn in range(1, repeat + 1)]
    steps = [1 / run.tps for run in runs[1]]
    rows = [_row(width, runs[width], steps, reference) for width in widths]
    return [rows[0], *(_with_parts(row, model, draft, tokenizer, prompts, max_tokens) for row in rows[1:])]


def environment() -> dict[str, str]:
    """Machine and versions that a figure belongs to."""
    device = mx.device_info() if mx.metal.is_available() else {}
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "device": str(device.get("device_name", mx.default_device())),
        **{name: version(name) for name in ("mlx", "mlx-lm", "dflash-mlx")},
    }


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows and environment as plain JSON values."""
    return {"environment": environment(), "rows": [asdict(row) for row in rows]}


def _plain(model: nn.Module, prompt: mx.array, max_tokens: int) -> _Run:
    start = time.perf_counter()
    first = start
    tokens: list[int] = []
    with wired_limit(model, [cast(Any, generation_stream)]):
        for token, _ in cast(Iterator[tuple[int, mx.array]], plain_step(prompt, model, max_tokens=max_tokens)):
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)
    return _Run((len(tokens) - 1) / (time.perf_counter() - first), first - start, tokens)


def _dflash(
    model: nn.Module, draft: Any, tokenizer: Any, prompt: mx.array, width: int, max_tokens: int, **options: Any
) -> _Run:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    endless = TokenizerWrapper(getattr(tokenizer, "_tokenizer", tokenizer))
    endless.eos_token_ids = set()
    tokens, stats, start, first = [], GenerationStats(), time.perf_counter(), 0.0
    for response in stream_generate(
        model, endless, prompt, max_tokens, draft, block_size=width, stats=stats, **options
    ):
        first = first or time.perf_counter()
        tokens.append(response.token)
    return _Run((len(tokens) - 1) / (time.perf_counter() - first), first - start, tokens, stats)


def _row(width: int, runs: Sequence[_Run], steps: Sequence[float], reference: Sequence[list[int]]) -> Row:
    tps = statistics.median(run.tps for run in runs)
    stats = [run.stats for run in runs if run.stats is not None]
    taus = [s.tau for s in stats] or [1.0]
    rhos = [tau / (run.tps * step) for run, step, tau in zip(runs, steps, taus, strict=False)] or [1.0]
    shares = [s.acceptance_by_position for s in stats]
    return Row(
        block_size=width,
        tau=statistics.median(taus),
        rho=statistics.median(rhos) if width > 1 else 1.0,
        speedup=statistics.median(run.tps * step for run, step in zip(runs, steps, strict=True)),
        tps=tps,
        spread=(max(r.tps for r in runs) - min(r.tps for r in runs)) / tps,
        first_token_seconds=statistics.median(run.first for run in runs),
        acceptance=[statistics.mean(column) for column in zip(*shares, strict=False)],
        lossless=all(run.tokens == tokens for run, tokens in zip(runs, reference, strict=True)),
    )


def _with_parts(
    row: Row, model: nn.Module, draft: Any, tokenizer: Any, prompts: Sequence[mx.array], max_tokens: int
) -> Row:
    parts: dict[str, list[float]] = {"draft_ms": [], "verify_ms": [], "host_ms": []}
    for prompt in prompts:
        stats = _dflash(model, draft, tokenizer, prompt, row.block_size, max_tokens, profile=True).stats
        assert stats is not None
        for name, values in parts.items():
            seconds = getattr(stats, name.replace("_ms", "_seconds"))
            values.append(1000 * seconds / max(stats.rounds, 1))
    return Row(**{**asdict(row), **{name: statistics.median(values) for name, values in parts.items()}})
