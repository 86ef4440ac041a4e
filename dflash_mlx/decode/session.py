"""One round: draft a block, verify it, keep the accepted prefix. The host waits for the device once.

    flight = session.dispatch(widths)      draft and verify are built and queued, nothing waits
    done = session.settle(flight)          the one sync; then the target's cache is cut back, lazily

An exception may strike between any two instructions. Nothing here tries to be whole then: each round begins with a
mark of all caches, from which `ending.py` recovers. Knows tokens, caches and their lengths; knows no text, no end token
and no limit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..target import Target
from ..target.rewind import Mark
from ..target.undo import Undo, note_beside
from .acceptance import count_accepted, reject
from .backlog import Backlog
from .block_size import Widths
from .caches import cached_tokens
from .drafter import Drafter, DraftRequest, Proposal
from .sampling import Noise, TokenPicker
from .stats import GenerationStats

LONGEST_BACKLOG = 256  # tokens that wait for the draft at most; more would only hold memory


@dataclass
class Flight:
    """A round on its way: what the device will answer (`packed`), and what belongs to its rows."""

    start: int  # tokens in front of it
    width: int
    packed: mx.array  # of a block [2 + width] int32: accepted, draft finite, picks; of a plain round the pick
    picks: mx.array  # [width]
    logprobs: mx.array  # [width, V]; of a plain round [V]
    taps: mx.array | None  # [1, width, taps * Ht] what the draft wants of the block's rows
    backlog: int = 0  # tokens whose taps the draft had to take in first
    lookup: bool = False  # whether its proposals were copied from the text


@dataclass
class Round:
    """A finished round: its tokens are the accepted draft tokens and one of the target's own."""

    width: int
    accepted: int
    tokens: list[int]
    logprobs: list[mx.array]  # [V] each; they are computed or queued, so that any thread can read them


def sync(array: mx.array) -> list[int]:
    """The only place in a round where the host waits."""
    return cast(list[int], array.tolist())


