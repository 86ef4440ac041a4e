"""`dflash-mlx benchmark`: a table of block sizes against plain mlx-lm, on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_pair_arguments, at_least
from .progress import progress_bar

if TYPE_CHECKING:
    from ..benchmark import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--block-sizes", default="4,8,16", help="comma-separated, default: %(default)s")
    group.add_argument("--max-tokens", "-m", type=at_least(8), default=96, help="a run, default: %(default)s")
    group.add_argument("--repeat", type=at_least(1), default=3, help="runs after the warm-up, default: %(default)s")
    group.add_argument("--prompts", type=Path, help="text file, prompts separated by a line of ---")
    group.add_argument("--context", type=at_least(1), help="repeat each prompt up to so many tokens")
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast both models")
    group.add_argument("--json", type=Path, metavar="FILE", help="also write all figures")
    parser.set_defaults(block_size=None)


def run(args: argparse.Namespace) -> int:
    from ..errors import DFlashError

    texts = _prompts(args.prompts)
    try:
        sizes = sorted({int(size) for size in args.block_sizes.split(",")} - {1})
    except ValueError:
        raise DFlashError(f"--block-sizes {args.block_sizes}: expected numbers like 4,8,16") from None

    import mlx.core as mx

    from .. import benchmark
    from ..prompt import encode
    from .generate import load_pair

    plan, model, draft, tokenizer = load_pair(args)
    if draft is None:
        raise DFlashError("there is no draft to measure; give --draft-model")
    assert plan.block_size is not None
    if wrong := [size for size in sizes if not 2 <= size <= plan.block_size]:
        raise DFlashError(f"--block-sizes {wrong[0]}: this draft's blocks have 2 to {plan.block_size} tokens")
    if args.dtype:
        for part in (model, *([draft] if plan.draft_folder else [])):
            part.set_dtype(getattr(mx, args.dtype))
    prompts = [_repeated(encode(tokenizer, text), args.context) for text in texts]
    with progress_bar("runs") as progress:
        rows = benchmark.run(model, draft, tokenizer, prompts, sizes, args.max_tokens, args.repeat, progress)
    _table(
        rows, f"{args.model} with {plan.draft}, {len(prompts)} prompts, {args.max_tokens} tokens, {args.repeat} runs"
    )
    if args.json:
        args.json.write_text(json.dumps(benchmark.to_dict(rows), indent=2) + "\n")
    return 0 if all(row.lossless for row in rows) else 1


def _prompts(file: Path | None) -> list[str]:
    from ..benchmark import PROMPTS
    from ..errors import DFlashError

    if file is None:
        return list(PROMPTS.values())
    texts = [text.strip("\n") for text in file.read_text(encoding="utf-8").split("\n---\n")]
    if not (texts := [text for text in texts if text]):
        raise DFlashError(f"{file} holds no prompt")
    return texts


def _repeated(ids: Any, length: int | None) -> Any:
    import mlx.core as mx

    if length is None:
        return ids
    return mx.tile(ids, -(-length // ids.shape[0]))[:length]


def _table(rows: list[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    names = (
        "block",
        "tokens/s",
        "spread",
        "speed-up",
        "tau",
        "rho",
        "draft",
        "verify",
        "host",
        "first token",
        "lossless",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        parts = (row.draft_ms, row.verify_ms, row.host_ms)
        table.add_row(
            "plain" if row.block_size == 1 else str(row.block_size),
            f"{row.tps:.1f}", f"{row.spread:.0%}", f"{row.speedup:.2f}", f"{row.tau:.2f}", f"{row.rho:.2f}",
            *("" if part is None else f"{part:.1f} ms" for part in parts),
            f"{row.first_token_seconds * 1000:.0f} ms", "yes" if row.lossless else "NO",
        )  # fmt: skip
    Console(width=None if Console().is_terminal else 140).print(table)
