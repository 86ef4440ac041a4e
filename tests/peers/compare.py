"""Compare this port with other DFlash engines on this machine: same files, same prompts, interleaved.

No test: pytest does not collect it and CI does not run it. It makes a virtual environment for each peer (so it
needs the package index) and takes minutes.

    python tests/peers/compare.py --heavy 16384 --preload /path/of/libopenblas.so.0 --json peers.json

Every engine runs in a process of its own, in float32, on one target folder and one draft folder that all load.
A round is: draft, verify, cut back, text out. `verify` is the target's forward of the same width measured alone in
the same minute, so `rest` = round - verify is what an engine adds: its draft and its overhead (the median over runs,
since a difference of two long times is as noisy as they are). An engine that can't run a pair is listed with its
reason. tau counts all tokens of a round, the target's own included, for every engine alike. `copies` of tokens from
the prompt (dflash-mlx 0.1.8) count as its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEMO = ROOT / "dflash_mlx" / "demo"
# engine -> what pip installs, call by call; None is the interpreter that runs this
MLX = [f"mlx{'' if sys.platform == 'darwin' else '[cpu]'}=={version('mlx')}", f"mlx-lm=={version('mlx-lm')}"]
PEERS: dict[str, list[list[str]] | None] = {
    "plain": None,
    "ours": None,
    "ours with lookup": None,  # the like of an engine that copies
    "dflash": [["--no-deps", "dflash==0.1.0"], MLX],
    "dflash-mlx 0.1.8": [["dflash-mlx==0.1.8", *MLX]],
    "mlx-dspark": [["mlx-dspark", *MLX]],
}


class Worker:
    """An engine in its own process; `refused` says why it can't run the pair."""

    def __init__(self, name: str, python: Path, target: Path, draft: Path, args: argparse.Namespace):
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        environment.pop("LD_PRELOAD", None)
        if args.preload:
            environment["LD_PRELOAD"] = args.preload
        if name.startswith("ours"):
            environment["PYTHONPATH"] = str(ROOT)
        self.name, self.versions, self.blocks, self.refused = name, {}, (), None
        self.log = open(args.work / f"{name.replace(' ', '-')}.log", "w")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [python, HERE / "worker.py", name, target, draft],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, cwd=HERE,
        )  # fmt: skip
        hello = self._read()
        self.refused = hello.get("refused")
        self.blocks, self.versions = tuple(hello.get("blocks", ())), hello.get("versions", {})

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.log.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died (exit {self.process.wait()}); see {self.log.name}")
        return json.loads(line)


