"""The tensors of a draft folder: headers first, checked against the config, then loaded.

Headers alone answer every question about names, shapes and sizes, so a wrong or broken folder is refused before
anything heavy is read. Knows z-lab's names, which `tensors.py` gives any layout, and their MLX-quantised form; knows
no hub and no target.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..draft.config import DraftConfig
from ..draft.dflash2 import DFlash2DraftModel
from ..draft.model import DFlashDraftModel
from ..errors import DraftError
from . import gguf, torch_files
from .compute_dtype import compute_dtype
from .facts import parse_config
from .fields import Fields, brief, read_json
from .folder import check_folder
from .readers import load_file, read_headers
from .recipe import Recipe, Recipes
from .special_tokens import named_mask
from .tensor_info import FLOATS, TensorInfo
from .tensors import canonical_name, canonical_recipes

MODELS: dict[str, type[DFlashDraftModel]] = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel}  # by kind

PACKED = ("U32", "U8")  # quantised matrices, and the scales of mxfp4 and its like
MODELOPT_SCHEME = "hf_quant_config.json"  # where its older versions say how they quantised
INTEGERS = {"d2t": ("I64", "I32")}  # tensors that hold ids

# MLX's quantisation modes -> their bits and group sizes; the first of each is mlx-lm's default
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}

DFLASH2_PARTS = ("candidate_selector.", "attention_conv.", "mlp_conv.")  # of the names of tensors that v1 lacks

# What a tensor name that the draft should not have tells about the folder, most telling first.
FOREIGN_TENSORS = {
    **dict.fromkeys(DFLASH2_PARTS, "a DFlash 2 draft, but config.json describes a DFlash (v1) draft"),
    "markov_head.": "a DSpark draft, which is not supported",
    "lilicorr.": "a LiLiCorr draft, which is not supported",
    "confidence_head.": "a DSpark draft, which is not supported",
    "prefix_gru.": "a Domino draft, which is not supported",
    "embed_proj.": "a Domino draft, which is not supported",
    "d2t": "a draft with a reduced vocabulary, but config.json has no draft_vocab_size below vocab_size",
    "g_proj": "a draft with gated attention, but config.json does not say how (model_type laguna, gating)",
    "aux_hidden_norms.": "a Laguna draft, but config.json does not say so (model_type laguna)",
}


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a draft of this config has, unquantised; nothing is allocated."""
    skeleton = MODELS[config.kind](config)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(skeleton.parameters()))
    return {name: tuple(array.shape) for name, array in parameters}


@dataclass(frozen=True)
class Quantized:
    """How one matrix is stored: bits and group size follow from the shapes, the mode from the config."""

    bits: int
    group_size: int
    mode: str


class Layout(NamedTuple):
    """A checked draft: its config with what only the tensors tell, quantised modules by path, a recipe a tensor, and
    the tensors of the files that are not used with the reason."""

    config: DraftConfig
    quantized: dict[str, Quantized]
    recipes: Recipes
    unused: dict[str, str]


def check_tensors(config: DraftConfig, tensors: Mapping[str, TensorInfo], folder: Path) -> Layout:
    """Check names and shapes of a folder, of any layout, against its config.

    Raises:
        DraftError: a tensor is missing, unknown, of the wrong shape or of a dtype MLX can't read.
    """
    config, recipes, unused = canonical_recipes(config, tensors, folder, _mask_embedding(config, folder))
    expected = expected_shapes(config)
    _refuse_foreign(recipes, expected)
    quantized: dict[str, Quantized] = {}
    for name, recipe in recipes.items():
        path, _, kind = name.rpartition(".")
        if recipe.dtype not in (*FLOATS, *PACKED, *INTEGERS.get(name, ())):
            raise DraftError(f"{recipe.file}: {name} is stored as {recipe.dtype}, which is not read yet")
        matrix = expected.get(f"{path}.weight", ())
        if f"{path}.scales" in recipes and len(matrix) == 2:
            if kind == "weight":
                quantized[path] = _quantized(config, recipes, path, matrix)
            elif kind not in ("scales", "biases"):
                _match(name, recipe, expected)
        else:
            _match(name, recipe, expected)
    _refuse_missing(config, [name for name in expected if name not in recipes], expected, folder)
    if config.tap_size != config.hidden_size and not (config.has_embed_tokens and config.has_lm_head):
        raise DraftError(
            f"{folder}: target_hidden_size {config.tap_size} differs from hidden_size {config.hidden_size}, so the "
            "draft needs embed_tokens and lm_head of its own"
        )
    return Layout(config, quantized, recipes, unused)


