"""Prompt caches over requests: every kind of second turn says what a cold server says, in memory and from disk."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from scripted import plain_tokens
from serving import ServerProcess, save_tiny_pair, token_id, until
from tiny import HYBRIDS, make_draft, make_hybrid, make_target

from dflash_mlx import generate_step
from dflash_mlx.loading import plan
from dflash_mlx.serve.cache import CacheStore
from dflash_mlx.serve.disk import DiskTier
from dflash_mlx.serve.provider import Provider

FAMILIES = ["qwen3", "qwen3_5", "gpt_oss"]
FIRST = [(7 * i + 3) % 250 for i in range(40)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    folder, draft = save_tiny_pair(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, ["--model", folder, "--draft-model", draft, "--block-size", "8"]


@pytest.fixture(scope="module")
def warm(pair):
    with ServerProcess(*pair[1]) as server:
        yield server


@pytest.fixture(scope="module")
def cold(pair):
    """What mlx-lm itself says to a prompt."""
    model = load_model(Path(pair[1][1]))[0]
    end = token_id("<|im_end|>")

    def tokens(ids):
        said = plain_tokens(model, ids, 10)
        return said[: said.index(end) + 1] if end in said else said

    return tokens


def turns(server, ids, **fields):
    """Tokens, cached prompt tokens and figures of a reply."""
    reply = server.complete(ids, max_tokens=10, logprobs=True, **fields)
    tokens = reply["choices"][0]["logprobs"]["token_ids"]
    return tokens, reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["dflash"]


def test_every_kind_of_second_turn_equals_a_cold_run(pair, warm, cold):
    family = pair[0]
    said, cached, _ = turns(warm, FIRST)
    assert cached == 0
    assert said == cold(FIRST)
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
        assert tokens == cold(ids)
        assert cached == hit
        assert block["draft_used"]


def test_chat_turns_that_lose_their_reasoning_still_hit(warm):
    messages = [{"role": "user", "content": "hello there, what is this"}]
    hits = []
    for _turn in range(3):
        reply = warm.chat(messages, max_tokens=8)
        hits.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    assert hits[0] < 10
    assert hits[1] >= 40, "up to where the reply began"
    assert hits[2] > hits[1]


def test_requests_in_a_batch_say_what_they_say_alone(warm, cold):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 250, size).tolist() for size in (3, 17, 30, 40, 26, 55)]
    expected = [cold(ids) for ids in prompts]
    ways = ""
    with ThreadPoolExecutor(6) as pool:
        for _again in range(2):  # the second time with caches
            answers = list(pool.map(lambda ids: turns(warm, ids), prompts))
            assert [tokens for tokens, *_ in answers] == expected
            ways += " ".join(block["ran"] for *_, block in answers)
    assert "batch" in ways


def test_caches_of_a_batch_serve_a_next_turn(warm, cold):
    prompts = [[i, *FIRST[:25], i] for i in range(200, 206)]
    with ThreadPoolExecutor(6) as pool:
        first = list(pool.map(lambda ids: turns(warm, ids), prompts))
    for ids, (said, *_) in zip(prompts, first, strict=True):
        follow = [*ids, *said, 7, 8]
        tokens, cached, _ = turns(warm, follow)
        assert tokens == cold(follow)
        assert cached >= len(ids) + len(said) - 1


def test_caches_on_disk_survive_a_kill(pair, tmp_path):
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


def files_appear(folder):
    """While the server is idle."""
    until(lambda: any(".part." not in f.name for f in folder.glob("*.prompt.safetensors")))


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
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}, "prompts are nobody else's business"
    assert not list(DiskTier(tmp_path, size, "other models", 4).index())
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert CacheStore(size, 1, DiskTier(tmp_path, size, "models", 4)).fetch([4, *FIRST, 1]).held == 0


def test_caches_of_other_flags_and_other_versions_are_other_caches(monkeypatch):
    def fingerprint(**flags):
        provider = Provider.__new__(Provider)  # loads nothing
        usual = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000, "draft_window": None}
        provider.cli_args = Namespace(adapter_path=None, **{**usual, **flags})
        provider.plan = plan("demo")
        return provider.fingerprint()

    assert fingerprint() == fingerprint()
    other = [fingerprint(kv_bits=8), fingerprint(draft_window=8), fingerprint(draft_window=9)]
    assert len({fingerprint(), *other}) == 4
    usual = fingerprint()
    for name in ("__version__", "mlx_lm.__version__", "FORMAT"):
        with monkeypatch.context() as another:
            another.setattr(f"dflash_mlx.serve.provider.{name}", "99")
            assert fingerprint() != usual
    assert fingerprint() == usual
