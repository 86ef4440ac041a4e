"""`dflash-mlx benchmark`: a table of block sizes against plain mlx-lm, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import Machine, parse
from . import processes
from .options import add_pair_arguments, at_least, json_object, within
from .pair import load_pair
from .progress import progress_bar

if TYPE_CHECKING:
    from ..benchmark import Arm, Report, Task

AUTO = "auto"
BLOCKS = (4, 8, 16)  # measured unless --block-sizes says otherwise, as far as the draft goes
SAMPLING = ("temp", "seed", "top_p", "min_p", "top_k", "acceptance")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.set_defaults(block_size=None)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--block-sizes", help='comma-separated; "auto" lets each round choose, 1 is our loop without a draft; '
        "default: auto and 4, 8, 16"
    )  # fmt: skip
    group.add_argument(
        "--with-lookup", action="store_true", help="each block once more with prompt lookup beside the draft"
    )
    group.add_argument("--max-tokens", "-m", type=at_least(8), default=96, help="a run, default: %(default)s")
    group.add_argument("--repeat", type=at_least(1), default=3, help="timed runs of each prompt, default: %(default)s")
    group.add_argument("--warm-up", type=at_least(0), default=1, help="untimed runs before, default: %(default)s")
    group.add_argument("--cool-down", type=at_least(0, float), default=0.0, help="seconds of rest before each run")
    group.add_argument("--ignore-end", action="store_true", help="go on behind end tokens")
    group.add_argument(
        "--settings", nargs="?", const={}, type=mlx_settings, metavar="NAME=VALUE,...", help="measure in processes of "
        "their own, with and without MLX's settings for this chip, or with and without these"
    )  # fmt: skip
    group.add_argument("--prefill-step-size", type=at_least(1), default=2048, help="default: %(default)s")
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast both models")
    group.add_argument(
        "--heavy", type=at_least(1), metavar="N", help="widen every MLP of the target to N units without changing "
        "what it computes: a tiny pair's acceptance at a large model's cost"
    )  # fmt: skip
    group = parser.add_argument_group("prompts", "built-in chat, code, math and copy prompts unless one is given")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, help="text file, prompts separated by a line of ---, or .jsonl")
    source.add_argument("--dataset", metavar="NAME", help="gsm8k, math500, humaneval, mbpp or mt-bench")
    group.add_argument("--dataset-file", type=Path, metavar="FILE", help="a local copy of it: parquet, jsonl or csv")
    group.add_argument("--samples", type=at_least(1), help="at most so many prompts, evenly spread; 12 of a dataset")
    group.add_argument(
        "--context-lengths", "--context", metavar="N,N", help="pad each prompt with real text to these many tokens"
    )
    group.add_argument("--context-file", type=Path, metavar="FILE", help="text to pad with; default: Python's sources")
    group.add_argument("--system-prompt", help="system message for the chat template")
    group.add_argument("--ignore-chat-template", action="store_true", help="use prompts as they are")
    group.add_argument("--chat-template-config", type=json_object, default={}, metavar="JSON", help="its arguments")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=at_least(0.0, float), default=0.0, help="0 is greedy (default)")
    group.add_argument("--seed", type=at_least(0), default=0, help="default: %(default)s")
    group.add_argument("--top-p", type=within(0, 1), default=0.0, help="0 is off (default)")
    group.add_argument("--min-p", type=within(0, 1), default=0.0, help="0 is off (default)")
    group.add_argument("--top-k", type=at_least(0), default=0, help="0 is off (default)")
    group.add_argument("--acceptance", choices=["match", "rejection"], default="match", help="default: %(default)s")
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write figures, machine, versions and all runs")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots as PNG")


def run(args: argparse.Namespace) -> int:
    from ..errors import DFlashError

    blocks = None if args.block_sizes is None else [_block(text) for text in args.block_sizes.split(",")]
    contexts = [] if args.context_lengths is None else _numbers("--context-lengths", args.context_lengths, 16)
    _check_outputs(args)
    if args.dataset_file and not args.dataset:
        raise DFlashError("--dataset-file needs --dataset, which says what its columns mean")
    if args.dataset:
        from ..benchmark import dataset

        dataset.require(args.dataset, args.dataset_file)

    if args.settings is not None and processes.MARK not in os.environ:
        return _with_and_without(args)

    import mlx.core as mx

    from .. import benchmark

    plan, model, draft, tokenizer = load_pair(args)
    if draft is None and args.draft_model != "none":
        raise DFlashError("there is no draft to measure; give --draft-model, or none to measure plain decoding alone")
    arms = _arms(blocks, draft, args.with_lookup)
    if args.dtype:
        for part in (model, draft):
            if hasattr(part, "set_dtype"):
                part.set_dtype(getattr(mx, args.dtype))
    if args.heavy:
        benchmark.widen(model, args.heavy)
    _check_room({f"--context-lengths {length}": length for length in contexts}, args.max_tokens, model)
    tasks = _tasks(args, contexts, tokenizer)
    _check_room({f"prompt {task.name!r}": task.ids.shape[0] for task in tasks}, args.max_tokens, model)
    settings = benchmark.Settings(
        args.max_tokens, args.repeat, args.warm_up, args.cool_down, args.ignore_end, args.prefill_step_size,
        {name: getattr(args, name) for name in SAMPLING}, keep_costs=True,
    )  # fmt: skip
    about = {"model": args.model, "draft": plan.draft, "heavy": args.heavy, "dtype": args.dtype, "notes": plan.notes}
    with progress_bar("runs") as progress:
        report = benchmark.run(benchmark.Pair(model, draft, tokenizer), tasks, arms, settings, about, progress)
    _show(args, report, len({task.name for task in tasks}), plan.draft)
    return 1 if any(found.fault for found in report.verdicts) else 0


def mlx_settings(text: str) -> dict[str, str]:
    """An argparse type: MLX's settings."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_and_without(args: argparse.Namespace) -> int:
    """Each repeat twice, in processes of their own, since MLX reads its settings when it starts."""
    from rich.console import Console

    from ..errors import DFlashError

    if args.plots:
        raise DFlashError("--plots: can't be drawn of --settings, which compares processes; leave one of them out")
    machine = Machine.here()
    wanted = args.settings or {name: os.environ.get(name, value) for name, value in machine.settings().items()}
    if not wanted:
        raise DFlashError(
            f"--settings: none are known to help on {machine}; "
            "name some to try, e.g. --settings MLX_MAX_MB_PER_BUFFER=512"
        )
    found = processes.compare(args.argv, wanted, args.repeat, same_text=args.temp == 0 or args.acceptance == "match")
    console = Console(width=None if Console().is_terminal else 150)
    console.print(found.table())
    if args.json:
        args.json.write_text(json.dumps(found.to_dict(), indent=2) + "\n")
    return 0 if found.good else 1


