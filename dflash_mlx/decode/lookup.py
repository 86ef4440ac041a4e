"""Prompt lookup: propose what followed when the text last stood as it stands now. Needs no draft model.

Pays where text is copied: edits of code, quotes, tables. Alone it stands in for a draft (`draft_model="lookup"`);
beside a draft it proposes where it finds a long match, and the draft does elsewhere. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import mlx.core as mx

from ..arguments import whole
from .dflash import model_drafter
from .drafter import Drafter, DraftRequest, Proposal

NAME = "lookup"  # as `draft_model`
BLOCK_SIZE = 16
# Tokens that have to match, at least: alone, and beside a draft, which does better than a short match.
SHORTEST, SHORTEST_BESIDE = 4, 8
# Matches are sought at the shortest length times these, the longest first.
MULTIPLES = (1, 2, 4)


class TokenIndex:
    """The tokens of a text and where its runs of some lengths ended last; an entry of a cache (mlx-lm's protocol).

    Adding or dropping a token costs one dictionary entry a length, a search one look-up a length, however long the text
    is; a copy copies flat tables.

    Args:
        lengths: ascending. offset: tokens before the first that is known.

    Attributes:
        tokens: by absolute position; one that is not known is a negative number of its own and equals no other.
    """

    def __init__(self, lengths: Sequence[int], offset: int = 0):
        self.lengths = tuple(lengths)
        self._set([])
        self.skip(offset)

    @property
    def offset(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A run is noted when the token behind it comes, so the last run is not found as itself."""
        for token in tokens:
            end = len(self.tokens)
            for length, ends, earlier in zip(self.lengths, self._ends, self._earlier, strict=True):
                if length <= end:
                    run = hash(tuple(self.tokens[end - length :]))
                    earlier.append(ends.get(run, 0))
                    ends[run] = end
            self.tokens.append(token)

    def match(self) -> tuple[int, int]:
        """The longest of `lengths` whose last run came up before, and where it ended last; (0, 0) if none did."""
        for length, ends in zip(reversed(self.lengths), reversed(self._ends), strict=True):
            run = self.tokens[-length:]
            end = ends.get(hash(tuple(run)), 0)
            if end and self.tokens[end - length : end] == run:
                return length, end
        return 0, 0

    def continuation(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the match; what follows reaches the end of the text repeats.

        A match below the longest length yields twice as many tokens as matched: a short one is often chance.
        """
        length, end = self.match()
        if length == 0:
            return []
        count = limit if length == self.lengths[-1] else min(limit, 2 * length)
        period = len(self.tokens) - end
        return list(takewhile(lambda token: token >= 0, (self.tokens[end + i % period] for i in range(count))))

    def skip(self, n: int) -> None:
        """Append `n` tokens that are not known."""
        self.extend(range(-1 - len(self.tokens), -1 - len(self.tokens) - n, -1))

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens; runs then ended last where they did before. Returns how many were dropped."""
        n = max(0, min(n, len(self.tokens)))
        for end in range(len(self.tokens) - 1, len(self.tokens) - n - 1, -1):
            for length, ends, earlier in zip(self.lengths, self._ends, self._earlier, strict=True):
                if length <= end:
                    run = hash(tuple(self.tokens[end - length : end]))
                    if before := earlier.pop():
                        ends[run] = before
                    else:
                        del ends[run]
        del self.tokens[len(self.tokens) - n :]
        return n

    def __deepcopy__(self, memo: Any) -> TokenIndex:
        copy = TokenIndex.__new__(TokenIndex)
        copy.lengths, copy.tokens = self.lengths, self.tokens.copy()
        copy._ends = [ends.copy() for ends in self._ends]
        copy._earlier = [earlier.copy() for earlier in self._earlier]
        return copy

    def is_trimmable(self) -> bool:
        return True

    @property
    def state(self) -> tuple:
        return mx.array(self.tokens, mx.int32), mx.array(self.lengths, mx.int32)

    @state.setter
    def state(self, state: tuple) -> None:
        tokens, lengths = (array.tolist() for array in state)
        self.lengths = tuple(lengths)
        self._set(tokens)

    @classmethod
    def from_state(cls, state: tuple) -> TokenIndex:
        index = cls(())
        index.state = state
        return index

    def size(self) -> int:
        return len(self.tokens)

    def empty(self) -> bool:
        return not self.tokens

    @property
    def nbytes(self) -> int:
        """On the device: nothing."""
        return 0

    def _set(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        # Of each length: hash of a run -> index behind its last place; and run by run the value it had before.
        self._ends: list[dict[int, int]] = [{} for _ in self.lengths]
        self._earlier: list[list[int]] = [[] for _ in self.lengths]
        self.extend(tokens)


class PromptLookup:
    """The lookup behind the `Drafter` protocol, alone or beside a draft.

    Args:
        beside: a draft model or another drafter; proposes where the lookup finds nothing.
        min_match: tokens that have to match; default 4 alone, 8 beside a draft.
        block_size: widest block, anchor included, where there is no draft to say.
    """

    def __init__(self, beside: Any = None, min_match: int | None = None, block_size: int = BLOCK_SIZE):
        whole("min_match", min_match, 1, none=True)
        whole("block_size", block_size, 2)
        self.draft: Drafter | None = None if beside is None else model_drafter(beside)
        shortest = min_match or (SHORTEST if self.draft is None else SHORTEST_BESIDE)
        self.lengths = tuple(shortest * multiple for multiple in MULTIPLES)
        self.block_size = block_size if self.draft is None else self.draft.block_size
        self.target_layer_ids: Sequence[int] = () if self.draft is None else self.draft.target_layer_ids
        self.taps_before_norm: bool = getattr(self.draft, "taps_before_norm", False)

    @property
    def dtype(self) -> mx.Dtype | None:
        """What the draft beside it computes in."""
        return getattr(self.draft, "dtype", None)

    def make_cache(self, offset: int = 0) -> list[Any]:
        """The draft's cache, then the index."""
        own = TokenIndex(self.lengths, offset)
        return [own] if self.draft is None else [*self.draft.make_cache(offset), own]

    def context(self, taps: mx.array) -> mx.array:
        assert self.draft is not None  # else no taps are wanted
        return self.draft.context(taps)

    def extend(self, context: mx.array, cache: list[Any]) -> None:
        assert self.draft is not None
        self.draft.extend(context, cache[:-1])

    def offer(self, tokens: Sequence[int], start: int, cache: list[Any]) -> int | None:
        """See `Drafter`; without a match the draft beside it is to be asked, or nothing is proposed."""
        index: TokenIndex = cache[-1]
        if index.offset < start:
            index.skip(start - index.offset)
        index.extend(tokens[index.offset - start :])
        found = len(index.continuation(self.block_size - 1))
        return found if found or self.draft is None else None

    def propose(self, request: DraftRequest) -> Proposal:
        found = request.cache[-1].continuation(request.width - 1)
        if found or self.draft is None:
            return Proposal(mx.array(found, mx.int32), lookup=True)
        return self.draft.propose(replace(request, cache=request.cache[:-1]))


def as_drafter(draft_model: Any) -> Drafter:
    """The drafter for whatever was passed as `draft_model`. Raises `TypeError` for what is none."""
    return PromptLookup() if isinstance(draft_model, str) and draft_model == NAME else model_drafter(draft_model)
