"""The loop: rounds follow each other, tokens come out one by one. Knows limits and end tokens, no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from .block_size import BlockSize, Widths
from .ending import finish, recover
from .session import Flight, Session

T = TypeVar("T")
PLAIN = Widths(draft=1, verify=1)
USUAL_BACKLOG = 64  # tokens that the draft may take in within a round whose time is learned from
CLEAR_EVERY = 256  # tokens between releases of MLX's buffer cache, as in mlx-lm


@dataclass(frozen=True)
class Token:
    """One emitted token with the target's log-probabilities `[V]` and whether the draft proposed it."""

    id: int
    logprobs: mx.array
    from_draft: bool


def decode(
    session: Session,
    prompt: mx.array,
    feed: Callable[[mx.array], None],
    block_size: BlockSize,
    max_tokens: int,
    show: Callable[[Token], tuple[T, bool]],
    end_tokens: Collection[int],
    room: int | None = None,
    leave_last: bool = False,
) -> Generator[T, None, None]:
    """Feed the prompt and emit up to `max_tokens` tokens (-1: no limit), the last of them an end token if one comes.

    The next round is queued before the tokens of the finished one are handed out, so the device works while the
    caller does; only the first token does not wait for a block to be built behind it. However the generator ends,
    both caches hold exactly the tokens that were handed out (a private session leaves them as they are); before the
    first token, as much of the prompt as was told.

    Args:
        feed: `session.prefill` with its options.
        show: makes of a token what is handed out, and says whether the text ends with it.
        room: tokens in the target's cache at which blocks end, where its form changes (see `kv_bits`).
        leave_last: the caches end before the last token that was handed out instead of behind it.
    """
    held = session.fed + prompt.shape[0] - leave_last  # what the caches hold in the end, less what was emitted
    emitted = 0
    limit = max_tokens if max_tokens >= 0 else 1 << 62
    flight: Flight | None = None
    whole = False  # whether the generator stands between two tokens
    try:
        feed(prompt)
        if max_tokens == 0:
            return finish(session, held)
        flight = session.dispatch(PLAIN)  # the last prompt token; its pick is the first token
        settled = None
        was_ahead = False  # whether the flight was queued before the round in front of it was settled
        while True:
            ahead = None
            if flight.width == 1 and emitted + 1 < limit:
                widths = _widths(session, block_size, limit - emitted - 1, room)
                if widths == PLAIN:
                    # A plain round is never rejected: the next one needs its token on the device only.
                    ahead = session.dispatch(PLAIN, anchor=flight.picks)
            done = session.settle(flight)
            now = time.perf_counter()
            if settled is not None:  # the first token is the prefill's
                # The time since the last round is this one's where as many rounds were queued as settled in it: not
                # on the first and last of plain rounds that follow each other. One that took in what many plain
                # ones left says nothing about the next either.
                regular = was_ahead == (ahead is not None) and flight.backlog <= USUAL_BACKLOG
                seconds = now - settled if regular else None
                block_size.observe(session.fed, done.width, done.accepted, seconds, flight.lookup)
            settled, was_ahead = now, ahead is not None
            tokens, ended = _cut(done.tokens, limit - emitted, end_tokens)
            flight = ahead
            left = 0 if ended else limit - emitted - len(tokens)
            before = emitted
            if flight is None and left and before:
                flight = session.dispatch(_widths(session, block_size, left, room))
            session.compute_rows()
            counted = before == 0  # the first token is the prefill's
            try:
                for i, token in enumerate(tokens):
                    item, last = show(Token(token, done.logprobs[i], i < done.accepted))
                    last = last or (not left and i + 1 == len(tokens))
                    if last:
                        finish(session, held + emitted + 1, flight)
                        if not counted:
                            session.stats.record(done.width, done.accepted, emitted + 1 - before)
                            counted = True
                    # Python looks for signals at calls: with none in between, what is counted is handed out.
                    emitted += 1
                    whole = True
                    yield item
                    if last:
                        return
                    whole = False
            finally:
                if not counted:
                    session.stats.record(done.width, done.accepted, emitted - before)
            if flight is None:
                flight = session.dispatch(_widths(session, block_size, left, room))
            if emitted % CLEAR_EVERY < len(tokens):
                mx.clear_cache()
    except BaseException:
        length = held + emitted if emitted else None
        try:
            finish(session, held + emitted, flight) if whole else recover(session, length)
        except BaseException:  # a second interrupt
            recover(session, length)
            raise
        raise


def _cut(tokens: list[int], left: int, end_tokens: Collection[int]) -> tuple[list[int], bool]:
    """The tokens that are still wanted, and whether an end token is the last of them."""
    tokens = tokens[:left]
    for i, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: i + 1], True
    return tokens, False


def _widths(session: Session, block_size: BlockSize, remaining: int, room: int | None) -> Widths:
    """The next round's widths: plain without a draft, and no block across the border of `room`."""
    if session.drafter is None:
        return PLAIN
    space = None if room is None or session.fed >= room else room - session.fed - 1
    offered = session.offered()
    widths = block_size.next(session.fed, remaining, space, offered)
    return PLAIN if widths.verify == 1 else widths
