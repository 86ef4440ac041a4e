"""MLX's own settings for decoding, by chip: environment variables that MLX reads once, when it starts.

Only the commands set them, before anything imports MLX; the library never does, and what the user has set stays.

`MLX_MAX_MB_PER_BUFFER` (in truth Mi elements of what a command buffer reads) is 40 to 50 by itself. A large model
trips it at each layer, experts at each matrix, and each boundary idles the GPU for some 20 us (mlx#4521: 5 to 8 % of a
step on an M3 Ultra together with the limit of operations; vllm-metal#637: 58 to 91 tokens/s on an M1 Ultra by this one
alone; nothing or less on M5). Texts stay the same, bit for bit. Prefill holds its temporaries longer, hence only where
there is memory, as oMLX has it.

Two others are left alone on purpose. A raised `MLX_MAX_OPS_PER_BUFFER` (mlxcel#360: 11 % on an M1 Ultra) makes a step
of a usual model shorter than the ten command buffers that MLX keeps in flight; a step queued ahead then finds the
caches in use and copies them whole. `MLX_METAL_FAST_SYNCH` can lock the GPU until the machine restarts, on a single
machine too (mlx#3830), and MLX's documentation advises against it (mlx#4005). `benchmark --settings NAME=VALUE` tries
either.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass

SWITCH = "DFLASH_MLX_SETTINGS"  # "none": leave MLX as it is
LEAST_MEMORY = 64 * 2**30
LARGE_BUFFERS = {"MLX_MAX_MB_PER_BUFFER": "512"}
# Chip -> what helps there; M4 has no public measurement, on M5 larger buffers are slower.
SETTINGS: dict[str, dict[str, str]] = {"M1": LARGE_BUFFERS, "M2": LARGE_BUFFERS, "M3": LARGE_BUFFERS}


@dataclass(frozen=True)
class Machine:
    """What the settings go by: the chip's name ("Apple M3 Ultra", or empty) and memory in bytes."""

    chip: str
    memory: int

    @classmethod
    def here(cls) -> Machine:
        if sys.platform != "darwin":
            return cls("", 0)
        try:
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string", "hw.memsize"]
            told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=5)
            chip, memory = told.stdout.splitlines()
            return cls(chip.strip(), int(memory))
        except (OSError, ValueError, subprocess.SubprocessError):
            return cls("", 0)  # then MLX stays as it is

    def __str__(self) -> str:
        return f"{self.chip} with {self.memory / 2**30:.0f} GB" if self.chip else "this machine"

    def settings(self) -> dict[str, str]:
        """The variables that help on this machine."""
        found = re.match(r"Apple (M\d+)\b", self.chip)
        return dict(SETTINGS.get(found[1], {})) if found and self.memory >= LEAST_MEMORY else {}


def apply(environ: MutableMapping[str, str], machine: Machine | None = None) -> str | None:
    """Set what helps here and is not set yet; a line for the user, None where there is nothing to say."""
    if environ.get(SWITCH) == "none":
        return None
    machine = machine or Machine.here()
    wanted = machine.settings()
    new = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(new)
    if not wanted:
        return None
    kept = [f"{name}={environ[name]} is yours" for name in wanted if name not in new]
    said = ", ".join([*(f"{name}={value}" for name, value in new.items()), *kept])
    return f"MLX on {machine.chip}: {said} ({SWITCH}=none leaves MLX as it is)"


def parse(text: str) -> dict[str, str]:
    """Settings written as NAME=VALUE, separated by commas. Raises `ValueError` for anything else."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if bad := [name for name, _, value in pairs if not re.fullmatch(r"MLX_[A-Z0-9_]+", name) or not value]:
        raise ValueError(f"{bad[0] or text!r} is no MLX_NAME=VALUE")
    return {name: value for name, _, value in pairs}
