"""Our draft against the PyTorch reference, side by side on cases that no golden file knows."""

import os

import pytest
from reference.cases import random_case
from reference.replay import largest_difference, our_outputs

pytest.importorskip("torch")
pytest.importorskip("dflash")

from reference.record import reference_outputs

FIRST = int(os.environ.get("PARITY_SEED", "0"))  # another seed gives other cases

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 12))
def test_draft_equals_live_reference(seed: int) -> None:
    case = random_case(seed)
    theirs = reference_outputs(case)
    for attn_implementation in ("eager", "sdpa"):
        ours = our_outputs(case, attn_implementation)
        assert largest_difference(ours, theirs) <= case.tolerance, (attn_implementation, case)
