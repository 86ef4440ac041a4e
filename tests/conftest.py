"""Shared fixtures; Metal tests are skipped where there is no Metal."""

from __future__ import annotations

import mlx.core as mx
import pytest


def pytest_collection_modifyitems(items):
    if not mx.metal.is_available():
        for item in items:
            if item.get_closest_marker("metal"):
                item.add_marker(pytest.mark.skip(reason="needs Metal"))


@pytest.fixture(scope="session")
def demo_pair():
    """The bundled pair in float32: (model, draft, tokenizer)."""
    import dflash_mlx

    return dflash_mlx.load("demo")
