"""The examples and the README's Python run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_example_runs(example):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)], capture_output=True, text=True, timeout=240, check=True
    )
    if example == "compare.py":
        assert done.stdout.count("identical") == 4
    assert "tau" in done.stdout + done.stderr


def test_readme_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_commands_exist():
    """Every dflash-mlx command line in the README parses."""
    import shlex

    from dflash_mlx.cli import make_parser

    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^dflash-mlx (.+?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        make_parser()[0].parse_args(shlex.split(line))
