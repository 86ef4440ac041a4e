"""MLX's settings for decoding: by chip, before MLX starts, in the commands only, and the user's own value wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dflash_mlx import settings
from dflash_mlx.cli import processes
from dflash_mlx.settings import SETTINGS, SWITCH, Machine

GIB = 2**30
LARGE = {"MLX_MAX_MB_PER_BUFFER": "512"}


@pytest.mark.parametrize(
    ("chip", "memory", "expected"),
    [
        ("Apple M1 Ultra", 128, LARGE),
        ("Apple M2 Max", 96, LARGE),
        ("Apple M3 Ultra", 512, LARGE),
        ("Apple M1 Max", 64, LARGE),
        ("Apple M1 Max", 32, {}),
        ("Apple M3", 24, {}),
        ("Apple M4 Max", 128, {}),
        ("Apple M5 Max", 128, {}),
        ("Apple M13 Ultra", 512, {}),
        ("Intel(R) Core(TM) i9", 128, {}),
        ("", 0, {}),
    ],
)
def test_what_helps_goes_by_chip_and_memory(chip, memory, expected):
    environ = {"HOME": "/"}
    line = settings.apply(environ, Machine(chip, memory * GIB))
    assert environ == {"HOME": "/", **expected}
    assert (line is not None) == bool(expected)
    if line:
        assert chip in line
        assert "MLX_MAX_MB_PER_BUFFER=512" in line


def test_nothing_that_copies_caches_or_locks_a_gpu_is_in_the_table():
    assert {name for values in SETTINGS.values() for name in values} == {"MLX_MAX_MB_PER_BUFFER"}


def test_the_users_own_value_wins_and_one_switch_leaves_mlx_as_it_is():
    machine = Machine("Apple M3 Ultra", 256 * GIB)
    environ = {"MLX_MAX_MB_PER_BUFFER": "50"}
    assert "MLX_MAX_MB_PER_BUFFER=50 is yours" in settings.apply(environ, machine)
    assert environ == {"MLX_MAX_MB_PER_BUFFER": "50"}
    environ = {SWITCH: "none"}
    assert settings.apply(environ, machine) is None
    assert environ == {SWITCH: "none"}


@pytest.mark.parametrize(
    "text", ["512", "MLX_A", "MLX_A=", "PATH=/tmp", "MLX_A=1,,", "mlx_a=1", "LD_PRELOAD=x,MLX_A=1"]
)
def test_settings_that_are_none_of_mlx_are_refused(text):
    with pytest.raises(ValueError, match="MLX_NAME=VALUE"):
        settings.parse(text)
    assert settings.parse("MLX_A=1, MLX_B=x") == {"MLX_A": "1", "MLX_B": "x"}


PROBE = """
import os, sys
from dflash_mlx import settings
settings.Machine.here = classmethod(lambda cls: cls("Apple M2 Ultra", 128 * 2**30))
seen = []
own = settings.apply
def apply(environ):
    seen.append("mlx.core" in sys.modules)
    return own(environ)
settings.apply = apply
from dflash_mlx.cli import main
code = main(sys.argv[1:])
print(code, seen, os.environ.get("MLX_MAX_MB_PER_BUFFER"))
"""


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["generate", "--model", "/nowhere", "--prompt", "x"], "1 [False] 512"),
        (["benchmark", "--model", "/nowhere"], "1 [False] 512"),
        (["models", "nothing"], "0 [] None"),
    ],
)
def test_they_are_set_before_mlx_starts_by_commands_that_decode(argv, expected):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MLX_", "DFLASH_MLX_SET"))}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *argv], capture_output=True, text=True, env=environ, timeout=120
    )
    assert done.stdout.splitlines()[-1] == expected, done.stderr
    assert ("MLX on Apple M2 Ultra: MLX_MAX_MB_PER_BUFFER=512" in done.stderr) == ("512" in expected)


def test_the_library_sets_nothing():
    code = "import os; before = dict(os.environ); import dflash_mlx; dflash_mlx.load, dflash_mlx.stream_generate; "
    code += "assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def report(tps: float, tokens: list[int]) -> dict:
    row = {"arm": "4", "context": None, "tps": tps, "first_token_seconds": 1 / tps, "peak_memory": tps}
    run = {"arm": "4", "context": None, "turn": 0, "task": "a", "tokens": tokens}
    return {"rows": [row], "runs": [run, {**run, "turn": -1, "tokens": []}], "settings": {"max_tokens": 3}}


def test_sides_alternate_in_processes_that_differ_by_the_settings_alone(monkeypatch, capsys):
    seen, rates = [], iter([100.0, 110.0, 132.0, 110.0])

    def run(argv, environ):
        seen.append((environ.get("MLX_A"), environ[SWITCH], environ["MLX_B"], processes.MARK in environ))
        return report(next(rates), [1, 2, 3, len(seen)]), 0

    monkeypatch.setattr(processes, "_run", run)
    monkeypatch.setenv("MLX_B", "mine")
    monkeypatch.setenv("MLX_A", "7")
    found = processes.compare(["benchmark"], {"MLX_A": "9"}, 2, same_text=True)
    assert seen == [(value, "none", "mine", True) for value in (None, "9", "9", None)]
    (row,) = found.rows()
    assert (row["tps_without"], row["tps_with"]) == (105.0, 121.0)
    assert row["ratio"] == pytest.approx((1.1 + 1.2) / 2)
    assert (row["same_text"], found.good) == (True, True), "what comes behind the limit does not count"
    found.reports["with"][1]["runs"][0]["tokens"] = [1, 2, 4]
    assert not found.good
    assert found.rows()[0]["same_text"] is False


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have settings of its own")
def test_without_any_for_this_machine_some_have_to_be_named(cli):
    outcome = cli("benchmark", "--model", "demo", "--settings")
    assert outcome.code == 1
    assert "--settings: none are known to help" in outcome.err
    assert outcome.err.count("\n") == 1
    assert cli("benchmark", "--model", "demo", "--settings", "FAST=1").code == 2


def test_a_benchmark_with_and_without(cli, tmp_path):
    file = tmp_path / "figures.json"
    flags = ["--block-sizes", "2", "--samples", 1, "--max-tokens", 8, "--warm-up", 0, "--repeat", 1, "--json", file]
    outcome = cli("benchmark", "--model", "demo", "--settings", "MLX_MAX_OPS_PER_BUFFER=77", *flags)
    assert outcome.code == 0, outcome.err
    assert "with and without MLX_MAX_OPS_PER_BUFFER=77" in outcome.out
    found = json.loads(file.read_text())
    assert [row["arm"] for row in found["rows"]] == ["plain", "2"]
    assert all(row["same_text"] for row in found["rows"])
    assert len(found["with"]) == len(found["without"]) == 1
    bad = cli("benchmark", "--model", "/nowhere", "--settings", "MLX_A=1", "--repeat", 1)
    assert (bad.code, "exit code 1" in bad.err, "/nowhere" in bad.err) == (1, True, True)
