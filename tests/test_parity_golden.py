"""Our draft gives what the PyTorch reference gave: hidden states and logits of `reference/golden/`."""

from pathlib import Path

import numpy as np
import pytest
from reference.cases import CASES, Case
from reference.replay import largest_difference, our_outputs

GOLDEN = Path(__file__).parent / "reference" / "golden"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_draft_equals_recorded_reference(case: Case) -> None:
    with np.load(GOLDEN / f"{case.name}.npz") as golden:
        theirs = dict(golden)
    assert max(np.abs(array).max() for array in theirs.values()) > 1
    for attn_implementation in ("eager", "sdpa"):
        ours = our_outputs(case, attn_implementation)
        assert largest_difference(ours, theirs) <= case.tolerance, attn_implementation