def _mask_embedding(config: DraftConfig, folder: Path) -> Recipes:
    """The mask token's own embedding where it lies in a file of its own (Xiaomi's MiMo)."""
    found = torch_files.mask_embedding(folder)
    if found is None:
        return {}
    row, token = found
    file = folder / torch_files.MASK_EMBEDDING
    if token not in (None, config.mask_token_id):
        raise DraftError(f"{file}: mask_token_id {token} differs from config.json's {config.mask_token_id}")
    dtype = next(name for name, dtype in FLOATS.items() if dtype == row.dtype)
    return {"mask_embedding": Recipe(dtype, tuple(row.shape), (), lambda arrays: row, file)}


def _refuse_foreign(recipes: Recipes, expected: Mapping[str, tuple[int, ...]]) -> None:
    parts = {f"{name.removesuffix('.weight')}.{part}" for name in expected for part in ("scales", "biases")}
    unknown = [name for name in recipes if name not in expected and name not in parts]
    for part, meaning in FOREIGN_TENSORS.items():
        if name := next((name for name in unknown if part in name), None):
            raise DraftError(f"{recipes[name].file}: this is {meaning} (it has {brief(name)})")


def _refuse_missing(config: DraftConfig, missing: list[str], expected: Iterable[str], folder: Path) -> None:
    if not missing:
        return
    second = {name for name in expected if any(part in name for part in DFLASH2_PARTS)}
    if second and second <= set(missing):
        raise DraftError(
            f"{folder}: this is a DFlash (v1) draft, but config.json describes DFlash 2 (no tensor of its convolutions "
            "and selector is there); get the config.json that belongs to the tensors"
        )
    if "d2t" in missing:
        raise DraftError(
            f"{folder}: tensor d2t is missing, the map from draft ids to target ids, which the reduced vocabulary of "
            f"draft_vocab_size {config.draft_vocab_size} needs; download the draft again"
        )
    what = f"s {missing[0]} and {len(missing) - 1} more are" if len(missing) > 1 else f" {missing[0]} is"
    raise DraftError(f"{folder}: tensor{what} missing; the download may be incomplete")


def _match(name: str, recipe: Recipe, expected: Mapping[str, tuple[int, ...]]) -> None:
    if name not in expected:
        raise DraftError(
            f"{recipe.file}: unknown tensor {brief(name)}; it belongs to no layout of a draft that is read"
        )
    if recipe.dtype not in INTEGERS.get(name, FLOATS):
        what = "which holds no ids" if name in INTEGERS else "without the scales that a quantised matrix needs"
        raise DraftError(f"{recipe.file}: {name} is stored as {recipe.dtype}, {what}")
    if recipe.shape != expected[name]:
        raise DraftError(
            f"{recipe.file}: {name} has shape {list(recipe.shape)}, config.json asks for {list(expected[name])}"
        )


