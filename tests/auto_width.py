"""The chosen block against pinned ones, for real: no test, a measurement.

    LD_PRELOAD=.../openblas-pthread/libopenblas.so.0 python tests/auto_width.py --draft demo2

Each prompt is decoded with every arm in turn, forwards and then backwards, so that a drift of the machine meets all
alike; one request of each arm goes before. Costs are learned in this process from nothing.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx

import dflash_mlx
from dflash_mlx.benchmark.heavy import widen

PROMPTS = Path(__file__).with_name("unseen_prompts.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="demo", help="demo or demo2")
    parser.add_argument("--heavy", type=int, default=16384, help="units of the target's MLPs, 0: as it is")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--arms", default="auto,1,2,4,8,16")
    args = parser.parse_args()
    model, draft, tokenizer = dflash_mlx.load("demo")
    if args.draft != "demo":
        draft = dflash_mlx.load_draft(args.draft, dtype=mx.float32)
    if args.heavy:
        widen(model, args.heavy)
    arms = [None if arm == "auto" else int(arm) for arm in args.arms.split(",")]
    prompts = PROMPTS.read_text().split("---\n")[: args.samples]
    seconds: Counter[int | None] = Counter()
    widths: Counter[int] = Counter()
    for turn, prompt in enumerate([prompts[-1], *prompts]):
        for arm in arms if turn % 2 else arms[::-1]:
            start = time.perf_counter()
            ids = tokenizer.encode(prompt.rstrip("\n"))
            stats = dflash_mlx.GenerationStats()
            steps = dflash_mlx.generate_step(
                ids, model, draft if arm != 1 else None, block_size=arm, max_tokens=args.tokens, stats=stats
            )
            for i, _ in enumerate(steps):
                start = time.perf_counter() if i == 0 else start
            if turn:
                seconds[arm] += time.perf_counter() - start
                widths.update(stats.block_sizes if arm is None else [])
    best = min((arm for arm in arms if arm is not None), key=lambda arm: seconds[arm])
    for arm in arms:
        speed = len(prompts) * (args.tokens - 1) / seconds[arm]
        print(
            f"{arm or 'auto':>5}: {speed:6.1f} tokens/s, {seconds[best] / seconds[arm]:.3f} of the best pinned ({best})"
        )
    print("auto chose", ", ".join(f"{width} in {n} rounds" for width, n in widths.most_common(6)))


if __name__ == "__main__":
    main()
