"""Shared fixtures; Metal tests are skipped where there is no GPU (they run on CUDA as well)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import pytest


def pytest_collection_modifyitems(items):
    if not mx.is_available(mx.gpu):
        for item in items:
            if item.get_closest_marker("metal"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What commands run by tests measure is kept apart from the user's."""
    os.environ["DFLASH_MLX_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def widest_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of anything but the choice of the block run at costs under which the widest always wins."""
    if request.node.get_closest_marker("real_costs"):
        return
    from dflash_mlx import api
    from dflash_mlx.decode.costs import RoundCosts

    class Free(RoundCosts):
        def add(self, context: int, width: int, seconds: float | None) -> None:
            pass

    free = {0: dict.fromkeys(range(1, 65), (1e9, 0.0))}
    monkeypatch.setattr(api, "round_costs", lambda *args, **kwargs: Free(free))


@pytest.fixture(scope="session")
def demo_pair():
    """The bundled pair in float32: (model, draft, tokenizer)."""
    import dflash_mlx

    return dflash_mlx.load("demo")


@pytest.fixture(scope="session")
def demo2():
    """The bundled DFlash 2 draft in float32."""
    import dflash_mlx

    return dflash_mlx.load_draft("demo2", dtype=mx.float32)


@dataclass
class Outcome:
    """What a command ended with."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Runs a command in this process: `cli("convert", "--hf-path", folder)`."""
    from dflash_mlx.cli import main

    def run(*argv: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as end:
            code = int(end.code or 0)
        return Outcome(code, *capsys.readouterr())

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)