class Session:
    """State of one generation: both caches, the tokens so far, and the context the draft has not seen yet.

    Args:
        target, drafter: drafter None decodes plainly.
        target_cache, draft_cache: updated in place; they may hold earlier tokens.
        held: how many; recurrent caches do not say. noise_shift: how far behind its position a token's noise is.
        private: whether nobody sees the caches afterwards; how they end then does not matter.
        quantize: called with the target's cache after each forward (mlx-lm's `maybe_quantize_kv_cache`).
        profile: time host, draft and verify apart, at the price of a second sync a round.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        picker: TokenPicker,
        target_cache: list[Any],
        draft_cache: list[Any],
        stats: GenerationStats,
        *,
        held: int | None = None,
        noise_shift: int = 0,
        private: bool = False,
        stream: Any = None,
        quantize: Callable[[list[Any]], None] = lambda cache: None,
        profile: bool = False,
    ):
        self.target, self.drafter, self.picker, self.stats = target, drafter, picker, stats
        self.target_cache, self.draft_cache = target_cache, draft_cache
        self.private, self.stream, self.quantize, self.profile = private, stream, quantize, profile
        self.taps: Sequence[int] = drafter.target_layer_ids if drafter else ()
        self.fed = cached_tokens(target_cache) if held is None else held
        self.noise_shift = noise_shift
        self.start = self.fed  # absolute position of tokens[0]
        self.rewinder = target.rewinder(target_cache)
        self.vocab = 0  # width of the logits, known after the first round
        self.tokens: list[int] = []  # fed in this call or emitted, anchor last; none while the prompt is being fed
        self.anchor = mx.array([], mx.int32)
        self.seen = self.anchor  # the tokens before the newest round as an array, for processors only
        self.backlog = Backlog(self.fed)
        self.told = False  # whether the caller knows how much of the prompt is fed
        self.loose: list[mx.array] = []  # rows of log-probabilities that the next launch computes along
        if profile:
            stats.draft_seconds = stats.verify_seconds = stats.host_seconds = 0.0

    # One round ------------------------------------------------------------------------------------------

    def dispatch(self, widths: Widths, anchor: mx.array | None = None) -> Flight:
        """Build and queue one round from the anchor (by default the last token); nothing waits."""
        start = time.perf_counter()
        anchor = self.anchor if anchor is None else anchor
        with mx.stream(self.stream):
            taken, beside = self.backlog.taken, self.note_draft()
            block, proposal, backlog = anchor, None, 0
            if widths.verify > 1:
                context = None
                if not self.offered():  # a lookup leaves the draft's context for later
                    backlog, context = len(self.backlog), self.backlog.take(self.drafter)
                proposal = self._draft(anchor, widths.draft, context)
                block = mx.concatenate([anchor, self._valid(proposal)[: widths.verify - 1]])
                if block.shape[0] == 1:
                    proposal = None  # it had nothing to say: a plain round
                start = self._launch("draft_seconds", start, block)
            self.rewinder.mark(self.fed, block.shape[0], plain=self.drafter is None, beside=beside)
            self.backlog.begin_round(taken)
            flight = self._verify(block, proposal, ahead=anchor is not self.anchor)
            flight.backlog = backlog
            taps = [] if flight.taps is None else [flight.taps]
            # With what no token depends on yet: another thread could not compute it.
            rest = [flight.logprobs, *taps, *self.loose, self.seen, self.rewinder.states()]
            self._launch("verify_seconds", start, flight.packed, *rest)
            self.loose = []
        return flight

    def settle(self, flight: Flight) -> Round:
        """Wait for a round, cut the target's cache back to what was kept, and move the anchor."""
        accepted, finite, *picks = sync(flight.packed) if flight.width > 1 else (0, 1, *sync(flight.packed))
        tokens = picks[: accepted + 1]
        rejected = flight.width - len(tokens)
        rows = [flight.logprobs]
        with mx.stream(self.stream):
            length = self.fed - rejected
            self.fed = self.rewinder.rewind(self.fed, length)
            if flight.width > 1:
                # Taken out, or a caller that keeps one row keeps those of the whole block.
                kept = mx.take(flight.logprobs, mx.arange(len(tokens)), axis=0) if rejected else flight.logprobs
                rows = [kept[i] for i in range(len(tokens))]
                self.loose += rows
        if flight.taps is not None:
            self.backlog.add(flight.start, flight.taps, len(tokens))
            if len(self.backlog) >= LONGEST_BACKLOG:
                self._catch_up()
        self.stats.lookup_rounds += flight.lookup
        self.tokens += tokens
        self.anchor = mx.array(tokens[-1:], mx.int32)
        if not finite:
            dtype = str(getattr(self.drafter, "dtype", "unknown dtype")).removeprefix("mlx.core.")
            self.switch_off(f"it computed NaN or infinite values in {dtype}")
        return Round(flight.width, accepted, tokens, rows)

    def compute_rows(self) -> None:
        """Before tokens are handed out with no round queued behind them: the rows that it would have computed along."""
        if self.loose:
            mx.async_eval(*self.loose)
            self.loose = []

    def offered(self, length: int | None = None) -> int | None:
        """Tell a lookup the tokens (the first `length`, absolute): how many it proposes next, see `Drafter`."""
        offer = getattr(self.drafter, "offer", None)
        if offer is None:
            return None
        tokens = self.tokens if length is None else self.tokens[: length - self.start]
        return offer(tokens, self.start, self.draft_cache)

    def _draft(self, anchor: mx.array, width: int, context: mx.array | None) -> Proposal:
        assert self.drafter is not None
        # By match the draft picks with the target's own noise, by rejection it must not know it.
        purpose = "draft" if self.picker.rejection else "pick"
        noise = self.picker.noise(self.noise_shift + self.fed + 1, width - 1, self.vocab, purpose)
        return self.drafter.propose(
            DraftRequest(anchor, width, self.tokens, context, self.draft_cache, self.target, self.picker, noise)
        )

    def _valid(self, proposal: Proposal) -> mx.array:
        """The proposed tokens `[width - 1]`; an id outside the vocabulary can't be embedded and becomes another."""
        tokens = getattr(proposal, "tokens", None)
        if not isinstance(tokens, mx.array) or tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise TypeError(
                f"{type(self.drafter).__name__}.propose must return a Proposal whose tokens are integers [width - 1]"
            )
        return mx.minimum(tokens.astype(mx.uint32), self.vocab - 1).astype(mx.int32)

    def _verify(self, block: mx.array, proposal: Proposal | None, ahead: bool) -> Flight:
        width, first = block.shape[0], self.fed
        logits, taps = self.target.forward(block[None], self.target_cache, self.taps, self.rewinder.watch())
        self.fed += width
        self.quantize(self.target_cache)
        self.vocab = logits.shape[-1]
        noise = self.picker.noise(self.noise_shift + first + 1, width, self.vocab)
        if self.picker.logits_processors:
            self.seen = self._tokens_before(len(self.tokens) if ahead else len(self.tokens) - 1)
            logits = self.picker.processed(logits[0], self.seen, block)[None]
        picks, logprobs = self.picker.pick(logits[0], noise)
        packed = picks
        if proposal is not None:
            accepted = count_accepted(block[1:], picks)
            if self.picker.rejection and noise is not None:
                accepted, picks = self._reject(block[1:], proposal, logits[0], noise, first)
            finite = mx.array(True) if proposal.finite is None else proposal.finite
            packed = mx.concatenate([x.reshape(-1).astype(mx.int32) for x in (accepted, finite, picks)])
        found = proposal is not None and proposal.lookup
        rows = logprobs[0] if width == 1 else logprobs
        return Flight(first, width, packed, picks, rows, taps if self.drafter else None, lookup=found)

    def _tokens_before(self, count: int) -> mx.array:
        """The first `count` tokens; only those that are new are copied from the host."""
        if (held := self.seen.shape[0]) == count:
            return self.seen
        return mx.concatenate([self.seen, mx.array(self.tokens[held:count], mx.int32)])

    def _reject(
        self, proposed: mx.array, proposal: Proposal, logits: mx.array, noise: Noise, first: int
    ) -> tuple[mx.array, mx.array]:
        rows = proposed.shape[0]
        position = self.noise_shift + first + 1
        uniform = self.picker.uniform(range(position, position + rows), "accept")[:, 0]
        draft = None if proposal.scores is None else proposal.scores[:rows]
        return reject(proposed, draft, self.picker.scores(logits, noise.coin), uniform, noise.gumbel)

    def _launch(self, part: str, start: float, *arrays: Any) -> float:
        """Queue the arrays built since `start`; when profiling, wait for them and book both times."""
        if not self.profile:
            mx.async_eval(*arrays)
            return start
        built = time.perf_counter()
        mx.eval(*arrays)
        done = time.perf_counter()
        for name, seconds in (("host_seconds", built - start), (part, done - built)):
            setattr(self.stats, name, getattr(self.stats, name) + seconds)
        return done

    # Before the first round and after the last ------------------------------------------------------------

    def prefill(
        self,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None] | None = None,
        stops: Collection[int] = (),
    ) -> None:
        """Feed all but the last prompt token in chunks; the draft's context is projected chunk by chunk.

        The last token is the first anchor: its plain round gives the first token, as in mlx-lm.

        Args:
            progress: told how much is fed, and of how much, before the first chunk and after each; there an exception
                leaves the caches.
            stops: lengths at which a chunk ends, however short.
        """
        total, done = prompt.shape[0], 0
        self.told = progress is not None
        with mx.stream(self.stream):
            mark = self._mark_prompt()
            while True:
                if progress is not None:
                    progress(done, total)
                if done == total - 1:
                    break
                mark.idle = False
                chunk = prompt[done : min([done + step_size, total - 1, *(stop for stop in stops if stop > done)])]
                _, taps = self.target.forward(chunk[None], self.target_cache, self.taps)  # logits stay unevaluated
                self.quantize(self.target_cache)
                if self.drafter and taps is not None:
                    self.drafter.extend(self.drafter.context(taps), self.draft_cache)
                done += chunk.shape[0]
                self.fed += chunk.shape[0]
                mx.eval([cache.state for cache in (*self.target_cache, *self.draft_cache)])
                mx.clear_cache()
                mark = self._mark_prompt()
        self.tokens = cast(list[int], prompt.tolist())
        self.anchor = prompt[-1:]
        self.backlog = Backlog(self.fed)
        if self.picker.logits_processors:
            self.seen = prompt[:-1].astype(mx.int32)

    def switch_off(self, reason: str) -> None:
        """Go on without the draft, visibly."""
        warnings.warn(f"draft switched off: {reason}; decoding goes on without it", RuntimeWarning, stacklevel=2)
        self.stats.draft_off_reason, self.stats.draft_broken = reason, True
        for cache in self.draft_cache:
            cache.trim(cache.offset)  # its rows may not be finite either
        self.drafter, self.taps, self.backlog = None, (), Backlog(self.fed)

    def note_draft(self) -> list[Undo]:
        """How the draft's caches get back to what they hold now."""
        return [note_beside(cache) for cache in self.draft_cache]

    def _mark_prompt(self) -> Mark:
        """All caches are whole: here an exception goes back to, where that costs no memory."""
        mark = self.rewinder.mark(self.fed, 0, plain=True, beside=self.note_draft())
        mark.idle = True
        self.rewinder.marks = [mark]
        return mark

    def _catch_up(self) -> None:
        """While many plain rounds follow each other, give the draft its rows now and then, in one go."""
        assert self.drafter is not None
        with mx.stream(self.stream):
            context = self.backlog.take(self.drafter)
            assert context is not None
            self.drafter.extend(context, self.draft_cache)
            mx.async_eval([cache.state for cache in self.draft_cache])
