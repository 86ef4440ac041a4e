"""Case C26 and saved caches: a next turn feeds only what is new, and says what a cold run says."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, make_prompt_cache
from scripted import plain_tokens
from tiny import HYBRIDS, make_draft, make_hybrid, make_target

from dflash_mlx import PromptCache, generate_step, load_prompt_cache, save_prompt_cache
from dflash_mlx.cli import main
from dflash_mlx.prompt_cache import can_be_cut

FAMILIES = ["qwen3", *HYBRIDS]


@functools.cache
def model_of(family):
    return make_target() if family == "qwen3" else make_hybrid(family)


@functools.cache
def cold(family, ids):
    return plain_tokens(model_of(family), ids, 14)


def turn(cache, model, draft, ids, n=14):
    """One turn through the cache: tokens, how many prompt tokens hit, draft tokens accepted."""
    rest = cache.rest(ids)
    steps = list(generate_step(rest, model, draft, max_tokens=n, prompt_cache=cache.caches))
    tokens = [token for token, *_ in steps]
    cache.extend(rest, tokens)
    return tokens, len(ids) - len(rest), sum(flag for *_, flag in steps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafted", [True, False])
def test_three_turns_of_every_kind_equal_cold_runs(family, drafted):
    model = model_of(family)
    draft = make_draft() if drafted else None
    first = [(7 * i + 3) % 250 for i in range(15)]
    for kind in ("extension", "edited", "strict prefix", "same again", "reasoning removed"):
        cache = PromptCache(model, draft)
        tokens, hit, _ = turn(cache, model, draft, first)
        assert (tokens, hit) == (cold(family, tuple(first)), 0)
        second = {
            "extension": [*first, *tokens, 5, 6, 7],
            "edited": [*first[:9], 99, *first[10:], *tokens, 5],
            "strict prefix": first[:11],
            "same again": [*first, *tokens],
            "reasoning removed": [*first, *tokens[6:], 5, 6],
        }[kind]
        tokens, hit, _ = turn(cache, model, draft, second)
        assert tokens == cold(family, tuple(second))
        if kind == "extension":
            assert hit == 29, "an exact extension hits on every family"
        if family == "qwen3":
            assert hit == {"extension": 29, "edited": 9, "strict prefix": 10, "same again": 28}.get(kind, hit)
            assert hit > 0
        third = [*second, *tokens, 9]
        tokens, hit, _ = turn(cache, model, draft, third)
        assert tokens == cold(family, tuple(third))
        assert hit == len(third) - 1


def test_the_draft_sees_the_same_after_a_hit_as_in_a_cold_run():
    model, draft = make_target(), make_draft()
    first = [(7 * i + 3) % 250 for i in range(15)]
    cache = PromptCache(model, draft)
    tokens, *_ = turn(cache, model, draft, first)
    second = [*first, *tokens, 5, 6, 7]
    warm = turn(cache, model, draft, second)
    fresh = turn(PromptCache(model, draft), model, draft, second)
    assert (warm[0], warm[2]) == (fresh[0], fresh[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_survive_a_file_draft_rows_included(family, tmp_path):
    model, draft = model_of(family), make_draft()
    prompt = [(7 * i + 3) % 250 for i in range(30)]
    cache = make_prompt_cache(model) + draft.make_cache()
    tokens = [t for t, *_ in generate_step(prompt, model, draft, max_tokens=9, prompt_cache=cache)]
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"of": "a test"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"of": "a test"}
    assert [type(c) for c in loaded] == [type(c) for c in cache]
    assert loaded[-1].offset == 39
    follow = [5, 6]
    cold = list(generate_step([*prompt, *tokens, *follow], model, draft, max_tokens=12))
    warm = list(generate_step(follow, model, draft, max_tokens=12, prompt_cache=loaded))
    assert [t for t, *_ in warm] == [t for t, *_ in cold]
    assert [flag for *_, flag in warm] == [flag for *_, flag in cold]


def test_chat_streams_keeps_history_and_obeys_its_commands(monkeypatch, capsys):
    lines = iter(
        ["def f(x):", "/stats", "    return", "/stats", "/system be brief", "x = 1", "/stats", "/what", "/quit"]
    )
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    assert main(["chat", "--model", "demo", "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert len(out) > 20
    stats = [line for line in err.splitlines() if "prompt tokens cached" in line]
    assert stats[0].endswith("; 0 prompt tokens cached")
    assert not stats[1].endswith("; 0 prompt tokens cached"), "the second turn feeds only what is new"
    assert stats[2].endswith("; 0 prompt tokens cached"), "/system starts over"
    assert "/reset" in err


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
    from dflash_mlx.cli import chat

    lines = iter(["def f(x):", "/stats", "    pass", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    printed, interrupted = [], []

    def show(*args, **kwargs):
        printed.append((args, kwargs))
        if kwargs.get("end") == "" and len(printed) == 6 and not interrupted:  # a line at the start, then the answer
            interrupted.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "print", show, raising=False)
    assert main(["chat", "--model", "demo", "--max-tokens", "40"]) == 0
    said = " ".join(str(args) for args, _ in printed)
    assert "[stopped]" in said
    assert "generated 5 tokens" in said


def test_tokens_that_nobody_noted_are_found_and_cut():
    model, draft = make_target(), make_draft()
    cache = PromptCache(model, draft)
    ids = [(7 * i + 3) % 250 for i in range(15)]
    tokens, *_ = turn(cache, model, draft, ids)
    list(generate_step([9, 9, 9], model, draft, max_tokens=4, prompt_cache=cache.caches))  # not noted
    second = [*ids, *tokens, 5]
    tokens, hit, _ = turn(cache, model, draft, second)
    assert tokens == plain_tokens(model, second, 14)
    assert hit == 29


def test_a_chunked_cache_that_dropped_chunks_can_not_be_cut():
    cache, rows = ChunkedKVCache(8), mx.zeros((1, 2, 20, 4))
    cache.update_and_fetch(rows, rows)
    assert can_be_cut(cache)
    cache.maybe_trim_front()
    assert not can_be_cut(cache)
    assert not can_be_cut(CacheList(KVCache(), cache))


def test_an_empty_prompt_and_a_file_that_is_no_cache_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokens"):
        PromptCache(make_target()).rest([])
    file = tmp_path / "x.safetensors"
    mx.save_safetensors(str(file), {"a": mx.zeros(3)})
    for path in (file, tmp_path / "missing.safetensors"):
        with pytest.raises(ValueError, match="not a prompt cache"):
            load_prompt_cache(str(path))


def test_a_template_that_refuses_does_not_end_the_chat(monkeypatch, capsys, tmp_path):
    import shutil

    from dflash_mlx import demo

    shutil.copytree(demo.TARGET, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    lines = iter(["/system be brief", "hello", "/system", "hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    flags = ["--model", str(tmp_path / "t"), "--draft-model", "demo", "--max-tokens", "6"]
    assert main(["chat", *flags]) == 0
    out, err = capsys.readouterr()
    assert "no system role" in err
    assert len(out.strip()) > 0
