"""The rotary embeddings of a draft, read from any published spelling. Knows config keys, no module."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from ..draft.rope import ORIGINAL, Rope
from .fields import SPELLINGS, Fields, brief, is_number

# Fields that each rope type needs besides its type; other types are refused by name.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor",),
}

# Further numbers of a rope section, each with the least it may be.
ROPE_OPTIONS = {"beta_fast": 1e-6, "beta_slow": 1e-6, "mscale": 0, "mscale_all_dim": 0, "attention_factor": 1e-6}

SECTIONS = ("rope_parameters", "rope_scaling")
# Read apart from the scaling, or facts of the target that a draft's one-dimensional positions have no use for.
NOT_SCALING = (
    "rope_theta", "type", "partial_rotary_factor", "rope_dim", "mrope_section", "mrope_interleaved", "is_neox_style",
    *SPELLINGS["is_neox_style"],
)  # fmt: skip


def read_ropes(read: Fields, layer_types: Collection[str], full: str, sliding: str, head_dim: int) -> tuple[Rope, ...]:
    """The rope of full and of sliding layers; where the draft has one kind of layers, that kind's twice.

    A section holds one rope, or one for each layer type (Gemma, Laguna); `swa_rope_parameters` is the latter's older
    spelling. Bases and scalings that stand in several places must agree.
    """
    places: dict[str, dict[str, Any]] = {name: read.optional(name, dict) or {} for name in SECTIONS}
    by_type = [name for name, section in places.items() if any(isinstance(value, dict) for value in section.values())]
    older = read.optional("swa_rope_parameters", dict)
    top = read.config.get("rope_theta")
    if not by_type and older is None:
        rope = _rope(read, places, head_dim, top)
        return rope, rope
    found = {}
    for kind in (kind for kind in (full, sliding) if kind in layer_types):
        own = older if kind == sliding else None
        sections = {"swa_rope_parameters": own} if own else _sections(read, places, by_type, kind)
        # a base of its own here: the top level's is that of the other kind
        own_base = own or (by_type and any(section.get("rope_theta") is not None for section in sections.values()))
        found[kind] = _rope(read, sections, head_dim, None if own_base else top)
    only = next(iter(found.values()))
    return found.get(full, only), found.get(sliding, only)


def _sections(
    read: Fields, places: dict[str, dict[str, Any]], by_type: Collection[str], kind: str
) -> dict[str, dict[str, Any]]:
    """The sections that say what the rope of one kind of layers is, by where they stand."""
    sections = {}
    for name, section in places.items():
        if name not in by_type:
            sections[name] = section
        elif isinstance(section.get(kind), dict):
            sections[f"{name}.{kind}"] = section[kind]
        else:
            raise read.error(f"{name}.{kind}", "missing, but layer_types has such layers")
    return sections


def _rope(read: Fields, places: dict[str, dict[str, Any]], head_dim: int, top: Any) -> Rope:
    sections = {name: section for name, section in places.items() if section}
    bases = {name: section["rope_theta"] for name, section in sections.items() if section.get("rope_theta") is not None}
    if top is not None:
        bases["rope_theta"] = top
    if not bases:
        where = " and under ".join(sections) or "rope_parameters"
        raise read.error("rope_theta", f"missing, at the top level and under {where}")
    for name, theta in bases.items():
        if not is_number(theta, 1) or theta == 1:
            raise read.error("rope_theta", f"{brief(theta)} ({name}) is not a number above 1")
    if len(set(bases.values())) > 1:
        raise read.error("rope_theta", f"conflicting values {bases}; keep the one the draft was trained with")
    scalings = [_scaling(read, name, section) for name, section in sections.items()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise read.error("rope_scaling", "differs from rope_parameters; keep the one the draft was trained with")
    rope = Rope(float(theta), scalings[0] if scalings else None, _partial(read, sections, head_dim))
    if (rope.scaling or {}).get("rope_type") == "dynamic" and int(head_dim * rope.partial) < 4:
        raise read.error("head_dim", f"{head_dim}: rope_type 'dynamic' rotates 4 elements at least")
    return rope


def _partial(read: Fields, sections: dict[str, dict[str, Any]], head_dim: int) -> float:
    """The rotated share: a section's own before the top level's; `rope_dim` (elements, SGLang) before both."""
    name, share = "partial_rotary_factor", read.get("partial_rotary_factor", default=None)
    for section, values in sections.items():
        if values.get("partial_rotary_factor") is not None:
            name, share = f"{section}.partial_rotary_factor", values["partial_rotary_factor"]
    for section, values in sections.items():
        if (size := values.get("rope_dim")) is not None:
            if not isinstance(size, int) or isinstance(size, bool):
                raise read.error(f"{section}.rope_dim", f"{brief(size)} is not a number of elements")
            name, share = f"{section}.rope_dim", size / head_dim
    if share is None:
        return 1.0
    if not is_number(share) or not 0 < share <= 1 or (rotated := int(head_dim * share)) < 2 or rotated % 2:
        raise read.error(name, f"{brief(share)} of head_dim {head_dim} is no even number of rotated elements")
    return float(share)


def _scaling(read: Fields, name: str, section: dict[str, Any]) -> dict[str, Any] | None:
    kinds = [section[key] for key in ("rope_type", "type") if section.get(key) is not None] or ["default"]
    if kinds[0] != kinds[-1]:
        raise read.error(name, f"rope_type and type disagree: {brief(kinds)}")
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        known = ", ".join(ROPE_FIELDS)
        raise read.error(f"{name}.rope_type", f"{brief(kind)} is not supported (known: {known})")
    if ORIGINAL in ROPE_FIELDS[kind]:
        section = {**section, ORIGINAL: _original_length(read, section)}
    if kind == "dynamic" and read.optional_int("max_position_embeddings") is None:
        raise read.error("max_position_embeddings", "missing; rope_type 'dynamic' can't be run without it")
    for field in ROPE_FIELDS[kind]:
        least = 1 if field == "original_max_position_embeddings" else 1e-6
        if not is_number(value := section.get(field), least):
            raise read.error(f"{name}.{field}", f"{brief(value)}: rope_type {kind!r} needs a positive number")
    for field, least in ROPE_OPTIONS.items():
        if (value := section.get(field)) is not None and not is_number(value, least):
            raise read.error(f"{name}.{field}", f"{brief(value)} is not a positive number")
    if kind == "default":
        return None
    if kind == "yarn":
        section = _yarn(read, name, section)
    fields = {key: value for key, value in section.items() if key not in NOT_SCALING and value is not None}
    return {**fields, "rope_type": kind}


def _original_length(read: Fields, section: dict[str, Any]) -> Any:
    """The length that was trained without scaling, where transformers looks for it."""
    places = (read.config.get(ORIGINAL), section.get(ORIGINAL), read.config.get("max_position_embeddings"))
    return next((length for length in places if length is not None), None)


def _yarn(read: Fields, name: str, section: dict[str, Any]) -> dict[str, Any]:
    """What of a yarn section means something, or an error where mlx-lm can't do as transformers does.

    transformers takes a stated `attention_factor` first, then the ratio of `mscale` and `mscale_all_dim` if both
    are given, else 0.1 ln(factor) + 1. mlx-lm always takes the ratio, with defaults that give the last.
    """
    if not isinstance(truncate := section.get("truncate", True), bool):
        raise read.error(f"{name}.truncate", f"{brief(truncate)} is not true or false")
    stated = section.get("attention_factor")
    derived = 0.1 * math.log(max(section["factor"], 1)) + 1
    if stated is not None and abs(stated - derived) > 1e-4:  # else rounded from the derived one
        if derived == 1:
            raise read.error(f"{name}.attention_factor", f"{stated} without a factor above 1: not supported")
        unused: tuple[str, ...] = ("mscale", "mscale_all_dim")
    elif stated is None and section.get("mscale") and section.get("mscale_all_dim"):
        unused = ()
    else:
        unused = ("attention_factor", "mscale", "mscale_all_dim")
    if truncate:
        unused += ("truncate",)
    return {key: value for key, value in section.items() if key not in unused}
