"""What the flags of every command that loads a pair ask for. Imports the models when they are wanted."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .progress import status

if TYPE_CHECKING:
    from ..loading import Plan


def settle_pair(args: argparse.Namespace) -> Plan:
    """What the pair flags ask for, checked before anything heavy loads; says what was chosen."""
    from ..errors import DFlashError
    from ..loading import plan as make_plan

    plan = make_plan(
        args.model,
        args.draft_model,
        revision=args.revision,
        draft_revision=args.draft_revision,
        lookup=getattr(args, "lookup", False),  # `benchmark` and `serve` have one drafter
    )
    for note in plan.notes:
        print(note, file=sys.stderr)
    block = plan.block_size
    if args.block_size and args.block_size > (block or 1):
        limit = f"this draft's blocks have 1 to {block} tokens" if block else "there is no draft"
        raise DFlashError(f"--block-size {args.block_size} is out of range: {limit}")
    if args.draft_window and plan.draft_folder is None:
        raise DFlashError(f"--draft-window {args.draft_window}: there is no draft that could look back")
    return plan


def load_pair(args: argparse.Namespace) -> tuple[Plan, Any, Any, Any]:
    """Plan, model, draft and tokenizer for the pair flags; says what was chosen."""
    plan = settle_pair(args)
    with status(f"loading {args.model}"):
        return plan, *plan.load(
            attn_implementation=args.attn_implementation,
            draft_window=args.draft_window,
            adapter_path=args.adapter_path,
            trust_remote_code=args.trust_remote_code,
        )


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """The cache flags as mlx-lm's arguments."""
    limit = {"max_kv_size": args.max_kv_size} if args.max_kv_size else {}
    if args.kv_bits is None:
        return limit
    return {
        **limit,
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
    }
