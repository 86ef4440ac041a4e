"""Typed look-ups in a `config.json`; every error names field and file. Knows JSON, not what a draft is."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DraftError

# Where a fact may stand: the nested sections first, then the top level (facts from published configs).
SECTIONS = ("dflash_config", "eagle_config", None)
# Other names of a field, and whether their true is its false.
SPELLINGS: dict[str, dict[str, bool]] = {
    "sample_from_anchor": {"query_zero_predicts_next": False},  # PixelML's adapters, SGLang
    "output_multiplier": {"logit_scale": False},  # vLLM
    "is_neox_style": {"rope_is_neox_style": False, "rope_interleave": True, "rope_interleaved": True},
}

MAX_SIZE = 2**31 - 1  # MLX counts rows and columns in 32 bits
MAX_DEPTH = 64


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a `DraftError` that says what the file is instead."""
    if not path.is_file():
        raise DraftError(f"{path}: no such file; a draft folder holds config.json and model.safetensors")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: of the syntax, the encoding or a number's length
        raise DraftError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise DraftError(f"{path}: holds a JSON {type(config).__name__}, expected an object")
    if _deeper(config, MAX_DEPTH):
        raise DraftError(f"{path}: nested more than {MAX_DEPTH} deep; the file is damaged")
    return config


def _deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def brief(value: Any) -> str:
    """A value from a file as an error shows it: a line, however long or deep the value is."""
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 80
    shown.maxlist = 16
    text = shown.repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def is_number(value: Any, least: float = 0) -> bool:
    """Whether a value from a file is a finite number of at least `least`; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= sys.float_info.max


class Fields:
    """Typed look-ups in one config; every error names field and file.

    Args:
        config: what to look in. source: the file. names: what the file calls a field, where that differs.
    """

    def __init__(self, config: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None):
        self.config, self.source, self.names = config, source, names or {}

    def error(self, field: str, problem: str) -> DraftError:
        return DraftError(f"{self.source}: {self.names.get(field, field)}: {problem}")

    def own(self, field: str) -> Any:
        """The value of a field that means something in `dflash_config` alone, or None."""
        nested = self.config.get("dflash_config")
        return nested.get(field) if isinstance(nested, Mapping) else None

    def get(self, field: str, *more_sections: str, **default: Any) -> Any:
        """The value of a field wherever it stands and by any of its names; two different values are a conflict."""
        spellings = {field: False, **SPELLINGS.get(field, {})}
        found = []  # where, as stated, as meant
        for section in (*SECTIONS, *more_sections):
            place = self.config.get(section) if section else self.config
            for name, negated in spellings.items():
                if isinstance(place, Mapping) and (value := place.get(name)) is not None:
                    meant = not value if negated and isinstance(value, bool) else value
                    found.append((f"{section}.{name}" if section else name, value, meant))
        if other := next((place for place in found if place[2] != found[0][2]), None):
            conflict = f"{found[0][0]} is {brief(found[0][1])} but {other[0]} is {brief(other[1])}"
            raise self.error(field, f"{conflict}; keep the one the draft was trained with")
        if found:
            return found[0][2]
        if "default" in default:
            return default["default"]
        raise self.error(field, "missing; the draft can't be run without it")

    def positive(self, field: str, most: int = MAX_SIZE) -> int:
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(field, f"{brief(value)} is not a positive whole number")
        if value > most:
            raise self.error(field, f"{brief(value)} is out of range, {most} is the most")
        return value

    def optional_int(self, field: str) -> int | None:
        return None if self.get(field, default=None) is None else self.positive(field)

    def flag(self, field: str, usual: bool = False, *more_sections: str) -> bool:
        value = self.get(field, *more_sections, default=usual)
        if not isinstance(value, bool):
            raise self.error(field, f"{brief(value)} is not true or false")
        return value

    def optional(self, field: str, kind: type) -> Any:
        """The value of a top-level field if it is of this kind, None where there is none."""
        value = self.config.get(field)
        if value is not None and not isinstance(value, kind):
            what = {"dict": "an object", "list": "a list", "str": "text"}[kind.__name__]
            raise self.error(field, f"{brief(value)} is not {what}")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        if not is_number(value) or value == 0:
            raise self.error(field, f"{brief(value)} is not a positive number")
        return float(value)

    def optional_number(self, field: str, zero_is_off: bool = False) -> float | None:
        off = (None, 0) if zero_is_off else (None,)
        return None if self.get(field, default=None) in off else self.number(field)
