"""One completion, from a checked body to the packets of its reply: OpenAI's shapes with a `dflash` block.

Knows no sockets: a handler writes what comes out of here, and so may a dialect of another vendor.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from queue import Empty
from typing import TYPE_CHECKING, Any

from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from .answer import Answer, Part, Raw
from .dialect import as_object, results_in_order
from .errors import ApiError, ClientGone
from .fields import checked
from .job import Piece, Progress
from .provider import DEFAULT

if TYPE_CHECKING:
    from .engine import Engine
    from .handler import Handler

POLL_SECONDS = 0.05  # how often a waiting connection is checked for a client that left
TEMPLATE_OPTIONS = ("reasoning_effort", "enable_thinking")


def answer_chat(handler: Handler) -> None:
    """POST /v1/chat/completions."""
    _answer(handler, "chat")


def answer_text(handler: Handler) -> None:
    """POST /v1/completions."""
    _answer(handler, "text")


def _answer(handler: Handler, kind: str) -> None:
    completion = Completion(handler.engine, handler.body, kind)
    if completion.streams:
        handler.events(completion.stream(handler.gone), done="[DONE]")
    else:
        handler.reply(completion.whole(handler.gone))


class Completion:
    """A request that was accepted.

    Args:
        body: of a chat ("chat") or text ("text") completion.

    Raises:
        ApiError: the body asks for what can't be done, or for another model.
    """

    def __init__(self, engine: Engine, body: Any, kind: str):
        self.engine, self.kind = engine, kind
        self.fields = fields = checked(body, kind)
        self.streams: bool = fields.get("stream", False)
        self.options: dict[str, Any] = fields.get("stream_options", {})
        self.model: str = fields.get("model", DEFAULT)
        self._check_models()
        tools = (fields.get("tools") or None) if fields.get("tool_choice") != "none" else None
        request = CompletionRequest(
            "chat" if kind == "chat" else "text",
            fields.get("prompt", ""),
            results_in_order([self._message(message) for message in fields.get("messages", [])]),
            tools,
            fields.get("role_mapping"),
        )
        self.args = self._arguments()
        self.job = engine.prepare(request, self.args, self._block_size())
        single = fields.get("parallel_tool_calls") is False
        self.answer: Answer | Raw = Raw()
        if kind == "chat":
            self.answer = Answer(engine.front_tokenizer, self.job.initial_state, tools, self.streams, single)
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4()}"
        self.created = int(time.time())
        self.logprobs: list[dict[str, Any]] = []

    # What is asked for -------------------------------------------------------------------------------------

    def _check_models(self) -> None:
        provider = self.engine.provider
        if not provider.answers_to(self.model):
            message = f"no model {self.model!r} here; this server has {provider.public_name}"
            raise ApiError(404, message, "model", "model_not_found")
        draft = self.fields.get("draft_model", DEFAULT)
        if draft not in (DEFAULT, provider.public_draft, provider.plan.draft):
            raise ApiError(400, "draft_model is chosen when the server starts: --draft-model", "draft_model")

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Content is one text, and templates know no developers, only a system."""
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        message = {**message, "content": content}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
        template = self.engine.front_tokenizer.chat_template or ""
        if message["role"] == "developer" and "developer" not in str(template):
            message = {**message, "role": "system"}
        return message

    def _block_size(self) -> int | None:
        if "block_size" in self.fields or "num_draft_tokens" not in self.fields:
            return self.fields.get("block_size")
        return min(self.fields["num_draft_tokens"] + 1, self.engine.provider.plan.block_size or 1)

    def _arguments(self) -> GenerationArguments:
        """mlx-lm's arguments, with its defaults."""
        cli, get = self.engine.args, self.fields.get
        template = {**get("chat_template_kwargs", {})}
        template.update({name: self.fields[name] for name in TEMPLATE_OPTIONS if name in self.fields})
        logprobs = get("logprobs", False)
        best = 0 if isinstance(logprobs, bool) else logprobs  # a number is the text route's way to ask for the best
        return GenerationArguments(
            model=ModelDescription(self.model, DEFAULT, ""),
            sampling=SamplingArguments(
                get("temperature", cli.temp),
                get("top_p", cli.top_p),
                get("top_k", cli.top_k),
                get("min_p", cli.min_p),
                get("xtc_probability", 0.0),
                get("xtc_threshold", 0.1),
            ),
            logits=LogitsProcessorArguments(
                get("logit_bias"),
                get("repetition_penalty", 0.0),
                get("repetition_context_size", 20),
                get("presence_penalty", 0.0),
                get("presence_context_size", 20),
                get("frequency_penalty", 0.0),
                get("frequency_context_size", 20),
            ),
            stop_words=get("stop", []),
            max_tokens=get("max_completion_tokens", get("max_tokens", cli.max_tokens)),
            num_draft_tokens=0,
            logprobs=logprobs is not False,
            top_logprobs=max(get("top_logprobs", -1), best),
            seed=get("seed"),
            chat_template_kwargs=template or None,
        )

    # What comes back ---------------------------------------------------------------------------------------

    def pieces(self, gone: Callable[[], bool]) -> Iterator[Progress | Piece]:
        """Run it. Raises `ApiError` when it fails, `ClientGone` when `gone()`; however this ends, the job does."""
        self.engine.submit(self.job)
        checked_at = time.monotonic()
        try:
            while True:
                try:
                    reply = self.job.replies.get(timeout=POLL_SECONDS)
                except Empty:
                    reply = None
                if reply is None or time.monotonic() - checked_at > POLL_SECONDS:
                    checked_at = time.monotonic()
                    if gone():
                        raise ClientGone
                    if reply is None and not self.engine.generation_available():
                        raise ApiError(503, "the engine is down; the server's log says why", code="unavailable")
                if isinstance(reply, Exception):
                    raise reply
                if reply is not None:
                    yield reply
                    if isinstance(reply, Piece) and reply.finish_reason is not None:
                        return
        finally:
            self.job.cancel()

    def stream(self, gone: Callable[[], bool]) -> Iterator[dict[str, Any] | str]:
        """Packets as they come; a string is a comment that keeps the connection awake."""
        waiting: list[dict[str, Any]] = []
        for piece in self.pieces(gone):
            if isinstance(piece, Progress):
                yield f"keepalive {piece.done}/{piece.total}"
                continue
            waiting += self._logprobs(piece)
            for part in self._parts(piece):
                packet = self._packet(None, part, waiting)
                if self.options.get("include_dflash"):
                    packet["dflash"] = self.job.report.live()
                yield packet
                waiting = []
            if piece.finish_reason is not None:
                packet = self._packet(self._reason(piece), None, waiting)
                packet["dflash"] = self.job.report.to_dict()
                if not self.options.get("include_usage"):
                    packet["usage"] = self.usage()  # mlx-lm's clients ask for it in a packet of its own
                yield packet
        if self.options.get("include_usage"):
            yield {**self._head(), "choices": [], "usage": self.usage(), "dflash": self.job.report.to_dict()}

    def whole(self, gone: Callable[[], bool]) -> dict[str, Any]:
        """The reply in one packet."""
        texts = {"normal": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        logprobs: list[dict[str, Any]] = []
        reason = "stop"
        for piece in self.pieces(gone):
            if isinstance(piece, Progress):
                continue
            logprobs += self._logprobs(piece)
            for part in self._parts(piece):
                calls += part.calls
                if not part.calls:
                    texts[part.kind] += part.text
            if piece.finish_reason is not None:
                reason = self._reason(piece)
        choice = self._choice(reason)
        if self.kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": texts["normal"] or None}
            message.update({"reasoning": texts["reasoning"]} if texts["reasoning"] else {})
            message.update({"tool_calls": calls} if calls else {})
            choice["message"] = message
        else:
            choice["text"] = texts["normal"]
        if self.args.logprobs:
            choice["logprobs"] = {"content": logprobs}
        return {
            **self._head(), "choices": [choice], "usage": self.usage(), "dflash": self.job.report.to_dict()
        }  # fmt: skip

    def _parts(self, piece: Piece) -> Iterator[Part]:
        by_itself = piece.finish_reason == "stop" and self.job.stopping.found is None
        return self.answer.add(piece.text, last=piece.finish_reason is not None, by_itself=by_itself)

    def _packet(self, reason: str | None, part: Any, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        choice = self._choice(reason)
        if self.kind == "chat":
            delta: dict[str, Any] = {"role": "assistant"}
            if part is not None and part.calls:
                delta["tool_calls"] = list(part.calls)
            elif part is not None:
                delta["content" if part.kind == "normal" else "reasoning"] = part.text
            choice["delta"] = delta
        else:
            choice["text"] = part.text if part is not None else ""
        if logprobs:
            choice["logprobs"] = {"content": logprobs}
        return {**self._head(), "choices": [choice]}

    def _choice(self, reason: str | None) -> dict[str, Any]:
        found = self.job.stopping.found if reason == "stop" else None  # the stop string, which OpenAI does not name
        return {"index": 0, "finish_reason": reason, **({"stop_reason": found} if found else {})}

    def _head(self) -> dict[str, Any]:
        kinds = {("chat", True): "chat.completion.chunk", ("chat", False): "chat.completion"}
        return {
            "id": self.id,
            "object": kinds.get((self.kind, self.streams), "text_completion"),
            "created": self.created,
            "model": self.model if self.model != DEFAULT else self.engine.provider.public_name,
            "system_fingerprint": self.engine.system_fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        report = self.job.report
        return {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.tokens,
            "total_tokens": report.prompt_tokens + report.tokens,
            "prompt_tokens_details": {"cached_tokens": report.cached},
        }

    def _reason(self, piece: Piece) -> str:
        return "tool_calls" if piece.finish_reason == "stop" and self.answer.called else str(piece.finish_reason)

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """OpenAI's entry of one token, with mlx-lm's id."""
        if not self.args.logprobs or piece.logprob is None:
            return []
        top = [self._token(token, value) for token, value in piece.top]
        return [{**self._token(piece.token, piece.logprob), "top_logprobs": top}]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.engine.front_tokenizer.decode([token])
        return {"id": token, "token": text, "logprob": logprob, "bytes": list(text.encode())}


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    """A call's function with its arguments as templates take them."""
    return {**function, "arguments": as_object(function.get("arguments", ""), "arguments")}