def _quantized(config: DraftConfig, recipes: Recipes, path: str, shape: tuple[int, ...]) -> Quantized:
    weight, scales, biases = (recipes.get(f"{path}.{kind}") for kind in ("weight", "scales", "biases"))
    assert weight is not None
    assert scales is not None
    section = config.quantization or {}
    own = section.get(path)
    mode = (own if isinstance(own, Mapping) else section).get("mode") or ("affine" if biases else None)
    if mode is None:
        raise DraftError(f"{weight.file}: {path} has no biases and config.json no quantization mode")
    if not isinstance(mode, str) or mode not in MODES:
        raise DraftError(f"{weight.file}: {path}: quantization mode {brief(mode)} is not one of {', '.join(MODES)}")
    rows, columns = shape
    for bits, group_size in itertools.product(*MODES[mode]):
        if columns % group_size or weight.dtype != "U32" or weight.shape != (rows, columns * bits // 32):
            continue
        if scales.shape != (rows, columns // group_size) or (scales.dtype in FLOATS) != (mode == "affine"):
            continue
        if (mode == "affine" and biases and biases.shape == scales.shape) or (mode != "affine" and not biases):
            return Quantized(bits, group_size, mode)
    raise DraftError(
        f"{weight.file}: {path}.weight {list(weight.shape)} with scales {list(scales.shape)} "
        f"is no {mode} form of {list(shape)}"
    )


def load_draft_folder(
    folder: Path,
    dtype: mx.Dtype | None = None,
    attn_implementation: str = "sdpa",
    context_window: int | None = None,
    tokenizer: Path | None = None,
) -> DFlashDraftModel:
    """A draft from a local folder; `dtype` overrides what `compute_dtype` chooses for this machine.

    `tokenizer`: see `folder_facts`.

    Raises:
        DraftError: see `parse_config`, `read_headers`, `check_tensors`; or a weight is not finite.
    """
    layout, tensors = _read(folder, tokenizer)
    config, quantized, recipes, _ = layout
    model = MODELS[config.kind](config, attn_implementation)
    model.context_window = context_window
    if quantized:
        nn.quantize(model, class_predicate=lambda path, _: vars(quantized[path]) if path in quantized else False)
    weights = make(recipes, recipes, tensors)
    refuse_non_finite(weights, folder)
    refuse_bad_ids(weights, layout, tensors, folder)
    model.load_weights(list(weights.items()))
    stored = model.norm.weight.dtype
    chosen, note = compute_dtype(stored, bool(quantized), dtype)
    if dtype is not None or chosen != stored:
        model.set_dtype(chosen)
    if note:
        warnings.warn(f"{folder}: {note}", RuntimeWarning, stacklevel=2)
    model.eval()
    mx.eval(model.parameters())
    return model


def make(names: Iterable[str], recipes: Recipes, tensors: Mapping[str, TensorInfo]) -> dict[str, mx.array]:
    """Make these tensors; their data is read when it is evaluated."""
    wanted = {name: recipes[name] for name in names}
    files = {tensors[source].file for recipe in wanted.values() for source in recipe.sources}
    loaded = {file: load_file(file) for file in files}
    return {
        name: recipe.make([loaded[tensors[source].file][source] for source in recipe.sources])
        for name, recipe in wanted.items()
    }


def check_draft_folder(folder: Path, tokenizer: Path | None = None) -> Layout:
    """A folder's draft by config and headers only; `tokenizer`: see `folder_facts`."""
    return _read(folder, tokenizer)[0]


def _read(folder: Path, tokenizer: Path | None) -> tuple[Layout, dict[str, TensorInfo]]:
    if not folder.is_dir():
        raise DraftError(f"{folder}: no such folder")
    config, tensors = folder_config(folder, tokenizer), read_headers(folder)
    return check_tensors(config, tensors, folder), tensors


def folder_config(folder: Path, tokenizer: Path | None = None) -> DraftConfig:
    """The validated config of a folder; takes and raises as `folder_facts`, raises as `parse_config`."""
    return parse_config(*folder_facts(folder, tokenizer))


def folder_facts(folder: Path, tokenizer: Path | None = None) -> tuple[dict[str, Any], str]:
    """What a folder says of its draft, and the file that says it.

    That is `config.json`, or a GGUF file that has none beside it. `tokenizer` is the target's folder, which is asked
    for the id of a mask token that is stated as text where the draft's own has none.

    Raises `DraftError` when neither file can be read, or nobody knows the mask token.
    """
    check_folder(folder)
    file, scheme = folder / "config.json", folder / MODELOPT_SCHEME
    if not file.exists() and (one := gguf.find(folder)):
        return gguf.config(one), str(one)
    facts = read_json(file)
    if "quantization_config" not in facts and scheme.exists():
        facts["quantization_config"] = read_json(scheme).get("quantization")
    if (mask := named_mask(Fields(facts, str(file)), folder, *([tokenizer] if tokenizer else []))) is not None:
        facts["mask_token_id"] = mask
    return facts, str(file)


def refuse_bad_ids(
    weights: Mapping[str, mx.array], layout: Layout, tensors: Mapping[str, TensorInfo], source: Path
) -> None:
    """Raise `DraftError` unless the vocabulary map gives every draft id a target id of its own, which `t2d` marks.

    Args:
        weights: by canonical name. tensors: of the files, where `t2d` may be. source: named in errors.
    """
    if (offsets := weights.get("d2t")) is None:
        return
    vocab = layout.config.vocab_size
    ids = sorted(cast(list[int], (mx.arange(offsets.size) + offsets).tolist()))
    if ids[0] < 0 or ids[-1] >= vocab or len(set(ids)) < len(ids):
        raise DraftError(
            f"{source}: d2t gives {len(ids)} draft ids {len(set(ids))} target ids from {ids[0]} to {ids[-1]}; "
            f"they must all differ and be below vocab_size {vocab}"
        )
    if name := next((name for name in layout.unused if canonical_name(name) == "t2d"), None):
        file = tensors[name].file
        if not mx.array_equal(load_file(file)[name].astype(mx.bool_), target_ids(offsets, vocab)):
            raise DraftError(f"{file}: {name} marks other target ids than d2t gives; download the draft again")


def target_ids(d2t: mx.array, vocab: int) -> mx.array:
    """`t2d` [vocab]: whether a target id has a draft id."""
    marked = mx.zeros((vocab,), mx.bool_)
    marked[mx.arange(d2t.size) + d2t] = True
    return marked


def refuse_non_finite(weights: Mapping[str, mx.array], source: Path) -> None:
    """Raise `DraftError` naming the first tensor with a NaN or infinite value."""
    floats = {name: array for name, array in weights.items() if mx.issubdtype(array.dtype, mx.floating)}
    # one at a time: together their intermediate results would take as much memory as the weights
    if broken := [name for name, array in floats.items() if not mx.isfinite(array).all().item()]:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise DraftError(f"{source}: {broken[0]}{more} holds NaN or infinite values; the file is damaged")
