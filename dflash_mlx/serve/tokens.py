"""From a request to prompt ids: mlx-lm's own rendering, with errors that name the field. Knows no engine state."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any, Protocol, cast

from jinja2 import TemplateError
from mlx_lm.server import CompletionRequest, GenerationArguments

from ..prompt import apply_template
from .errors import ApiError

log = logging.getLogger(__name__)


class Renderer(Protocol):
    """What is asked of the engine: mlx-lm's own rendering, and whether the model is shown tools."""

    @property
    def takes_tools(self) -> bool: ...

    def _tokenize(self, tokenizer: Any, request: CompletionRequest, args: GenerationArguments) -> tuple: ...


class Front:
    """A tokenizer for requests: the template's own defaults, and no text that must have more than `limit` tokens.

    Args:
        limit: None for none; to encode what is far too long would take long, for nobody.
        longest: characters of the longest token. field: that the text comes from.
    """

    def __init__(self, tokenizer: Any, limit: int | None, longest: int, field: str):
        self.tokenizer, self.limit, self.longest, self.field = tokenizer, limit, longest, field

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        if self.limit and len(text) > self.limit * self.longest:
            raise too_long(f"{len(text)} characters", self.limit, self.field)
        return cast(list[int], self.tokenizer.encode(text, **kwargs))

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **options: Any) -> Any:
        text = apply_template(self.tokenizer, messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def too_long(size: str, limit: int, field: str) -> ApiError:
    """For a prompt of that many tokens or characters."""
    return ApiError(400, f"the prompt has {size}, this server takes {limit} tokens", field, "context_length_exceeded")


def tokenized(
    renderer: Renderer, tokenizer: Any, request: CompletionRequest, args: GenerationArguments
) -> tuple[list[int], list[int], str]:
    """Prompt ids, the lengths at which mlx-lm would end a segment, and the state that the text begins in.

    Raises `ApiError` when the template can't render the messages, or nothing is left to feed.
    """
    chat = request.request_type == "chat"
    if chat and not tokenizer.has_chat_template:
        if request.tools:
            raise no_template("tools")
    elif request.tools and not renderer.takes_tools:
        raise ApiError(400, "this model's chat template has no place for tools; ask without them", "tools")
    if isinstance(request.prompt, list):
        prompt, segments, state = request.prompt, [request.prompt], "normal"
    else:
        try:
            own = copy.deepcopy(request)  # the messages are rewritten in place
            prompt, segments, _, state, _ = renderer._tokenize(tokenizer, own, args)
        except ApiError:
            raise
        except Exception as error:  # a template is the checkpoint's own code and raises what it likes
            log.info("a prompt could not be rendered", exc_info=error)
            raise _refusal(error, chat) from None
    if not prompt:
        raise ApiError(400, "the prompt holds no tokens", "messages" if chat else "prompt")
    return list(prompt), list(itertools.accumulate(map(len, segments)))[:-1], state


def takes_tools(tokenizer: Any, options: dict[str, Any]) -> bool:
    """Whether the model hears of the tools of a request: its chat template shows them, or at least writes calls.

    Where mlx-lm knows the marks of a call, clients may describe their tools in the system message.

    Args:
        options: variables of the template.
    """
    if tokenizer.has_tool_calling:
        return True
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "probe", "description": "x", "parameters": {"type": "object"}}}
    shown = []
    for messages in ([user], [{"role": "system", "content": "x"}, user]):
        try:
            without, with_tool = (
                apply_template(tokenizer, messages, tools=tools, add_generation_prompt=True, **options)
                for tools in (None, [tool])
            )
            shown.append(without != with_tool)
        except Exception as error:  # it may take no system message; what it makes of a request, that will tell
            log.debug("tools could not be tried on the chat template", exc_info=error)
    return any(shown) or not shown


def no_template(field: str) -> ApiError:
    """For a field that only a chat template can show: without one mlx-lm's plain transcript of the turns is used."""
    message = f"this model has no chat template, so {field} can't be used; POST /v1/completions takes a raw prompt"
    return ApiError(400, message, field)


def _refusal(error: Exception, chat: bool) -> ApiError:
    """For what a tokenizer or a template did not take; only a template's own words are told."""
    if not chat:
        return ApiError(400, "the prompt can't be turned into tokens by this model's tokenizer", "prompt")
    said = f": {error}" if isinstance(error, TemplateError) else "; the server's log says why"
    return ApiError(400, f"the messages can't be rendered by this model's chat template{said}", "messages")
