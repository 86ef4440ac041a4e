"""What plain rounds leave for the draft to take in: so much at most, and it is not taken for the time of a block."""

from __future__ import annotations

import pytest
from tiny import make_draft, make_target

from dflash_mlx import api, generate_step
from dflash_mlx.decode import loop, session
from dflash_mlx.decode.backlog import Backlog
from dflash_mlx.decode.block_size import Widths


@pytest.fixture
def watched(monkeypatch):
    """Decodes with rounds of these widths: (width, seconds) of each, and how many tokens waited at most."""

    def run(widths: list[int]) -> tuple[list[tuple[int, float | None]], int]:
        rounds, waited = [], []

        class Chooser:
            reason = None

            def __init__(self, *args, **kwargs):
                self.widths = iter(widths)
                self.current = next(self.widths)

            def next(self, context, remaining, room=None, offered=None):
                return Widths(min(self.current, remaining), min(self.current, remaining))

            def observe(self, context, width, accepted, seconds, lookup=False):
                rounds.append((width, seconds))
                self.current = next(self.widths, 1)

        class Watched(Backlog):
            def add(self, *args):
                super().add(*args)
                waited.append(len(self))

        monkeypatch.setattr(api, "AutoBlockSize", Chooser)
        monkeypatch.setattr(session, "Backlog", Watched)
        list(generate_step([1, 2, 3], make_target(), make_draft(), max_tokens=len(widths)))
        return rounds, max(waited)

    return run


def test_no_more_than_the_longest_backlog_waits(watched, monkeypatch):
    monkeypatch.setattr(session, "LONGEST_BACKLOG", 16)
    assert watched([1] * 50)[1] == 16


def test_a_block_that_takes_in_a_long_backlog_is_not_timed(watched, monkeypatch):
    monkeypatch.setattr(loop, "USUAL_BACKLOG", 8)
    blocks = [seconds for width, seconds in watched([1] * 12 + [4] * 20)[0] if width == 4]
    assert blocks[0] is None
    assert len(blocks) > 2
    assert all(seconds is not None for seconds in blocks[1:])
