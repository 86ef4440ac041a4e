"""What MLX can't compute on this machine's device, in one line instead of a traceback. Knows MLX's messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import TargetError

# MLX's message -> what to do.
LIMITS = {
    r"\[\w+::eval\w*\] .*only supports float32": "load it in float32 (model.set_dtype(mlx.core.float32))",
    r"No Metal back-end": "it needs a Mac",
}


def limit(error: RuntimeError) -> str | None:
    """The line for an error that says what MLX lacks here, None for any other."""
    for message, remedy in LIMITS.items():
        if re.search(message, str(error)):
            return f"MLX can't run this model on this device ({str(error).strip().rstrip('.')}): {remedy}"
    return None


@contextmanager
def limits_told() -> Iterator[None]:
    """Raise `TargetError` for what MLX can't do here; everything else passes."""
    try:
        yield
    except RuntimeError as error:
        if line := limit(error):
            raise TargetError(line) from error
        raise
