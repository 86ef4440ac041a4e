"""Names of one model are equal by their key: no organisation, lower case, nothing about the packaging.

Knows spellings; knows no table and no file.
"""

from __future__ import annotations

import re

# What quantisers and packagers append to a model's name, stripped repeatedly from the end.
PACKAGING = re.compile(
    r"""(?: - (?: mlx(-lm|-vlm)? | \d(\.\d+)?-?bit | mixed-\d-\d(bit)? | (bf|fp|f|float)(8|16|32)(-dynamic|-block)?
              | mxfp[48] | nvfp4 | int[2-8] | w\d+a\d+ | q\d(-(k|s|m|l|xs|xl|0|1))* | oq\d(\.\d)?e? | optiq.* | ud(-.*)?
              | dwq(-.*)? | qat | gptq | awq | gs?\d+ | mtp | text | vl )
        | (?<=-it)qat )$""",
    re.VERBOSE,
)
# Spellings of one family, as a prefix.
SPELLINGS = (
    (re.compile(r"^(meta-)?llama-?3\.1(?=-)"), "llama-3.1"),
    (re.compile(r"^gemma-?4(?=-)"), "gemma-4"),
)


def normalise(name: str) -> str:
    """The key of a name. Takes repo ids, folders and paths into the hub's cache.

    Keys are compared whole, never by a part of them.
    """
    parts = [part for part in re.split(r"[/\\]+", name.strip()) if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    key = cached.rpartition("--")[2] if cached else (parts or [""])[-1]
    key = re.sub(r"[\s_]+", "-", key.lower())
    while (shorter := PACKAGING.sub("", key)) != key:
        key = shorter
    for spelling, family in SPELLINGS:
        key = spelling.sub(family, key)
    return key
