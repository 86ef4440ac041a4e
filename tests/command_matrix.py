"""Every family through `serve` and `benchmark`, from a folder as a user has it.

`python tests/command_matrix.py [family ...]` says which fail; `test_families.py` runs those whose arguments are a
wrapper's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import matrix
from scripted import plain_tokens
from serving import save_tokenizer
from tiny import save_target

from dflash_mlx.cli import main as command
from dflash_mlx.cli import make_parser
from dflash_mlx.loading import plan
from dflash_mlx.serve.dialects.completion import Completion
from dflash_mlx.serve.engine import Engine
from dflash_mlx.serve.provider import Provider

# mlx-lm itself loads no folder of these: transformers, asked for the tokenizer, takes their config for another model's.
UNLOADABLE = ("deepseek_v41", "gear", "nemotron-nas", "telechat3")
PROMPTS = [[(step * i + 3) % 240 for i in range(n)] for step, n in ((7, 21), (11, 9))]
SAYS = 8


def run(name: str, folder: Path) -> None:
    """Raises AssertionError where a command does not do its work."""
    model = matrix.build(name)
    target = save_target(folder / name, model, matrix.CONFIGS[name]["config"])
    save_tokenizer(target, template=None)
    serve(target, [plain_tokens(model, prompt, SAYS) for prompt in PROMPTS])
    prompts = folder / "prompts.txt"
    prompts.write_text("two and two")
    flags = ["--block-sizes", "1", "--max-tokens", SAYS, "--repeat", "1", "--warm-up", "0", "--prompts", prompts]
    code = command(list(map(str, ["benchmark", "--model", target, "--draft-model", "none", *flags])))
    assert code == 0, f"benchmark ended with {code}"


def serve(target: Path, expected: list[list[int]]) -> None:
    """Two requests at once are answered with the expected tokens."""
    args = make_parser()[0].parse_args(["serve", "--model", str(target), "--draft-model", "none"])
    engine = Engine(Provider(args, plan(args.model, args.draft_model)), args)
    try:
        engine.loaded.wait()
        if engine.load_error is not None:
            raise engine.load_error

        def ask(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": SAYS, "logprobs": 1}
            reply = Completion(engine, body, "text").whole(lambda: False)
            return reply["choices"][0]["logprobs"]["token_ids"]

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(ask, PROMPTS)) == expected
        assert engine.provider.one_by_one != "a batch failed"
    finally:
        engine.stop_and_join()


def main() -> None:
    names = sys.argv[1:] or [name for name, entry in matrix.CONFIGS.items() if "skip" not in entry]
    names = [name for name in names if name not in UNLOADABLE]
    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                run(name, Path(folder))
        except (Exception, SystemExit) as error:  # whatever a family raises, the others are to be run too
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} ran; failed: {', '.join(failed) or 'none'}")
    sys.stdout.flush()
    os._exit(bool(failed))  # engines leave parked threads


if __name__ == "__main__":
    main()
