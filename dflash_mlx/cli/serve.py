"""`dflash-mlx serve`: mlx-lm's server with DFlash behind it; OpenAI-compatible."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .options import add_pair_arguments, at_least, json_object, within
from .pair import settle_pair

KEY_VARIABLE = "DFLASH_API_KEY"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(text: str) -> int:
    """An argparse type: bytes, as 500000, 500MB or 2G."""
    digits = text.rstrip("KMGBkmgb ")
    unit = text[len(digits) :].strip().upper()
    try:
        return int(float(digits) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 2GB") from None


def port(text: str) -> int:
    """An argparse type: a port number; 0 for a free one."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no port, 0 to 65535")
    return int(text)


def words(text: str) -> list[str]:
    """An argparse type: names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def hosts(text: str) -> list[str]:
    """An argparse type: host names or origins with commas between them, as browsers send them."""
    return [name.lower().removesuffix("/") for name in words(text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    _add_decoding(parser)
    _add_caches(parser)
    _add_access(parser)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding (defaults of requests that do not say)")
    group.add_argument("--temp", type=at_least(0.0, float), default=0.0, help="temperature (default: 0, greedy)")
    group.add_argument("--top-p", type=within(0, 1), default=1.0, help="default: 1, off")
    group.add_argument("--top-k", type=at_least(0), default=0, help="default: 0, off")
    group.add_argument("--min-p", type=within(0, 1), default=0.0, help="default: 0, off")
    group.add_argument("--max-tokens", type=at_least(1), default=512, help="default: %(default)s")
    blocks = group.add_mutually_exclusive_group()
    blocks.add_argument("--block-size", type=at_least(1), help="tokens of a block; default: chosen round by round")
    blocks.add_argument("--num-draft-tokens", type=at_least(0), help="mlx-lm's name for block size less one")
    group.add_argument("--chat-template", default="", help="use this template instead of the tokenizer's")
    group.add_argument("--use-default-chat-template", action="store_true", help="where the tokenizer has none")
    group.add_argument(
        "--chat-template-args", type=json_object, default={}, metavar="JSON", help="e.g. '{\"enable_thinking\":false}'"
    )
    group.add_argument(
        "--decode-concurrency", type=at_least(1), default=32, help="requests in a batch; 1 never batches (default: 32)"
    )
    group.add_argument("--prompt-concurrency", type=at_least(1), default=8, help="prompts at once (default: 8)")
    group.add_argument("--prefill-step-size", type=at_least(1), default=2048, help="default: %(default)s")
    group.add_argument("--pipeline", action="store_true", help="of mlx-lm's distributed server; refused here")


def _add_caches(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("caches")
    group.add_argument("--prompt-cache-size", type=at_least(1), default=16, help="prompt caches (default: 16)")
    group.add_argument("--prompt-cache-bytes", type=size, default="4GB", help="memory for prompt caches (default: 4GB)")
    group.add_argument("--prompt-cache-dir", type=Path, help="keep prompt caches there as well, over restarts")
    group.add_argument(
        "--prompt-cache-dir-bytes", type=size, default="20GB", help="most that folder may hold (default: 20GB)"
    )
    group.add_argument("--kv-bits", type=int, choices=[2, 3, 4, 5, 6, 8], help="quantise the KV cache; no batches")
    group.add_argument("--kv-group-size", type=int, choices=[32, 64, 128], default=64, help="default: %(default)s")
    group.add_argument("--quantized-kv-start", type=at_least(0), default=5000, help="default: %(default)s")


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    group.add_argument("--port", type=port, default=8080, help="default: %(default)s; 0 takes a free one")
    group.add_argument(
        "--alias",
        type=words,
        default=[],
        metavar="NAMES",
        help="further names of the model, as gpt-4o,claude-haiku-4-5",
    )
    group.add_argument("--api-key", help=f"asked of every request but /health; or ${KEY_VARIABLE}, which ps can't see")
    group.add_argument(
        "--allowed-hosts",
        type=hosts,
        default=[],
        metavar="NAMES",
        help="further names that it may be asked under, as llm.example.com,*.lan",
    )
    group.add_argument(
        "--allowed-origins",
        type=hosts,
        default=[],
        metavar="ORIGINS",
        help="web pages that may use it, as http://localhost:3000,app://*; * for any",
    )
    group.add_argument("--max-body-bytes", type=size, default="32MB", help="of a request (default: 32MB)")
    group.add_argument("--max-prompt-tokens", type=at_least(1), help="default: what the target was made for")
    group.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="of a request, said once in the log, instead of refusing it",
    )
    group.add_argument("--max-queue", type=at_least(1), default=256, help="requests that may wait (default: 256)")
    group.add_argument(
        "--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], default="INFO", help="default: INFO"
    )


def run(args: argparse.Namespace) -> int:
    import logging

    from ..errors import DFlashError

    if args.pipeline:
        raise DFlashError("--pipeline: this server runs in one process; mlx_lm.server serves distributed models")
    args.api_key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if args.api_key and not args.api_key.isascii():
        raise DFlashError(f"--api-key (or {KEY_VARIABLE}) may hold ASCII only: a header carries nothing else")
    if args.num_draft_tokens is not None:
        args.block_size = args.num_draft_tokens + 1
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    plan = settle_pair(args)

    from ..serve.app import serve

    return serve(args, plan)
