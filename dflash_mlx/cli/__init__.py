"""`dflash-mlx`: one module a command, loaded only when it runs, so that --help is quick.

A user's mistake ends in one line on stderr and exit code 1; anything else keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__, settings
from ..device import limit
from ..errors import DFlashError

# command -> what it does; the module of the same name has add_arguments(parser) and run(args) -> exit code
COMMANDS = {
    "generate": "generate text, with a DFlash draft where there is one",
    "chat": "talk in the terminal; each turn feeds only what is new",
    "serve": "serve it to OpenAI-compatible clients",
    "convert": "convert a draft to MLX, quantise it, write it back, or inspect it",
    "models": "list published pairs, or the mlx-lm families that a draft can drive",
    "benchmark": "measure DFlash against plain mlx-lm on this machine",
}
DECODING = ("generate", "chat", "serve", "benchmark")  # those that MLX's settings are made for


class Parser(argparse.ArgumentParser):
    """argparse with its errors in one line, without the usage above them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def make_parser() -> tuple[Parser, dict[str, ModuleType]]:
    """The whole command line, and the module of each command."""
    parser = Parser(prog="dflash-mlx", description="DFlash speculative decoding on MLX.")
    parser.add_argument("--version", action="version", version=f"dflash-mlx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    modules = {}
    for name, what in COMMANDS.items():
        modules[name] = importlib.import_module(f".{name}", __name__)
        modules[name].add_arguments(commands.add_parser(name, help=what, description=what.capitalize() + "."))
    return parser, modules


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser, modules = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    args.argv = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    if args.command in DECODING and (line := settings.apply(os.environ)):
        print(line, file=sys.stderr)
    try:
        return modules[args.command].run(args)
    except DFlashError as error:
        return _fail(str(error))
    except RuntimeError as error:  # of mlx-lm's own loop, which `benchmark` and `--check` run
        if line := limit(error):
            return _fail(line)
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left, e.g. `| head`
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'input/output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    print(f"dflash-mlx: error: {line}", file=sys.stderr)
    return 1
