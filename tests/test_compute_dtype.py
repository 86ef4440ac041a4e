"""What a draft computes in (C17), and which of its matrices are quantised (C18)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
from dflash_mlx.convert.writer import KEPT
from tiny import draft_config, make_draft, save_draft

from dflash_mlx import convert_draft, load_draft
from dflash_mlx.checkpoint.compute_dtype import compute_dtype

F32, BF16, F16 = mx.float32, mx.bfloat16, mx.float16


@pytest.mark.parametrize(
    ("chip", "stored", "quantized", "wanted", "chosen"),
    [
        ("Apple M1 Max", BF16, True, None, F32),
        ("Apple M2", BF16, True, None, F32),
        ("Apple M2 Ultra", BF16, True, BF16, BF16),
        ("Apple M1", BF16, True, F16, F16),
        ("Apple M1 Pro", BF16, False, None, BF16),
        ("Apple M1", F16, True, None, F16),
        ("Apple M1", F32, True, None, F32),
        ("Apple M3 Max", BF16, True, None, BF16),
        ("Apple M4", BF16, True, None, BF16),
        ("Apple M5 Pro", BF16, True, None, BF16),
        ("Apple M10", BF16, True, None, BF16),
        ("AMD EPYC", BF16, True, None, BF16),
        ("", BF16, True, None, BF16),
    ],
)
def test_the_dtype_by_chip_and_draft(chip, stored, quantized, wanted, chosen):
    dtype, note = compute_dtype(stored, quantized, wanted, chip)
    assert dtype == chosen
    assert (note is not None) == (wanted is None and chosen != stored)
    if note:
        assert note == f"{chip} emulates bfloat16: the draft computes in float32; draft_dtype overrides it"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save_draft(tmp_path / "draft", make_draft(BF16), draft_config(dtype="bfloat16"))


@pytest.fixture
def quantized(tmp_path: Path, draft: Path) -> Path:
    convert_draft(draft, tmp_path / "q", quantize=True, q_group_size=32)
    return tmp_path / "q"


def hidden_dtype(folder: Path, **options: mx.Dtype) -> mx.Dtype:
    model = load_draft(folder, **options)
    context = model.context_feature(mx.ones((1, 4, 128), model.norm.weight.dtype))
    hidden = model(mx.ones((1, 8, 64), model.norm.weight.dtype), context, model.make_cache())
    assert mx.isfinite(hidden).all()
    return hidden.dtype


def test_an_old_chip_computes_a_quantised_draft_in_float32_and_says_so(monkeypatch, draft, quantized):
    assert hidden_dtype(quantized) == BF16
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M1 Max", "architecture": "applegpu_g13s"})
    with pytest.warns(RuntimeWarning, match="q: Apple M1 Max emulates bfloat16: the draft computes in float32") as said:
        assert hidden_dtype(quantized) == F32
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hidden_dtype(draft) == BF16
        assert hidden_dtype(quantized, dtype=BF16) == BF16


def test_float32_is_the_same_draft_but_for_rounding(monkeypatch, quantized):
    one = load_draft(quantized)
    two = load_draft(quantized, dtype=F32)
    gate, other = one.layers[0].mlp.gate_proj, two.layers[0].mlp.gate_proj
    assert mx.array_equal(gate.weight, other.weight)
    assert mx.array_equal(gate.scales.astype(F32), other.scales)


@pytest.mark.parametrize("section", [None, {"group_size": 64, "bits": 8}, {"layers.0.mlp.gate_proj": False, "bits": 4}])
def test_a_quantised_draft_of_others_loads_by_its_tensors_whatever_the_config_says(quantized, section):
    """Converters leave the section out, or state one layer's form and mean another's."""
    expected = load_draft(quantized)
    stated = json.loads((quantized / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        stated.pop(key)
        if section:
            stated[key] = section
    (quantized / "config.json").write_text(json.dumps(stated))
    gate = load_draft(quantized).layers[0].mlp.gate_proj
    assert (gate.bits, gate.group_size, gate.mode) == (4, 32, "affine")
    assert mx.array_equal(gate.weight, expected.layers[0].mlp.gate_proj.weight)


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "candidate_selector.predecessor_codebook.weight",
        "candidate_selector.successor_codebook.weight",
        "candidate_selector.hidden_projection.weight",
        "layers.0.attention_conv.kernel_projection.weight",
        "layers.3.mlp_conv.kernel_projection.weight",
        "layers.3.mlp_conv.base_kernel",
    ],
)
def test_what_quantisation_would_spoil_is_kept(name):
    assert sum(part in name for part in KEPT) == 1


@pytest.mark.parametrize("name", ["layers.0.mlp.gate_proj.weight", "layers.0.self_attn.q_proj.weight"])
def test_the_large_matrices_are_not_kept(name):
    assert not any(part in name for part in KEPT)
