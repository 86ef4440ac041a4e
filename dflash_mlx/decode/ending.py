"""How a generation ends: both caches hold exactly the tokens that were handed out, whatever ended it.

`finish` ends it between two tokens, `recover` after an exception that may have struck anywhere, in `finish` too: it
goes back to where a round began and feeds again what was handed out since. Knows a session, no limits and no end
tokens.
"""

from __future__ import annotations

import warnings

import mlx.core as mx

from ..target.intercept import stop_intercepting
from ..target.undo import CanNotRewind
from .caches import align, note_tokens
from .session import Flight, Session


def finish(session: Session, length: int, flight: Flight | None = None) -> None:
    """Leave both caches at exactly `length` tokens: surplus is cut, a last token not fed yet is fed.

    Args:
        flight: a round that was queued but whose tokens nobody took.
    """
    if session.private:
        return
    with mx.stream(session.stream):
        if flight is not None and flight.taps is not None:
            session.backlog.add(flight.start, flight.taps, flight.width)
        try:
            session.fed = session.rewinder.rewind(session.fed, length)
        except CanNotRewind as reason:
            return _lost(session, reason)
        _feed(session, length)
        _extend_draft(session, length)
        _launch(session)


def recover(session: Session, length: int | None) -> None:
    """The same after an exception, which this replaces by no other: what can't be done is said.

    An interrupt does come through; then it may be called again.

    Args:
        length: None before the first token was handed out: the caches keep the prompt's chunks that are whole.
    """
    if session.private or not session.rewinder.marks:
        return
    stop_intercepting()
    goal = session.rewinder.marks[0].start if length is None else length  # a round may be queued ahead
    with mx.stream(session.stream):
        try:
            _feed_again(session, goal)
        except CanNotRewind as reason:
            return _lost(session, reason)
        except Exception as reason:  # what broke the round breaks this as well
            _warn(session, f"holds {session.fed} tokens instead of {goal}: {reason}")
        _draft_again(session)
    if length is None and not session.told:
        _warn(session, f"holds {session.fed} tokens, not the whole prompt")


def _feed_again(session: Session, length: int) -> None:
    session.fed = session.rewinder.restore(length)
    session.quantize(session.target_cache)
    try:
        _feed(session, length)
        _launch(session)
    except Exception:
        session.fed = session.rewinder.restore(length)
        raise


def _feed(session: Session, length: int) -> None:
    """Feed what is missing of the first `length` tokens, as a block that is kept whole."""
    first = session.fed
    if tokens := session.tokens[first - session.start : length - session.start]:
        session.rewinder.mark(first, len(tokens), plain=session.drafter is None, beside=session.note_draft())
        _, taps = session.target.forward(mx.array([tokens]), session.target_cache, session.taps, watch=())
        session.quantize(session.target_cache)
        if taps is not None:
            session.backlog.add(first, taps, len(tokens))
        session.fed = length


def _extend_draft(session: Session, length: int) -> None:
    if session.drafter is None or not session.draft_cache:
        return
    context = session.backlog.context(session.drafter, session.draft_cache[0].offset, length)
    session.offered(length)
    if context is not None:
        session.drafter.extend(context, session.draft_cache)
    align(session.draft_cache, length)


def _draft_again(session: Session) -> None:
    """Where the draft itself is what fails, it goes on behind a gap: it proposes worse for a while."""
    undos = session.note_draft()
    try:
        _extend_draft(session, session.fed)
        _launch(session)
    except Exception as reason:
        for undo in undos:
            undo()
        align(session.draft_cache, session.fed)
        warnings.warn(
            f"the draft missed the last tokens and proposes worse for a while: {reason}", RuntimeWarning, stacklevel=2
        )


def _launch(session: Session) -> None:
    note_tokens(session.target_cache, session.noise_shift + session.fed)
    mx.async_eval([cache.state for cache in (*session.target_cache, *session.draft_cache)])


def _lost(session: Session, reason: CanNotRewind) -> None:
    _warn(session, f"can't be taken back: {reason}; start with a fresh one")


def _warn(session: Session, what: str) -> None:
    session.stats.cache_lost = True
    warnings.warn(f"the prompt cache {what}", RuntimeWarning, stacklevel=2)
