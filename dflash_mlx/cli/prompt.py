"""From the flags of a prompt to token ids, the same with and without a draft."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mlx.core as mx

from ..errors import DFlashError
from ..prompt import apply_template, encode


def read_prompt(text: str) -> str:
    """The prompt itself; "-" is stdin. Raises `DFlashError` when it is empty."""
    try:
        if text == "-":
            text = sys.stdin.read()
        text.encode("utf-8")
    except UnicodeError:
        raise DFlashError("the prompt is not valid UTF-8") from None
    if not text:
        raise DFlashError("the prompt is empty; give --prompt some text")
    return text


def render(tokenizer: Any, text: str, args: argparse.Namespace) -> mx.array:
    """Token ids `[n]`: through the chat template if the tokenizer has one, else as it is.

    Raises `DFlashError` for a system prompt or template arguments that no template can take.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        if not args.ignore_chat_template and (args.system_prompt or args.chat_template_config):
            raise DFlashError(
                "this tokenizer has no chat template for --system-prompt or --chat-template-config; "
                "put everything into --prompt and add --ignore-chat-template"
            )
        ids = encode(tokenizer, text)
    else:
        messages = [{"role": "user", "content": text}]
        if args.system_prompt:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
        try:
            rendered = apply_template(tokenizer, messages, add_generation_prompt=True, **args.chat_template_config)
        except Exception as error:  # a template is the checkpoint's own code and raises what it likes
            raise DFlashError(
                f"the chat template refused the prompt: {error}; --ignore-chat-template skips it"
            ) from None
        ids = mx.array(tokenizer.encode(rendered, add_special_tokens=False), mx.int32)
    return ids
