"""The draft's own KV cache: one preallocated buffer a layer, rows in time order, absolute positions.

Context rows persist; the rows of a block are written behind them, seen by that block's attention and
overwritten by the next write, so nothing ever has to be undone. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

STEP = 256  # buffers grow in whole steps


class DraftKVCache:
    """Keys and values of one layer, with mlx-lm's cache protocol.

    Args:
        window: sliding window in tokens, or None. The last `window - 1` context rows are kept (all that a block's
            first token can see); older ones go when the buffer's slack is used up.

    Attributes:
        offset: absolute position of the next context row (int).
        rows: context rows held. `keys`, `values`: `[B, n_kv, capacity, head_dim]` or None.
    """

    def __init__(self, window: int | None = None, offset: int = 0):
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = offset
        self.rows = 0
        self._end = 0  # index in the buffer behind the last context row

    @property
    def visible(self) -> int:
        """Context rows that the next block attends to."""
        return self.rows if self.window is None else min(self.rows, self.window - 1)

    def write(self, keys: mx.array, values: mx.array, context_rows: int) -> tuple[mx.array, mx.array]:
        """Append `context_rows` rows that stay and the rows behind them that do not.

        Args:
            keys, values: `[B, n_kv, context_rows + block, head_dim]`, context first, roped at
                positions `offset ..`.

        Returns:
            Views `[B, n_kv, visible + block, head_dim]` of keys and values in time order.
        """
        new = keys.shape[2]
        all_keys, all_values = self._reserve(keys, values, new)
        stop = self._end + new
        all_keys[..., self._end : stop, :] = keys
        all_values[..., self._end : stop, :] = values
        self._end += context_rows
        self.rows += context_rows
        self.offset += context_rows
        first = self._end - self.visible
        return all_keys[..., first:stop, :], all_values[..., first:stop, :]

    def skip(self, n: int) -> None:
        """Pass over `n` positions whose rows no later block can see; all rows held fall out of the window."""
        self.offset += n
        self.rows = self._end = 0

    def note(self) -> Callable[[], None]:
        """How to get back to what is held now, also from a `write` that was broken off."""
        offset, rows, end = self.offset, self.rows, self._end
        if self.window is not None:  # a buffer of fixed size; the window moves within
            return partial(vars(self).update, dict(vars(self)))

        def undo() -> None:
            if self.keys is not None and self.values is not None and self.keys.shape[2] != self.values.shape[2]:
                self.keys, self.values = self.keys[..., :end, :], self.values[..., :end, :]
            self.offset, self.rows, self._end = offset, rows, end

        return undo

    def crop(self, length: int) -> None:
        """Cut back to the context of the first `length` tokens. Rows that slid out of a window stay gone."""
        self.trim(self.offset - length)

    def _reserve(self, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array]:
        """Both buffers, with room for `new` more rows."""
        if self.keys is not None and self.values is not None and self._end + new <= self.keys.shape[2]:
            return self.keys, self.values
        # Full layers grow by a sixteenth, so that copies stay a constant share of the rows ever written;
        # sliding layers move their window to the front of a buffer of fixed size.
        keep = self.visible
        slack = max(STEP, min(self.window, keep + new) // 8) if self.window else (keep + new) // 16
        capacity = -(-(keep + new + slack) // STEP) * STEP
        self.keys = self._moved(self.keys, keys, keep, capacity)
        self.values = self._moved(self.values, values, keep, capacity)
        self.rows = self._end = keep
        return self.keys, self.values

    def _moved(self, old: mx.array | None, like: mx.array, keep: int, capacity: int) -> mx.array:
        heads, dim = like.shape[1], like.shape[3]
        room = mx.zeros((like.shape[0], heads, capacity - keep, dim), like.dtype)
        if old is None or keep == 0:
            return room
        return mx.concatenate([old[..., self._end - keep : self._end, :], room], axis=2)

    # mlx-lm's cache protocol -------------------------------------------------------------------------

    @property
    def state(self) -> tuple:
        return self.keys, self.values, self.offset, self.rows, self._end, self.window

    @state.setter
    def state(self, state: tuple) -> None:
        self.keys, self.values, self.offset, self.rows, self._end, self.window = state

    @classmethod
    def from_state(cls, state: tuple) -> DraftKVCache:
        cache = cls()
        cache.state = state
        return cache

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens of context; returns how many were dropped."""
        n = max(0, min(n, self.offset))
        gone = min(n, self.rows)
        self.offset -= n
        self.rows -= gone
        self._end -= gone
        return n

    def size(self) -> int:
        return self.rows

    def empty(self) -> bool:
        return self.rows == 0

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes
