"""Stored prompt caches: a hit is whole or none, whatever happens to the folder they are kept in."""

from __future__ import annotations

import os
import shutil
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from test_serve_turns import filled
from tiny import make_target

from dflash_mlx import generate_step
from dflash_mlx.serve import disk as disk_module
from dflash_mlx.serve.cache import CacheStore
from dflash_mlx.serve.disk import PART, SUFFIX, DiskTier

IDS = [(7 * i + 3) % 250 for i in range(40)]
ROWS = 256  # that mlx-lm reserves at once
SIZE = 2 * ROWS * 8 * 4  # bytes of one entry of `caches`


def caches(n=5, kind=KVCache, **options):
    """One entry that holds `n` tokens."""
    cache = kind(**options)
    cache.update_and_fetch(mx.ones((1, 1, n, 8)), mx.ones((1, 1, n, 8)))
    mx.eval(cache.state)
    return [cache]


def tokens(first, n=5):
    return [first, *range(100, 100 + n - 1)]


def tier(folder, max_bytes=10**9):
    return DiskTier(folder, max_bytes, "models", 1)


def stored(folder, n=3):
    """A folder with `n` files, the oldest first."""
    one = tier(folder)
    for first in range(n):
        file, gone = one.write(np.array(tokens(first), np.int32), caches(), None)
        assert gone == set()
        os.utime(file, (first, first))
    return one


def files(folder):
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


def test_what_was_used_last_stays():
    store = CacheStore(10**9, max_entries=2)
    for first in (1, 2):
        store.insert(tokens(first), caches(), None)
    assert store.fetch([*tokens(1), 9]).held == 5
    store.insert(tokens(3), caches(), None)
    assert [store.fetch([*tokens(first), 9]).held for first in (1, 2, 3)] == [5, 0, 5]


@pytest.mark.parametrize("continued", [True, False])
def test_an_entry_on_disk_that_is_larger_than_memory_may_hold_is_a_whole_hit(tmp_path, continued):
    model = make_target()
    said = [token for token, *_ in generate_step(IDS, model, max_tokens=4)]
    prompt = [*IDS, *said, 7] if continued else [*IDS[:20], 9, 9]
    cold = [token for token, *_ in generate_step(prompt, model, max_tokens=6)]
    size = sum(cache.nbytes for cache in filled(model, IDS))
    one = DiskTier(tmp_path, 10**9, "models", len(filled(model, IDS)))
    one.write(np.array(IDS, np.int32), filled(model, IDS), None)

    store = CacheStore(size - 1, 10, DiskTier(tmp_path, 10**9, "models", one.entries))
    small = caches()
    store.insert([200, 201, 202, 203, 204], small, None)
    for _again in range(2):
        hit = store.fetch(prompt)
        assert hit.held == (len(IDS) if continued else 20)
        assert [t for t, *_ in generate_step(prompt[hit.held :], model, max_tokens=6, prompt_cache=hit.target)] == cold
        assert store.nbytes < size
        assert len(store) == 1, "what fits in memory does not go for what does not"


def test_an_entry_that_cant_be_cut_is_no_hit_and_does_not_stay_in_memory(tmp_path):
    one = tier(tmp_path)
    one.write(np.array(tokens(1, 40), np.int32), caches(40, RotatingKVCache, max_size=8), None)
    store = CacheStore(1, 10, tier(tmp_path))
    hit = store.fetch([*tokens(1, 40)[:20], 7])
    assert (hit.target, hit.held) == (None, 0)
    assert store.nbytes == 0
    assert store.fetch([*tokens(1, 40), 7]).held == 40


def rewrite(file, change):
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.eval(arrays)
    arrays, metadata = change(dict(arrays), dict(metadata))
    mx.save_safetensors(str(file), arrays, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, m: (a, {k: "RenamedKVCache" if v == "KVCache" else v for k, v in m.items()}),
        lambda a, m: (a, {k: "mx" if v == "KVCache" else v for k, v in m.items()}),
        lambda a, m: (a, {k: "CacheList" if v == "KVCache" else v for k, v in m.items()}),
        lambda a, m: ({}, m),
        lambda a, m: ({"x": mx.zeros(3)}, m),
        lambda a, m: (a, {k: v for k, v in m.items() if k.startswith("0.")}),
        lambda a, m: (a, {**m, "0.tokens": "1 2 three"}),
        lambda a, m: (a, {**m, "0.tokens": str(2**40)}),
        lambda a, m: (a, {**m, "2.0": "x", "2.1.0": "nowhere"}),
        lambda a, m: (a, {k: v for k, v in m.items() if k != "0.models"}),
    ],
)
def test_a_file_of_another_mlx_lm_is_a_miss(tmp_path, change):
    stored(tmp_path, 1)
    rewrite(files(tmp_path)[0], change)
    store = CacheStore(10**9, 10, tier(tmp_path))
    assert store.fetch([*tokens(0), 9]).target is None
    store.insert(tokens(0), caches(), None)
    assert store.write_one()
    assert CacheStore(10**9, 10, tier(tmp_path)).fetch([*tokens(0), 9]).held == 5


def test_what_only_has_the_name_of_a_cache_is_left_alone(tmp_path, caplog):
    stored(tmp_path, 2)
    for suffix in (SUFFIX, PART):
        (tmp_path / f"folder{suffix}").mkdir()
        (tmp_path / f"dangling{suffix}").symlink_to(tmp_path / "nowhere")
        (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
        for file in tmp_path.glob(f"*{suffix}"):
            os.utime(file, (0, 0), follow_symlinks=False)
    before = {file.name for file in tmp_path.iterdir()}
    store = CacheStore(10**9, 10, tier(tmp_path, 3 * SIZE))
    assert [store.fetch([*tokens(first), 9]).held for first in (0, 1)] == [5, 5]
    for first in range(2, 40):
        store.insert(tokens(first), caches(), None)
        assert store.write_one()
    after = {file.name for file in tmp_path.iterdir()}
    assert not caplog.text, "nobody tries to remove or to read them"
    assert {name for name in before if name[0] in "fdl" and "." in name[:9]} <= after
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 3 * SIZE


def test_a_file_that_another_server_writes_stays_and_a_killed_ones_goes(tmp_path):
    young, old = tmp_path / f"a.1{PART}", tmp_path / f"b.2{PART}"
    for part in (young, old):
        part.write_bytes(b"half a cache")
    os.utime(old, (time.time() - 2 * disk_module.STALE_SECONDS,) * 2)
    assert list(tier(tmp_path).index()) == []
    assert young.exists()
    assert not old.exists()


def test_two_servers_write_the_same_prompt_at_once(tmp_path, monkeypatch):
    """Neither writes into the other's file."""
    one, two, save = tier(tmp_path), tier(tmp_path), disk_module.save_prompt_cache
    ids = np.array(tokens(1), np.int32)

    def interleaved(file, *args):
        monkeypatch.setattr(disk_module, "save_prompt_cache", save)
        save(file, *args)
        assert two.write(ids, caches(), None)[0] is not None

    monkeypatch.setattr(disk_module, "save_prompt_cache", interleaved)
    assert one.write(ids, caches(), None)[0] is not None
    assert [held.tolist() for _, held in one.index()] == [ids.tolist()]
    assert not list(tmp_path.glob(f"*{PART}"))


def test_files_that_vanish_at_any_moment_harm_nothing(tmp_path, monkeypatch):
    """Another server shrinks the folder: between the listing and each look at a file, and before a hit."""
    stored(tmp_path, 4)
    store = CacheStore(10**9, 10, tier(tmp_path, 2 * SIZE))
    listed = type(tmp_path).glob

    def glob(self, pattern):
        found = sorted(listed(self, pattern))
        for file in found[:1]:
            file.unlink()
        return iter(found)

    monkeypatch.setattr(type(tmp_path), "glob", glob)
    store.insert(tokens(9), caches(), None)
    assert store.write_one()
    assert not store.disk.paused
    assert len(list(tier(tmp_path).index())) <= 3
    monkeypatch.undo()
    for file in files(tmp_path):
        file.unlink()
    assert [store.fetch([*tokens(first), 5]).held for first in range(4)] == [0] * 4
    assert store.fetch([*tokens(9), 5]).held == 5, "it is in memory too"


def test_a_failed_write_pauses_the_tier_and_ends_no_hit(tmp_path, monkeypatch):
    stored(tmp_path, 1)
    store = CacheStore(10**9, 10, tier(tmp_path))
    store.insert(tokens(5), caches(), None)

    def fail(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(disk_module, "save_prompt_cache", fail)
        assert not store.write_one()
    assert store.disk.paused
    assert not store.write_one(), "not tried again at once"
    assert len(files(tmp_path)) == 1, "nothing had to go for it"
    assert not list(tmp_path.glob(f"*{PART}"))
    assert [store.fetch([*tokens(first), 9]).held for first in (0, 5)] == [5, 5]
    now = time.monotonic()
    monkeypatch.setattr(disk_module.time, "monotonic", lambda: now + disk_module.PAUSE_SECONDS)
    assert store.write_one()
    assert len(files(tmp_path)) == 2


def test_a_full_disk_makes_room_before_it_gives_up(tmp_path, monkeypatch):
    stored(tmp_path, 3)
    each = files(tmp_path)[0].stat().st_size
    store = CacheStore(10**9, 10, tier(tmp_path))
    capacity = 3 * each + SIZE - each - 1  # one file has to go, and one byte of another

    def usage(folder):
        return SimpleNamespace(free=capacity - sum(file.stat().st_size for file in files(tmp_path)))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    store.insert(tokens(7), caches(), None)
    assert store.write_one()
    held = {first: store.fetch([*tokens(first), 9]).held for first in (0, 1, 2, 7)}
    assert held == {0: 0, 1: 0, 2: 5, 7: 5}, "the oldest go"

    capacity = SIZE - 1  # all that are there would not do
    before = files(tmp_path)
    store.insert(tokens(8), caches(), None)
    store.write_one()
    assert set(before) <= set(files(tmp_path)), "nothing goes in vain"


def test_what_is_larger_than_the_folder_may_be_is_not_written(tmp_path):
    store = CacheStore(10**9, 10, tier(tmp_path, SIZE))
    store.insert(tokens(1), caches(), None)
    store.insert(tokens(2, 300), caches(300), None)
    assert store.write_one(), "the one that fits"
    assert not store.write_one()
    assert not store.disk.paused
    assert [len(held) for _, held in store.disk.index()] == [5]
    store.max_entries = 1
    store.insert(tokens(3, 300), caches(300), None)
    store.insert(tokens(4), caches(), None)
    assert [len(held) for _, held in store.disk.index()] == [5], "nor when it has to leave memory"
