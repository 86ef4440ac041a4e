"""From a prompt in any form to token ids. Knows tokenizers, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import DFlashError


def apply_template(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """The text of a conversation; `options` are those of `apply_chat_template` and the template's own variables.

    mlx-lm's wrapper switches thinking on where nobody said anything about it. Here the template's own default counts,
    if it can have one: a template in Python (DeepSeek's V3.2) asks for the option.
    """
    if (
        isinstance(tokenizer, TokenizerWrapper)
        and tokenizer._chat_template is None
        and "enable_thinking" not in options
    ):
        tokenizer = tokenizer._tokenizer
    return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, **options))


def encode(tokenizer: Any, prompt: str | mx.array | Sequence[int]) -> mx.array:
    """Token ids `[n]` of a prompt; special tokens are added unless the text already starts with the first."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    return as_ids(prompt)


def as_ids(prompt: Any) -> mx.array:
    """Token ids `[n]` from an array or a sequence of whole numbers.

    Raises `DFlashError` (a `ValueError`) when there are none, or they are no row of whole numbers.
    """
    if not isinstance(prompt, mx.array):
        row = np.asarray(prompt)
        if row.size and row.dtype.kind not in "iu":
            raise DFlashError(f"the prompt holds {row.dtype} values, expected token ids")
        prompt = mx.array(row.astype(np.int64))
    if prompt.ndim != 1 or prompt.shape[0] == 0:
        raise DFlashError(f"the prompt has shape {list(prompt.shape)}, expected at least one token in one row")
    if not mx.issubdtype(prompt.dtype, mx.integer):
        raise DFlashError(f"the prompt holds {prompt.dtype} values, expected token ids")
    if prompt.min().item() < 0 or prompt.max().item() >= 2**31:
        raise DFlashError("the prompt holds a number that is no token id")
    return prompt.astype(mx.int32)
