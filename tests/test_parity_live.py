"""Our draft against the PyTorch reference, side by side on cases that no golden file knows."""

import os

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from reference.cases import Case, draft_config, draft_weights, random_case
from reference.replay import largest_difference, our_outputs

from dflash_mlx.api import _tokens
from dflash_mlx.checkpoint.facts import parse_config
from dflash_mlx.decode.stats import GenerationStats
from dflash_mlx.draft import DFlashDraftModel

pytest.importorskip("torch")
pytest.importorskip("dflash")

from reference.record import reference_draft, reference_outputs

FIRST = int(os.environ.get("PARITY_SEED", "0"))  # another seed gives other cases

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 12))
def test_draft_equals_live_reference(seed: int) -> None:
    case = random_case(seed)
    theirs = reference_outputs(case)
    for attn_implementation in ("eager", "sdpa"):
        ours = our_outputs(case, attn_implementation)
        assert largest_difference(ours, theirs) <= case.tolerance, (attn_implementation, case)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("taps", [[0, 2], [3], [1, 3]], ids=str)  # 3 is the target's last layer
def test_whole_runs_equal_those_of_the_reference(family: str, taps: list[int], tmp_path, monkeypatch) -> None:
    """Tokens and accepted lengths, round by round, on one target saved by transformers; a small vocabulary accepts."""
    import dflash.model
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(FIRST)
    sizes = {"hidden_size": 32, "vocab_size": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    stated = AutoConfig.for_model(
        family, **sizes, num_hidden_layers=4, intermediate_size=48, initializer_range=0.5, eos_token_id=None
    )
    theirs = AutoModelForCausalLM.from_config(stated).float().eval()
    theirs.model.norm.weight.data = torch.linspace(0.1, 3, 32)  # so that the normed state is another one
    theirs.save_pretrained(tmp_path)
    own = {**sizes, "num_target_layers": 4, "target_layer_ids": taps}
    config = draft_config(**own)
    config["dflash_config"]["mask_token_id"] = 2
    case = Case(f"run_{family}_{taps}", config)
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    prompt = [1, 0, 2, 0, 1]
    run = dflash.model.dflash_generate(
        reference_draft(case), theirs, torch.tensor([prompt]), 60, None, return_stats=True
    )
    model, _ = load_model(tmp_path)
    draft = DFlashDraftModel(parse_config(config))
    draft.load_weights([(name, mx.array(array)) for name, array in draft_weights(case).items()])
    stats = GenerationStats()
    tokens = [step.id for step in _tokens(mx.array(prompt), model, draft, stats, max_tokens=60, block_size=8)]
    assert tokens == run.output_ids[0, 5:].tolist()
    rounds = len(run.acceptance_lengths) - 2  # the last ones are cut differently
    assert [kept + 1 for kept in stats.accepted[:rounds]] == run.acceptance_lengths[:rounds]
    assert 1.1 < stats.tau < 7, "some of it was accepted"
