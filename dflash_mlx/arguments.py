"""Values that callers pass to the public functions: of the right kind and within range, or one line that names them.

A `bool` is no number here, a text is none either, and NaN is out of every range. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, Python's or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(name: str, value: Any, least: float = -math.inf, most: float = math.inf, none: bool = False) -> None:
    """Raise `ValueError` unless `value` is a whole number from `least` to `most`, or with `none` None."""
    if not ((none and value is None) or (is_whole(value) and least <= value <= most)):
        _refuse(name, value, "a whole number", least, most)


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise `ValueError` unless `value` is a finite number from `least` to `most`."""
    if not (_is_real(value) and least <= value <= most and abs(value) < math.inf):
        _refuse(name, value, "a number", least, most)


def one_of(name: str, value: Any, choices: tuple) -> None:
    """Raise `ValueError` unless `value` is one of the choices, in kind too."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        _refuse(name, value, f"one of {', '.join(map(repr, choices))}")


def token_ids(name: str, values: Any) -> None:
    """Raise `ValueError` unless `values` is a collection of whole numbers."""
    if isinstance(values, str) or not isinstance(values, Iterable) or not all(map(is_whole, values)):
        _refuse(name, values, "a collection of whole numbers")


def functions(name: str, values: Any) -> None:
    """Raise `ValueError` unless `values` is a collection of functions."""
    if not isinstance(values, Iterable) or not all(map(callable, values)):
        _refuse(name, values, "a list of functions")


def _refuse(name: str, value: Any, what: str, least: float = -math.inf, most: float = math.inf) -> None:
    limits = f" from {least:g}" * math.isfinite(least) + f" to {most:g}" * math.isfinite(most)
    said = repr(value)
    raise ValueError(f"{name} is {said if len(said) < 60 else said[:57] + '...'}, expected {what}{limits}")