def _block(text: str) -> int | None:
    return None if text.strip() == AUTO else _numbers("--block-sizes", text, 1)[0]


def _numbers(flag: str, text: str, least: int) -> list[int]:
    from ..errors import DFlashError

    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise DFlashError(f"{flag} {text}: expected numbers like {'4,8,16' if least == 1 else '512,4096'}") from None
    if values[0] < least:
        raise DFlashError(f"{flag} {values[0]}: is out of range, {least} is the least")
    return values


def _check_outputs(args: argparse.Namespace) -> None:
    """Before an hour of measuring, not behind it."""
    from ..errors import DFlashError

    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise DFlashError(f"--json {args.json}: can't be written; give a file in a folder that exists")
    if args.plots:
        from ..benchmark import plots

        plots.require()
        if args.plots.exists() and not args.plots.is_dir():
            raise DFlashError(f"--plots {args.plots}: is no folder")


def _arms(blocks: list[int | None] | None, draft: Any, with_lookup: bool) -> list[Arm]:
    from ..benchmark import Arm
    from ..decode.lookup import PromptLookup, as_drafter
    from ..errors import DFlashError

    if with_lookup and (draft is None or isinstance(draft, PromptLookup)):
        raise DFlashError("--with-lookup: there is no draft to set it beside; --draft-model lookup measures it alone")
    widest = 1 if draft is None else as_drafter(draft).block_size
    if blocks is None:
        blocks = [1] if draft is None else [*(size for size in BLOCKS if size <= widest), None]
    for size in blocks:
        if (size is None and draft is None) or (size or 1) > widest:
            limit = "there is no draft" if draft is None else f"this draft's blocks have 2 to {widest} tokens"
            raise DFlashError(f"--block-sizes {size or AUTO}: {limit} (1 is our loop without a draft)")
    sizes = sorted(set(blocks), key=lambda size: size or widest + 1)
    arms = [Arm(AUTO if size is None else str(size), size) for size in sizes]
    beside = [arm for arm in arms if with_lookup and arm.block_size != 1]
    return [*arms, *(Arm(f"{arm.label}+lookup", arm.block_size, lookup=True) for arm in beside)]


def _tasks(args: argparse.Namespace, contexts: list[int], tokenizer: Any) -> list[Task]:
    from ..benchmark import dataset, prompts
    from .prompt import render

    if args.dataset:
        chosen = dataset.load(args.dataset, args.samples or 12, args.dataset_file)
    else:
        chat = tokenizer.has_chat_template and not args.ignore_chat_template
        chosen = prompts.read_file(args.prompts) if args.prompts else prompts.built_in(chat)
        chosen = prompts.evenly(chosen, args.samples)
    return prompts.tasks(chosen, contexts, lambda text: render(tokenizer, text, args), tokenizer, args.context_file)


def _check_room(lengths: dict[str, int], max_tokens: int, model: Any) -> None:
    """Raise `DFlashError` for a prompt that leaves the target no room to answer."""
    from ..errors import DFlashError
    from ..target.args import context_length

    positions = context_length(model)
    for what, length in lengths.items():
        if positions and length + max_tokens > positions:
            raise DFlashError(
                f"{what}: {length} tokens and {max_tokens} new ones exceed the target's {positions} positions"
            )


def _show(args: argparse.Namespace, report: Report, prompts: int, draft: str | None) -> None:
    from rich.console import Console

    heavy = f", MLPs of {args.heavy}" if args.heavy else ""
    title = f"{args.model}{heavy} with {draft or 'no draft'}: {prompts} prompts, {args.max_tokens} tokens"
    console = Console(width=None if Console().is_terminal else 150)
    for table in report.tables(f"{title}, {args.repeat} repeats"):
        console.print(table)
    for note in report.notes():
        print(note, file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    if args.plots:
        from ..benchmark import plots

        for file in plots.write(report.rows, args.plots):
            print(f"wrote {file}", file=sys.stderr)
