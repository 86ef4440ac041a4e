"""The routes of coding agents: another vendor's dialect in front of a chat completion. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain

from ..errors import ApiError, ClientGone, internal_error
from ..http.handler import Handler
from . import anthropic, responses
from .completion import Completion
from .dialect import Answer, Dialect, Event, Json, typed, whole

log = logging.getLogger(__name__)


def answer_messages(handler: Handler) -> None:
    """POST /v1/messages."""
    _answer(handler, anthropic.DIALECT)


def answer_responses(handler: Handler) -> None:
    """POST /v1/responses."""
    _answer(handler, responses.DIALECT)


def count_tokens(handler: Handler) -> None:
    """POST /v1/messages/count_tokens: how long the prompt would be."""
    request = {**typed(handler.body, dict, "body"), "max_tokens": 1}
    completion = _accept(handler, anthropic.DIALECT, request)
    handler.reply({"input_tokens": len(completion.job.prompt)})


def _answer(handler: Handler, dialect: Dialect) -> None:
    request = typed(handler.body, dict, "body")
    completion = _accept(handler, dialect, request)
    answer = dialect.answer(request)
    if completion.streams:
        handler.events(_events(completion, answer, handler))
    else:
        handler.reply(whole(answer, completion.whole(handler.gone)))


def _accept(handler: Handler, dialect: Dialect, request: Json) -> Completion:
    """The chat completion that answers a request; what is wrong with it is told in the dialect's own names."""
    unknown = handler.engine.unknown_fields
    if unknown.ignored:
        for name in request.keys() - dialect.known:
            unknown.meet(name)
        request = {name: value for name, value in request.items() if name in dialect.known}
    try:
        return Completion(handler.engine, dialect.to_chat(request), "chat", request)
    except ApiError as error:
        field = dialect.fields.get(error.param or "")
        if field is None:
            raise
        raise ApiError(error.status, f"{field}: {error}", field, error.code) from None


def _events(completion: Completion, answer: Answer, handler: Handler) -> Iterator[Json | str]:
    """The chat stream's packets as the dialect's events; the first packet decides whether there is a stream at all."""
    packets = completion.stream(handler.gone)
    first = next(packets)
    yield from map(_packet, answer.start(completion.usage()))
    try:
        for packet in chain([first], packets):
            if isinstance(packet, str):
                yield packet
            else:
                yield from map(_packet, answer.chunk(packet))
        yield from map(_packet, answer.end())
    except ClientGone:
        raise
    except ApiError as error:
        yield from map(_packet, answer.fail(str(error)))
    except Exception:
        log.exception("%r failed", handler.route_path)
        yield from map(_packet, answer.fail(str(internal_error())))


def _packet(event: Event) -> Json:
    return {"event": event[0], "data": event[1]}
