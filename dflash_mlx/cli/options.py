"""Flags that several commands share, and their types: a bad value is refused before anything loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ..errors import DFlashError


def at_least(minimum: float, kind: type = int) -> Any:
    """An argparse type: a number of `kind` not below `minimum`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not minimum <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is out of range, {minimum} is the least")
        return value

    return parse


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object, e.g. '{\"enable_thinking\": false}'")
    return value


def some_text(text: str) -> str:
    """An argparse type: text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def add_end_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Let further tokens end the text. Raises `DFlashError` for one that the tokenizer does not know."""
    for token in tokens:
        known = token.isdigit() or token in tokenizer.get_vocab()
        if not known:
            raise DFlashError(f"--extra-eos-token {token}: the tokenizer has no such token")
        tokenizer.add_eos_token(token)


def within(low: float, high: float) -> Any:
    """An argparse type: a number from `low` to `high`."""

    def parse(text: str) -> float:
        value = at_least(low, float)(text)
        if value > high:
            raise argparse.ArgumentTypeError(f"{text} is out of range, {high:g} is the most")
        return value

    return parse


def logit_bias(text: str) -> dict[int, float]:
    """An argparse type: a JSON object from token id to what is added to its logit."""
    try:
        return {int(token): float(bias) for token, bias in json_object(text).items()}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError("expected numbers by token id, e.g. '{\"42\": -100}'") from None


def sampling_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The sampling flags as the arguments of `stream_generate`; XTC spares line ends and end tokens, as in mlx-lm."""
    names = ("top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
    special = [*tokenizer.encode("\n", add_special_tokens=False), *tokenizer.eos_token_ids]
    return {**{name: getattr(args, name) for name in names}, "xtc_special_tokens": special}


def logits_processors(args: argparse.Namespace) -> list[Any]:
    """The penalty flags as mlx-lm's own processors."""
    from mlx_lm.sample_utils import make_logits_processors

    return make_logits_processors(
        args.logit_bias,
        args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Which target and which draft."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", required=True, help='target: a repo, a folder in mlx-lm\'s format, or "demo"')
    group.add_argument(
        "--draft-model",
        default="auto",
        help='draft: "auto" (default) looks the pair up, "none", "lookup" (copies from the text), a repo or a folder',
    )
    group.add_argument("--revision", help="revision of the target repo")
    group.add_argument("--draft-revision", help="revision of the draft repo, with auto too")
    group.add_argument("--adapter-path", help="LoRA adapters for the target")
    group.add_argument("--trust-remote-code", action="store_true", help="let the target's repo run its own code")
    group.add_argument(
        "--attn-implementation", choices=["sdpa", "eager"], default="sdpa", help="attention of the draft"
    )
    group.add_argument(
        "--draft-window",
        type=at_least(1),
        metavar="N",
        help="tokens of context that the draft looks back at most; default: as its checkpoint says",
    )


def add_generation_arguments(parser: argparse.ArgumentParser, max_tokens: int = 256) -> None:
    """How to decode; names as in mlx-lm."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--max-tokens", "-m", type=at_least(1), default=max_tokens, help="default: %(default)s")
    group.add_argument("--temp", type=at_least(0.0, float), default=0.0, help="temperature, 0 is greedy (default)")
    group.add_argument("--seed", type=at_least(0), help="noise of a sampled run; random when not given")
    group.add_argument("--top-p", type=within(0, 1), default=0.0, help="nucleus sampling, 0 is off (default)")
    group.add_argument("--min-p", type=within(0, 1), default=0.0, help="least share of the best token's probability")
    group.add_argument("--min-tokens-to-keep", type=at_least(1), default=1, help="that min-p never drops")
    group.add_argument("--top-k", type=at_least(0), default=0, help="sample from so many tokens, 0 is off (default)")
    group.add_argument("--xtc-probability", type=within(0, 1), default=0.0, help="how often XTC acts")
    group.add_argument("--xtc-threshold", type=within(0, 0.5), default=0.1, help="default: %(default)s")
    group.add_argument("--repetition-penalty", type=at_least(0.01, float), help="divides logits of recent tokens")
    group.add_argument(
        "--presence-penalty", type=within(-100, 100), help="subtracted once from logits of recent tokens"
    )
    group.add_argument("--frequency-penalty", type=within(-100, 100), help="subtracted for each time a token came up")
    group.add_argument("--logit-bias", type=logit_bias, metavar="JSON", help="added to logits, e.g. '{\"42\": -100}'")
    group.add_argument(
        "--stop", action="append", default=[], type=some_text, help="a string that ends the text; may be repeated"
    )
    group.add_argument("--extra-eos-token", nargs="+", default=(), help="further end tokens, as text or ids")
    group.add_argument(
        "--acceptance", choices=["match", "rejection"], default="match", help="how draft tokens are kept when sampling"
    )
    group.add_argument(
        "--block-size", type=at_least(1), help="pin the block, 1 decodes plainly; default: chosen by measured costs"
    )
    group.add_argument(
        "--lookup", action="store_true", help="propose from the text itself where it repeats, the draft elsewhere"
    )
    group.add_argument("--prefill-step-size", type=at_least(1), default=2048, help="default: %(default)s")
    group.add_argument("--max-kv-size", type=at_least(8), help="keep so many tokens in the target's cache, 4 for ever")
    group.add_argument("--kv-bits", type=int, choices=[2, 3, 4, 5, 6, 8], help="quantise the target's KV cache")
    group.add_argument("--kv-group-size", type=int, choices=[32, 64, 128], default=64, help="default: %(default)s")
    group.add_argument("--quantized-kv-start", type=at_least(0), default=5000, help="default: %(default)s")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """What to say and how to render it."""
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", "-p", required=True, help='text, or "-" to read it from stdin')
    group.add_argument("--system-prompt", help="system message for the chat template")
    group.add_argument("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    group.add_argument(
        "--chat-template-config", type=json_object, default={}, metavar="JSON", help="arguments of the chat template"
    )
