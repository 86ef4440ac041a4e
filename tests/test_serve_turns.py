"""Prompt caches over requests: every kind of second turn says what a cold server says, in memory and from disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from serving import ServerProcess, save_tiny_pair
from tiny import HYBRIDS, make_draft, make_hybrid, make_target

from dflash_mlx import generate_step
from dflash_mlx.serve.cache import CacheStore
from dflash_mlx.serve.disk import DiskTier

FAMILIES = ["qwen3", "qwen3_5", "gpt_oss"]
FIRST = [(7 * i + 3) % 250 for i in range(40)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    folder, draft = save_tiny_pair(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, ["--model", folder, "--draft-model", draft]


def turns(server, ids, **fields):
    """Text, token count and cached tokens of a prompt."""
    reply = server.complete(ids, max_tokens=10, logprobs=True, **fields)
    tokens = [entry["id"] for entry in reply["choices"][0]["logprobs"]["content"]]
    return tokens, reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["dflash"]


def test_every_kind_of_second_turn_equals_a_cold_run(pair):
    family, flags = pair
    with (
        ServerProcess(*flags) as warm,
        ServerProcess(*flags, "--prompt-cache-bytes", "0") as cold,
    ):
        said, cached, _ = turns(warm, FIRST)
        assert cached == 0
        assert said == turns(cold, FIRST)[0]
        exact = [*FIRST, *said]
        for ids, hit in (
            ([*exact, 5, 6, 7], len(exact) - 1),  # the reply's last token was not fed yet
            (FIRST, len(FIRST) - 1),
            (exact, len(exact) - 1),
            ([*FIRST[:9], 99, *FIRST[10:], *said], 9 if family == "qwen3" else 0),
            ([*FIRST[3:], *said, 5, 6], 0),
            (FIRST[:20], 19 if family == "qwen3" else 0),
        ):
            tokens, cached, block = turns(warm, ids)
            assert tokens == turns(cold, ids)[0]
            assert cached == hit
            assert block["draft_used"]
        assert turns(cold, FIRST)[1] == 0, "no bytes, no caches"


def test_chat_turns_that_lose_their_reasoning_still_hit(pair):
    _, flags = pair
    with ServerProcess(*flags) as server:
        messages = [{"role": "user", "content": "hello there, what is this"}]
        hits = []
        for _turn in range(3):
            reply = server.chat(messages, max_tokens=8)
            usage = reply["usage"]
            hits.append(usage["prompt_tokens_details"]["cached_tokens"])
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        assert hits[0] == 0
        assert hits[1] >= 40, "up to where the reply began"
        assert hits[2] > hits[1]


def test_caches_on_disk_survive_a_kill_and_refuse_other_models(pair, tmp_path):
    _, flags = pair
    disk = ["--prompt-cache-dir", tmp_path / "caches"]
    with ServerProcess(*flags, *disk) as server:
        said, *_ = turns(server, FIRST)
        follow = [*FIRST, *said, 9]
        files_appear(tmp_path / "caches")
        cold, *_ = turns(server, follow)
    (tmp_path / "caches" / "broken.prompt.safetensors").write_bytes(b"no cache")
    with ServerProcess(*flags, *disk) as server:
        tokens, cached, _ = turns(server, follow)
        assert tokens == cold
        assert cached >= len(FIRST) - 1
    with ServerProcess(*flags, *disk, "--quantized-kv-start", "77") as server:
        assert turns(server, follow)[1] == 0, "made under other flags"


def files_appear(folder, seconds=10.0):
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(".part." not in f.name for f in folder.glob("*.prompt.safetensors")):
            return
        time.sleep(0.05)
    raise AssertionError("nothing was written while the server was idle")


@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
@pytest.mark.parametrize("stop_after", [1, 2, 5, 9])
def test_caches_left_one_token_short_go_on_exactly(family, stop_after):
    """What is handed to a batch: wherever in a round it stops."""
    model = make_target() if family == "qwen3" else make_hybrid(family)
    cold = [t for t, *_ in generate_step(FIRST, model, max_tokens=24)]
    draft, caches = make_draft(), make_prompt_cache(model)
    caches += draft.make_cache()
    steps = generate_step(FIRST, model, draft, max_tokens=24, prompt_cache=caches, leave_last=True)
    said = [next(steps)[0] for _ in range(stop_after)]
    steps.close()
    assert said == cold[:stop_after]
    rest = [t for t, *_ in generate_step(said[-1:], model, max_tokens=24 - stop_after, prompt_cache=caches)]
    assert [*said, *rest] == cold


def filled(model, ids):
    caches = make_prompt_cache(model)
    list(generate_step(ids, model, max_tokens=1, prompt_cache=caches, leave_last=True))
    return caches


def test_the_store_is_bounded_and_forgets_the_oldest_first():
    model = make_target()
    size = sum(cache.nbytes for cache in filled(model, FIRST))
    store = CacheStore(max_bytes=3 * size, max_entries=10)
    for first in range(5):
        store.insert([first, *FIRST], filled(model, [first, *FIRST]), None)
    assert store.nbytes <= 3 * size
    assert [store.fetch([first, *FIRST, 1]).held for first in range(5)] == [0, 0, 41, 41, 41]
    store.max_entries = 1
    store.insert([9, *FIRST], filled(model, [9, *FIRST]), None)
    assert len(store) == 1
    store.insert([9, *FIRST, 8], filled(model, [9, *FIRST, 8]), None)
    assert len(store) == 1, "a longer one that can be cut replaces its beginning"


def test_the_disk_tier_is_bounded_and_spills_from_memory(tmp_path):
    model = make_target()
    size = sum(cache.nbytes for cache in filled(model, FIRST))
    disk = DiskTier(tmp_path, 3 * size, "models", len(make_prompt_cache(model)))
    store = CacheStore(max_bytes=size, max_entries=1, disk=disk)
    for first in range(6):
        store.insert([first, *FIRST], filled(model, [first, *FIRST]), None)
    assert len(store) == 1
    assert 0 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3 * size
    assert store.fetch([4, *FIRST, 1]).held == 41, "it was spilled, and read again"
    assert store.fetch([0, *FIRST, 1]).held == 0
    assert {len(tokens) for _, tokens in disk.index()} == {41}
    assert not list(DiskTier(tmp_path, size, "other models", 4).index())
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert CacheStore(size, 1, DiskTier(tmp_path, size, "models", 4)).fetch([4, *FIRST, 1]).held == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_in_a_batch_say_what_they_say_alone(family, tmp_path):
    folder, draft = save_tiny_pair(tmp_path, family)
    with ServerProcess("--model", folder, "--draft-model", draft) as server:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 250, size).tolist() for size in (3, 17, 30, 40, 26, 55)]
        alone = [turns(server, ids)[0] for ids in prompts]
    with ServerProcess("--model", folder, "--draft-model", draft) as server, ThreadPoolExecutor(6) as pool:
        for _again in range(2):  # the second time with caches
            answers = list(pool.map(lambda ids: turns(server, ids), prompts))
            assert [tokens for tokens, *_ in answers] == alone
        assert any("batch" in block["ran"] for *_, block in answers)
