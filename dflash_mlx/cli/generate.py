"""`dflash-mlx generate`: text on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
from typing import TYPE_CHECKING, Any

from .options import (
    add_end_tokens,
    add_generation_arguments,
    add_pair_arguments,
    add_prompt_arguments,
    at_least,
    logits_processors,
    sampling_options,
)
from .pair import cache_options, load_pair
from .progress import progress_bar, status

if TYPE_CHECKING:
    from ..check import Verdict
    from ..decode import GenerationStats
    from ..loading import Plan


@dataclasses.dataclass
class Answer:
    """What came out: `finish_reason` is mlx-lm's, or "interrupted"; `logprobs` one entry a token where asked for."""

    tokens: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    logprobs: list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add_prompt_arguments(parser)
    add_generation_arguments(parser)
    parser.add_argument("--check", action="store_true", help="decode again with plain mlx-lm and compare")
    parser.add_argument(
        "--logprobs", type=at_least(0), metavar="N", help="with --json: log-probabilities, and the N best"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of streamed text")
    parser.add_argument("--verbose", "-v", action="store_true", help="show the rendered prompt and each round")


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from ..errors import DFlashError
    from ..target import Target
    from .prompt import read_prompt, render

    text = read_prompt(args.prompt)
    if args.check and args.acceptance == "rejection" and args.temp > 0:
        raise DFlashError("--check compares texts; with --acceptance rejection the text depends on the draft")
    if args.temp > 0 and args.seed is None:
        args.seed = secrets.randbits(32)
        print(f"seed {args.seed}", file=sys.stderr)
    plan, model, draft, tokenizer = load_pair(args)
    add_end_tokens(tokenizer, args.extra_eos_token)
    ids = render(tokenizer, text, args)
    if args.logit_bias:
        Target(model).check_ids(mx.array(list(args.logit_bias)), "--logit-bias")
    if args.verbose:
        print(f"prompt ({ids.shape[0]} tokens): {tokenizer.decode(ids.tolist())!r}", file=sys.stderr)
    answer = _stream(args, model, draft, tokenizer, ids)
    verdict = None
    if args.check and answer.finish_reason != "interrupted":
        verdict = _check(args, model, tokenizer, ids, answer.tokens)
    if args.json:
        print(json.dumps(_report(args, plan, answer, verdict)))
    _summary(args, plan, answer.stats, verdict)
    if answer.finish_reason == "interrupted":
        return 130
    return 0 if verdict is None or verdict.identical or verdict.near_tie else 1


def _stream(args: argparse.Namespace, model: Any, draft: Any, tokenizer: Any, ids: Any) -> Answer:
    """Generate and print; Ctrl-C ends the text and keeps what there is."""
    from ..api import stream_generate
    from ..decode import GenerationStats

    tokens: list[int] = []
    logprobs: list[dict[str, Any]] = []
    answer, finish, stats = "", "interrupted", GenerationStats(prompt_tokens=ids.shape[0])
    with progress_bar("prompt") as progress:
        responses = stream_generate(
            model,
            tokenizer,
            ids,
            args.max_tokens,
            draft,
            temp=args.temp,
            seed=args.seed,
            **sampling_options(args, tokenizer),
            acceptance=args.acceptance,
            logits_processors=logits_processors(args),
            stop=args.stop,
            block_size=args.block_size if draft is not None else None,
            prefill_step_size=args.prefill_step_size,
            prompt_progress_callback=progress,
            stats=stats,
            keep_costs=True,
            **cache_options(args),
        )
        try:
            for response in responses:
                tokens.append(response.token)
                answer += response.text
                finish = response.finish_reason or finish
                if args.logprobs is not None:
                    own = response.logprobs[response.token].item()
                    logprobs.append({"logprob": own, "top": response.top_logprobs(args.logprobs)})
                if not args.json:
                    print(response.text, end="", flush=True)
        except KeyboardInterrupt:
            responses.close()  # the summary says how far it came
    if not args.json:
        print(flush=True)
    return Answer(tokens, answer, finish, stats, logprobs)


def _check(args: argparse.Namespace, model: Any, tokenizer: Any, ids: Any, tokens: list[int]) -> Verdict:
    from ..check import compare_with_plain

    with status("decoding again without the draft"):
        return compare_with_plain(
            model,
            ids,
            tokens,
            max_tokens=None if args.stop else args.max_tokens,
            end_tokens=tokenizer.eos_token_ids,
            temp=args.temp,
            seed=args.seed,
            sampling=sampling_options(args, tokenizer),
            prefill_step_size=args.prefill_step_size,
            logits_processors=logits_processors(args),
            **cache_options(args),
        )


def _report(args: argparse.Namespace, plan: Plan, answer: Answer, verdict: Verdict | None) -> dict[str, Any]:
    return {
        "model": args.model,
        "draft_model": plan.draft,
        "notes": plan.notes,
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "stats": answer.stats.to_dict(),
        "check": verdict.to_dict() if verdict else None,
        **({"logprobs": answer.logprobs} if args.logprobs is not None else {}),
    }


def _summary(args: argparse.Namespace, plan: Plan, stats: GenerationStats, verdict: Verdict | None) -> None:
    if args.verbose:
        for i, (width, accepted) in enumerate(zip(stats.block_sizes, stats.accepted, strict=True), 1):
            print(f"round {i}: {width} verified, {accepted} draft tokens accepted", file=sys.stderr)
    print(f"draft {plan.draft or 'none'}: {stats.summary()}", file=sys.stderr)
    if verdict is not None:
        speed = stats.generation_tps / verdict.plain_tps if verdict.plain_tps else 0.0
        print(f"check: {verdict}; {speed:.2f}x the speed of plain decoding here", file=sys.stderr)
