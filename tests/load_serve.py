"""Load: 200 requests, 8 at a time, on this server and on plain mlx_lm.server, in turns. Run by hand:

    python tests/load_serve.py [--model FOLDER --draft-model FOLDER] [--requests 200] [--at-once 8]

Every request must be answered, memory must be back within 2 % of what it was after the warm-up. Both servers run
all the time; they take turns in slices, so that what else this machine does hits both.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
from serving import ServerProcess

from dflash_mlx import demo

SLICES = 4
FIELDS = {"max_tokens": 48, "logit_bias": {"0": -100}}  # no end token, so that both write as much


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the bundled pair in float32")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(demo_in_float32(Path(folder)))
        with (
            ServerProcess("--model", model, "--draft-model", args.draft_model, "--log-level", "WARNING") as ours,
            ServerProcess("--model", model, plain=True) as theirs,
        ):
            return compare(ours, theirs, args.requests, args.at_once)


def demo_in_float32(folder: Path) -> Path:
    """mlx-lm's server needs a folder."""
    target = folder / "demo32"
    shutil.copytree(demo.TARGET, target)
    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(target / "model.safetensors")).items()}
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    return target


def compare(ours: ServerProcess, theirs: ServerProcess, requests: int, at_once: int) -> int:
    seconds = {ours: 0.0, theirs: 0.0}
    answered = {ours: 0, theirs: 0}
    ways: dict[str, int] = {}
    load(ours, range(80), at_once)
    load(theirs, range(80), at_once)
    before = memory(ours)
    share = requests // SLICES
    for part in range(SLICES):
        numbers = range(1000 + part * share, 1000 + (part + 1) * share)
        for server in (ours, theirs) if part % 2 else (theirs, ours):
            start = time.perf_counter()
            replies = load(server, numbers, at_once)
            seconds[server] += time.perf_counter() - start
            answered[server] += sum(reply["usage"]["completion_tokens"] == FIELDS["max_tokens"] for reply in replies)
            for reply in replies if server is ours else ():
                ways[reply["dflash"]["ran"]] = ways.get(reply["dflash"]["ran"], 0) + 1
    after = memory(ours)
    total = share * SLICES
    for name, server in (("dflash-mlx serve", ours), ("mlx_lm.server", theirs)):
        rate = answered[server] * FIELDS["max_tokens"] / seconds[server]
        print(f"{name}: {answered[server]} of {total} answered, {seconds[server]:.1f} s, {rate:.1f} tokens/s")
    print(f"ran: {ways}; {seconds[theirs] / seconds[ours]:.2f}x the throughput of mlx_lm.server")
    grown = {name: after[name] / before[name] - 1 for name in before}
    print("memory:", ", ".join(f"{name} {before[name] / 1e6:.1f} MB, {grown[name]:+.1%}" for name in before))
    return 0 if answered[ours] == total and all(share <= 0.02 for share in grown.values()) else 1


def load(server: ServerProcess, numbers: range, at_once: int) -> list[dict]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(lambda i: server.complete(f"class Node{i}:\n    def __init__(self):\n", **FIELDS), numbers)
        )


def memory(server: ServerProcess) -> dict[str, float]:
    """Bytes that MLX holds without the prompt caches, which have a bound of their own, and that the process holds."""
    server.until_idle()
    time.sleep(0.5)
    lines = [line.split() for line in server.request("GET", "/metrics")[1].splitlines() if line[0] != "#"]
    figures = {line[0]: float(line[-1]) for line in lines}
    active = figures["dflash_active_memory_bytes"] - figures["dflash_prompt_cache_bytes"]
    resident = subprocess.run(["ps", "-o", "rss=", "-p", str(server.process.pid)], capture_output=True, text=True)
    return {"active": active, "resident": float(resident.stdout) * 1024}


if __name__ == "__main__":
    sys.exit(main())