def main() -> None:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    pythons = {name: environment(name, args.work / "env") for name in args.engines}
    target = as_float32(args.target, args.work / "target", args.heavy)
    results = []
    for number, draft in enumerate(args.draft):
        folder = as_float32(draft, args.work / f"draft{number}")
        results.append({"draft": draft.name, **compare(args, pythons, target, folder)})
        show(results[-1], args)
    if args.json:
        from dflash_mlx.benchmark import environment as machine

        about = {"heavy": args.heavy, "preload": args.preload, "tokens": args.tokens, "repeat": args.repeat}
        args.json.write_text(json.dumps({"environment": machine(), **about, "drafts": results}, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare this port with other DFlash engines on this machine.")
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="folder in mlx-lm's format")
    parser.add_argument("--draft", type=Path, nargs="+", default=sorted(DEMO.glob("draft*")), help="z-lab's layout")
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--heavy", type=int, help="widen the target's MLPs to so many units, without effect")
    parser.add_argument("--preload", help="library that workers preload, e.g. OpenBLAS")
    parser.add_argument("--blocks", nargs="+", default=["4", "8", "16", "auto"])
    parser.add_argument("--prompts", type=Path, help="text or .jsonl, as for dflash-mlx benchmark; default: built in")
    parser.add_argument("--samples", type=int, default=4, help="at most so many prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, default=HERE / "build", help="for environments and models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.engines = list(dict.fromkeys(["plain", *args.engines]))  # speed-ups need it
    return args


def environment(name: str, folder: Path) -> Path:
    """The Python of an engine; made on first use."""
    if PEERS[name] is None:
        return Path(sys.executable)
    home = folder / name.replace(" ", "-")
    python = home / "bin" / "python"
    if not (home / ".complete").exists():
        print(f"making an environment for {name}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        for packages in PEERS[name] or ():
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (home / ".complete").touch()
    return python


def as_float32(source: Path, folder: Path, heavy: int | None = None) -> Path:
    """A copy of a model that every engine loads in float32, its MLPs widened on request."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    from dflash_mlx.benchmark.heavy import widen, widened_config

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.py", "__pycache__"))
    config = json.loads((source / "config.json").read_text())
    weights = {k: v for file in source.glob("*.safetensors") for k, v in mx.load(str(file)).items()}
    if heavy:
        model = load_model(source)[0]
        widen(model, heavy)
        weights, config = dict(tree_flatten(model.parameters())), widened_config(config, heavy)
    weights = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config |= {name: "float32" for name in ("torch_dtype", "dtype") if name in config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compare(args: argparse.Namespace, pythons: dict[str, Path], target: Path, draft: Path) -> dict[str, Any]:
    """Run everything; the rows, the raw runs and who could not run, with the reason."""
    prompts = token_ids(target, args)
    workers = [Worker(name, python, target, draft, args) for name, python in pythons.items()]
    plain, refused = workers[0], {worker.name: worker.refused for worker in workers if worker.refused}
    blocks = [None if block == "auto" else int(block) for block in args.blocks]
    jobs = [
        (worker, block)
        for worker in workers
        for block in ([1] if worker is plain else blocks)
        if block in worker.blocks
    ]
    for worker in workers:
        for block in blocks if worker is not plain and not worker.refused else ():
            if block not in worker.blocks:
                refused[f"{worker.name}, block {block or 'auto'}"] = "has none that its Python interface offers"
    runs: list[dict[str, Any]] = []
    forwards: dict[tuple[int, int], dict[int, float]] = {}  # (prompt, turn) -> width -> seconds
    for turn in range(-1, args.repeat):  # -1 warms up
        for i, ids in enumerate(prompts[:1] if turn < 0 else prompts):
            for worker, block in jobs if (turn + i) % 2 else jobs[::-1]:
                label = f"{worker.name}, block {block or 'auto'}"
                if label in refused:
                    continue
                result = worker.ask(ids=ids, block=block, tokens=args.tokens)
                if "failed" in result:
                    refused[label] = result["failed"]
                elif turn >= 0:
                    runs.append({"engine": worker.name, "block": block, "prompt": i, "turn": turn, **result})
            widths = {width for run in runs if run["prompt"] == i and run["turn"] == turn for width in run["widths"]}
            forwards[i, turn] = {width: plain.ask(ids=ids, forward=width)["seconds"] for width in sorted(widths)}
    versions = {worker.name: worker.versions for worker in workers}
    for worker in workers:
        worker.close()
    for run in runs:
        alone = forwards[run["prompt"], run["turn"]]
        run["verify"] = statistics.mean(alone[width] for width in run["widths"]) if run["widths"] else None
    rows = [row(runs, worker.name, block, args.tokens) for worker, block in jobs if has(runs, worker, block)]
    return {
        "prompts": len(prompts),
        "rows": rows,
        "refused": refused,
        "versions": versions,
        "forward_seconds": [{"prompt": i, "turn": turn, **alone} for (i, turn), alone in forwards.items()],
        "runs": runs,
    }


def token_ids(target: Path, args: argparse.Namespace) -> list[list[int]]:
    from mlx_lm.utils import load_tokenizer

    from dflash_mlx.benchmark.prompts import built_in, evenly, read_file

    prompts = read_file(args.prompts) if args.prompts else built_in(chat=False)
    tokenizer = load_tokenizer(target)
    return [tokenizer.encode(prompt.text) for prompt in evenly(prompts, args.samples)]


def has(runs: Sequence[dict[str, Any]], worker: Worker, block: int | None) -> bool:
    return any(run["engine"] == worker.name and run["block"] == block for run in runs)


def row(runs: Sequence[dict[str, Any]], engine: str, block: int | None, tokens: int) -> dict[str, Any]:
    """One engine at one block size: each prompt's median over repeats, then totals over prompts."""
    mine = [run for run in runs if (run["engine"], run["block"]) == (engine, block)]
    plain = [run for run in runs if run["engine"] == "plain"]
    texts = {run["prompt"]: run["tokens"][:tokens] for run in plain}
    timed = [run for run in mine if run["verify"] is not None]
    tau = sum(run["timed_tokens"] for run in mine) / sum(run["rounds"] for run in mine)
    seconds, step = token_seconds(mine), token_seconds(plain)
    return {
        "engine": engine, "block": block, "tau": tau, "tps": 1 / seconds, "round_ms": 1000 * tau * seconds,
        "verify_ms": 1000 * statistics.median(run["verify"] for run in timed) if timed else None,
        "rest_ms": 1000 * statistics.median(run["seconds"] / run["rounds"] - run["verify"] for run in timed)
        if timed else None,
        "rho": tau * seconds / step, "speedup": step / seconds,
        "equal": all(run["tokens"][:tokens] == texts[run["prompt"]] for run in mine),
    }  # fmt: skip


def token_seconds(runs: Sequence[dict[str, Any]]) -> float:
    total = tokens = 0.0
    for prompt in {run["prompt"] for run in runs}:
        here = [run for run in runs if run["prompt"] == prompt]
        weight = statistics.mean(run["timed_tokens"] for run in here)
        total += weight * statistics.median(run["seconds"] / run["timed_tokens"] for run in here)
        tokens += weight
    return total / tokens


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    heavy = f", MLPs of {args.heavy}" if args.heavy else ""
    table = Table(
        title=f"{result['draft']}{heavy}: {result['prompts']} prompts, {args.tokens} tokens, {args.repeat} repeats"
    )
    for name in ("engine", "block", "tau", "round", "verify alone", "rest", "rho", "speed-up", "tokens/s", "text"):
        table.add_column(name, justify="right")
    for entry in result["rows"]:
        times = (
            "" if entry[name] is None else f"{entry[name]:.2f} ms" for name in ("round_ms", "verify_ms", "rest_ms")
        )
        table.add_row(
            entry["engine"], str(entry["block"] or "auto"), f"{entry['tau']:.2f}", *times, f"{entry['rho']:.2f}",
            f"{entry['speedup']:.2f}", f"{entry['tps']:.1f}", "equal" if entry["equal"] else "DIFFERS",
        )  # fmt: skip
    console = Console(width=None if Console().is_terminal else 130)
    console.print(table)
    for name, reason in result["refused"].items():
        console.print(f"not run: {name}: {reason}", markup=False)


if __name__ == "__main__":
    main()
