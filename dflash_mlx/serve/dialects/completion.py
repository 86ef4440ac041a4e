"""One completion, from a checked body to the packets of its reply: OpenAI's shapes with a `dflash` block.

Knows no sockets: a handler writes what comes out of here, and so may a dialect of another vendor.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from ...target.args import context_length
from ..engine import Engine
from ..errors import ApiError, ClientGone, shown
from ..http.handler import Handler
from ..job import Job, Piece, Progress, Reply, Scores
from ..provider import DEFAULT
from ..tokens import no_template
from .answer import Answer, Raw
from .choice import Choice
from .dialect import as_object, results_in_order
from .fields import FOR_TEMPLATE, UNLIMITED, checked, effort_options
from .logprobs import ChatLogprobs, Logprobs, NoLogprobs, TextLogprobs

POLL_SECONDS = 0.05  # how often a waiting connection is checked for a client that left


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
        sent: the client's own request where `body` was made from another dialect's.

    Raises:
        ApiError: the body asks for what can't be done, or for another model.
    """

    def __init__(self, engine: Engine, body: Any, kind: str, sent: dict[str, Any] | None = None):
        self.engine, self.kind = engine, kind
        self.fields = fields = checked(body, kind, engine.unknown_fields)
        self.streams: bool = fields.get("stream", False)
        self.options: dict[str, Any] = fields.get("stream_options", {})
        self.model: str = fields.get("model", DEFAULT)
        self._check_models()
        self.args = self._arguments()
        if self.args.chat_template_kwargs and not engine.front_tokenizer.has_chat_template:
            raise no_template(next(name for name in FOR_TEMPLATE if (sent or body).get(name) not in (None, {})))
        self.choices = self._choices()
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4()}"
        self.created = int(time.time())

    @property
    def job(self) -> Job:
        """Of the first choice, a chat completion's only one."""
        return self.choices[0].job

    # What is asked for -------------------------------------------------------------------------------------

    def _check_models(self) -> None:
        provider = self.engine.provider
        if not provider.answers_to(self.model):
            message = f"no model {shown(self.model)} here; this server has {provider.public_name}"
            raise ApiError(404, message, "model", "model_not_found")
        draft = self.fields.get("draft_model", DEFAULT)
        if draft not in (DEFAULT, provider.public_draft, provider.plan.draft):
            raise ApiError(400, "draft_model is chosen when the server starts: --draft-model", "draft_model")

    def _choices(self) -> list[Choice]:
        """One a prompt."""
        fields = self.fields
        tools = (fields.get("tools") or None) if fields.get("tool_choice") != "none" else None
        if self.kind == "chat":
            messages = results_in_order([self._message(message) for message in fields["messages"]])
            job = self._job(CompletionRequest("chat", "", messages, tools, fields.get("role_mapping")))
            single = fields.get("parallel_tool_calls") is False
            answer = Answer(self.engine.front_tokenizer, job.initial_state, tools, self.streams, single)
            return [Choice(0, job, answer, self._logprobs())]
        choices = []
        for i, prompt in enumerate(fields["prompt"]):
            job = self._job(CompletionRequest("text", prompt, [], None, None))
            echo = ""
            if fields.get("echo"):
                echo = prompt if isinstance(prompt, str) else self.engine.front_tokenizer.decode(prompt)
            choices.append(Choice(i, job, Raw(), self._logprobs(), echo))
        return choices

    def _job(self, request: CompletionRequest) -> Job:
        scored = self.fields.get("echo", False) and self.args.logprobs
        job = self.engine.prepare(request, self.args, self._block_size(), scored)
        if self.args.max_tokens == UNLIMITED and (length := context_length(self.engine.provider.model)):
            job.args = replace(self.args, max_tokens=max(1, length - len(job.prompt)))
        return job

    def _logprobs(self) -> Logprobs:
        if not self.args.logprobs:
            return NoLogprobs()
        return (ChatLogprobs if self.kind == "chat" else TextLogprobs)(self.engine.token_text)

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
        template = effort_options(get("reasoning_effort")) | get("chat_template_kwargs", {})
        template.update({"enable_thinking": get("enable_thinking")} if "enable_thinking" in self.fields else {})
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

    def pieces(self, gone: Callable[[], bool]) -> Iterator[tuple[Choice, Progress | Scores | Piece]]:
        """Run the jobs, as many at once as a batch takes; however this ends, they do.

        Raises `ApiError` when one fails, `ClientGone` when `gone()`.
        """
        replies: SimpleQueue[tuple[Job, Reply]] = SimpleQueue()
        waiting, running = deque(self.choices), dict[Job, Choice]()
        checked_at = time.monotonic()
        try:
            while waiting or running:
                self._submit(waiting, running, replies)
                try:
                    job, reply = replies.get(timeout=POLL_SECONDS)
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
                    yield running[job], reply
                    if isinstance(reply, Piece) and reply.finish_reason is not None:
                        del running[job]
        finally:
            for choice in self.choices:
                choice.job.cancel()

    def _submit(self, waiting: deque[Choice], running: dict[Job, Choice], replies: SimpleQueue) -> None:
        """Queue what may run beside what runs; only a first one is refused by a full queue, the others wait here."""
        while waiting and len(running) < self.engine.args.decode_concurrency:
            job = waiting[0].job
            job.replies = replies
            try:
                self.engine.submit(job)
            except ApiError as error:
                if running and error.status == 429:
                    return
                raise
            running[job] = waiting.popleft()

    def stream(self, gone: Callable[[], bool]) -> Iterator[dict[str, Any] | str]:
        """Packets as they come; a string is a comment that keeps the connection awake."""
        left = len(self.choices)
        for choice, piece in self.pieces(gone):
            if isinstance(piece, Progress):
                yield f"keepalive {piece.done}/{piece.total}"
            elif isinstance(piece, Scores):
                choice.add_scores(piece)
            else:
                for part in choice.add(piece):
                    packet = {**self._head(), "choices": [choice.delta(part)]}
                    if self.options.get("include_dflash"):
                        packet["dflash"] = choice.job.report.live()
                    yield packet
                if choice.reason is not None:
                    left -= 1
                    packet = {**self._head(), "choices": [choice.delta(None)], "dflash": choice.job.report.to_dict()}
                    if not left and not self.options.get("include_usage"):
                        packet["usage"] = self.usage()  # mlx-lm's clients ask for it in a packet of its own
                    yield packet
        if self.options.get("include_usage"):
            figures = {"dflash": self.job.report.to_dict()} if len(self.choices) == 1 else {}
            yield {**self._head(), "choices": [], "usage": self.usage(), **figures}

    def whole(self, gone: Callable[[], bool]) -> dict[str, Any]:
        """The reply in one packet; of several choices each has its own figures."""
        for choice, piece in self.pieces(gone):
            if isinstance(piece, Scores):
                choice.add_scores(piece)
            elif isinstance(piece, Piece):
                for _ in choice.add(piece):
                    pass
        choices = [choice.whole() for choice in self.choices]
        figures = [choice.job.report.to_dict() for choice in self.choices]
        packet = {**self._head(), "choices": choices, "usage": self.usage()}
        if len(choices) == 1:
            return {**packet, "dflash": figures[0]}
        packet["choices"] = [{**choice, "dflash": block} for choice, block in zip(choices, figures, strict=True)]
        return packet

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
        reports = [choice.job.report for choice in self.choices]
        prompt, written = sum(r.prompt_tokens for r in reports), sum(r.tokens for r in reports)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(r.cached for r in reports)},
        }


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    """A call's function with its arguments as templates take them."""
    return {**function, "arguments": as_object(function.get("arguments", ""), "arguments")}
