"""What a request's fields may be, by which names, and how a refusal reads; no server."""

from __future__ import annotations

import logging

import pytest

from dflash_mlx.serve.dialects.fields import OTHER_NAMES, UNLIMITED, USED, checked
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.unknown_fields import UnknownFields

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
EMPTY = {"stop": [], "logit_bias": None}


def read(kind="chat", **fields):
    """The fields that have an effect, without those of an empty request."""
    body = {**CHAT, **fields} if kind == "chat" else {"prompt": "x", **fields}
    got = checked(body, kind, UnknownFields())
    return {
        name: value for name, value in got.items() if name not in ("messages", "prompt") and EMPTY.get(name) != value
    }


def refused(kind="chat", **fields):
    with pytest.raises(ApiError) as caught:
        read(kind, **fields)
    assert caught.value.status == 400
    for word in ("int", "str", "bool", "dict", "float", "None", "True", "e+"):
        assert word not in str(caught.value).split(), "Python's words"
    return caught.value


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"max_tokens": -1}, {"max_tokens": UNLIMITED}),
        ({"max_completion_tokens": -1.0}, {"max_completion_tokens": UNLIMITED}),
        ({"n_predict": -1}, {"max_tokens": UNLIMITED}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"repetition_context_size": -1}, {"repetition_context_size": 0}),
        ({"seed": -1, "top_logprobs": -1}, {}),
        ({"presence_penalty": -1, "frequency_penalty": -1.0}, {"presence_penalty": -1, "frequency_penalty": -1}),
        ({"max_tokens": 4.0, "top_k": 40.0, "seed": 1.0, "n": 1.0}, {"max_tokens": 4, "top_k": 40, "seed": 1}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"num_predict": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"think": False}, {"enable_thinking": False}),
        ({"think": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"think": True, "enable_thinking": False}, {"enable_thinking": False}),
        ({"store": True, "truncation": "auto", "keep_alive": "5m", "cache_prompt": True, "verbosity": "low"}, {}),
        ({"typical_p": 1.0, "mirostat": 0, "min_tokens": 0, "ignore_eos": False}, {}),
        ({"logit_bias": {"5": -1e9, "6": 3}}, {"logit_bias": {5: -10_000.0, 6: 3.0}}),
    ],
)
def test_other_words_for_what_there_is(fields, meant):
    got = read(**fields)
    assert got == meant
    assert all(type(got[name]) is int for name in ("max_tokens", "top_k", "seed") if name in got)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected 1 or more"),
        ({"max_tokens": -2}, "max_tokens is -2, expected 0 to 2147483647"),
        ({"max_tokens": 2**31}, "max_tokens is 2147483648, expected 0 to 2147483647"),
        ({"max_tokens": 4.5}, "max_tokens must be a whole number"),
        ({"max_tokens": 1e400}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"n_predict": "many"}, "n_predict must be a whole number"),
        ({"n_predict": 4, "max_tokens": 5}, "by another name"),
        ({"temperature": [1]}, "temperature must be a number"),
        ({"temperature": -1}, "temperature is -1, expected 0 to 2147483647"),
        ({"top_p": 1.5}, "top_p is 1.5, expected 0 to 1"),
        ({"seed": 2**64}, "expected -9223372036854775808 to 18446744073709551615"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"stop": {"a": 1}}, "stop must be text or a list"),
        ({"n": True}, "n true is not supported"),
        ({"ignore_eos": True}, "ignore_eos true is not supported"),
        ({"logit_bias": {"5": "nan"}}, 'logit_bias.5 is "nan", expected a number'),
        ({"logit_bias": {"5": "inf"}}, 'logit_bias.5 is "inf", expected a number'),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5 is NaN, expected a number"),
        ({"logit_bias": {"5": True}}, "logit_bias.5 is true, expected a number"),
        ({"logit_bias": {"\u0665": 1}}, "is no token id"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude is not supported"),
        ({"reasoning": "low"}, "reasoning must be an object"),
        ({"role_mapping": {"user": "U: ", "stop": 5}}, "role_mapping.stop: must be text"),
        ({"role_mapping": {"user": None}}, "role_mapping.user: must be text"),
        ({"role_mapping": ["user"]}, "role_mapping must be an object"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage: must be true or false"),
        ({"thinking": {"type": "maybe"}}, "thinking.type must be enabled, adaptive or disabled"),
        ({"think": 1}, "think must be true, false or an effort"),
        ({"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0] is null"),
    ],
)
def test_what_is_refused_and_in_which_words(fields, said):
    assert said in str(refused(**fields))


def test_a_text_completion_has_its_own_fields():
    assert read("text", max_tokens=0, echo=True, logprobs=3) == {"max_tokens": 0, "echo": True, "logprobs": 3}
    assert refused("text", think=True).param == "think"
    assert refused("chat", echo=True).param == "echo"
    assert checked({"prompt": [[1.0, 2], [3]]}, "text", UnknownFields())["prompt"] == [[1, 2], [3]]
    assert checked({"prompt": [1, 2.0]}, "text", UnknownFields())["prompt"] == [[1, 2]]
    assert checked({"prompt": ["a", "b"]}, "text", UnknownFields())["prompt"] == ["a", "b"]
    for wrong in ([1, "a"], ["a", [1]], [[1], []], [], [1.5], [True], [None], {}):
        assert refused("text", prompt=wrong).param == "prompt"
    assert "2048 are the most" in str(refused("text", prompt=["a"] * 3000))


def test_other_names_are_names_of_what_exists():
    assert not OTHER_NAMES.keys() & USED.keys()
    assert set(OTHER_NAMES.values()) <= USED.keys()


def test_unknown_fields_are_ignored_on_demand_and_told_once(caplog):
    unknown = UnknownFields(ignored=True)
    body = {
        **CHAT,
        "grammar": "x",
        "new\nline": 1,
        "stream_options": {"x": 1},
        "reasoning": {"exclude": True},
        "top_k": 3,
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert checked(body, "chat", unknown)["top_k"] == 3
    names = ["'grammar'", r"'new\nline'", "'stream_options.x'", "'reasoning.exclude'"]
    assert [next(name for name in names if name in line) for line in caplog.messages] == [
        "'grammar'", r"'new\nline'", "'reasoning.exclude'", "'stream_options.x'",
    ]  # fmt: skip
    with pytest.raises(ApiError, match="n 2 is not supported"):
        checked({**CHAT, "n": 2}, "chat", unknown)
    with pytest.raises(ApiError, match="top_k"):
        checked({**CHAT, "top_k": "x"}, "chat", unknown)
    caplog.clear()
    for i in range(1000):
        checked({**CHAT, f"field{i}": 1}, "chat", unknown)
    assert len(caplog.messages) <= 256, "a client's names do not fill the log"
