"""On the bundled pair every round accepts exactly what the reference MLX implementation accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_mlx import stream_generate

RECORD = json.loads((Path(__file__).parent / "reference" / "accepted_mlx.json").read_text())


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("name", ["draft", "draft2"])
def test_accepted_lengths_equal_the_references(demo_pair, demo2, name, block):
    model, draft, tokenizer = demo_pair
    if name == "draft2":
        draft = demo2
    runs = [run for run in RECORD["runs"] if (run["draft"], run["block_size"]) == (name, block)]
    emitted = rounds = 0
    for run in runs[(16, 4, 8).index(block) :: 3]:  # each prompt at one block, for time
        responses = list(
            stream_generate(model, tokenizer, run["prompt"], RECORD["max_tokens"], draft, block_size=block)
        )
        stats = responses[-1].stats
        tokens = [r.token for r in responses]
        assert tokens == run["tokens"]
        per_round, left = [], len(tokens) - 1
        for kept in stats.accepted:
            per_round.append(min(kept + 1, left))
            left -= per_round[-1]
        assert per_round == run["emitted"]
        emitted, rounds = emitted + sum(per_round), rounds + stats.rounds
    print(f"{name}, block {block}: tau {emitted / rounds:.3f}")
    assert emitted / rounds > 2
