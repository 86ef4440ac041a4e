"""The dialects of coding agents, without a server: requests to the chat route's, its chunks to events."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_mlx.serve.dialects import agents, anthropic, responses
from dflash_mlx.serve.dialects.dialect import FieldError, whole
from dflash_mlx.serve.dialects.fields import HARMLESS
from dflash_mlx.serve.errors import ApiError

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
SECOND = {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Basel"}'}}
USAGE = {
    "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip
RESULT_IMAGE = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "image"}]}
START = {**USAGE, "completion_tokens": 0}
FIGURES = {"draft_used": True, "tau": 2.5}
REASONED = [
    {"choices": [{"delta": {"role": "assistant", "reasoning": "Let me "}, "finish_reason": None}]},
    {"choices": [{"delta": {"reasoning": "see."}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "I "}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "look."}, "finish_reason": None}]},
    {"choices": [{"delta": {"tool_calls": [CALL, SECOND]}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": USAGE, "dflash": FIGURES},
]
WHOLE = {
    "choices": [
        {
            "message": {"reasoning": "Let me see.", "content": "I look.", "tool_calls": [CALL, SECOND]},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": USAGE,
    "dflash": FIGURES,
}


def part(text, kind="text"):
    return {"type": kind, "text": text}


def ask(**fields):
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}


FULL = {
    anthropic: ask(
        system=[part("Be brief.") | {"cache_control": {"type": "ephemeral"}}, part("Metric.")],
        messages=[
            {"role": "user", "content": [part("Wea"), part("ther?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Let me see.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "…"},
                    part("I look."),
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": "offline"},
                    {"type": "tool_result", "tool_use_id": "call_2", "content": [part("12 °C")]},
                    {"type": "tool_result", "tool_use_id": "call_3"},
                    part("And now?"),
                ],
            },
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": WEATHER, "cache_control": None}],
        tool_choice={"type": "auto"},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        seed=7,
        stream=True,
        metadata={"user_id": "u"},
        context_management={"edits": []},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        container=None,
    ),
    responses: {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "developer", "content": [part("Metric.", "input_text")]},
            {"role": "user", "content": [part("Wea", "input_text"), part("ther?", "input_text")]},
            {"type": "reasoning", "summary": [], "content": [part("Let me see.", "reasoning_text")]},
            {"type": "message", "role": "assistant", "content": [part("I look.", "output_text")]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bern"}'},
            {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": '{"city": "Basel"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "12 °C"},
            {"type": "function_call_output", "call_id": "call_2", "output": [part("13 °C", "input_text")]},
            {"type": "reasoning", "summary": [], "encrypted_content": "…"},
            {"type": "reasoning", "summary": [part("Once more.", "summary_text")]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bern"}'},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}],
        "max_output_tokens": 9,
        "temperature": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "store": False,
        "previous_response_id": None,
        "stream": True,
    },
}
FUZZ = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def events(answer, chunks):
    """The data of all events, as sent at that moment."""
    sent = [copy.deepcopy(event) for event in answer.start(START)]
    for chunk in chunks:
        sent += [copy.deepcopy(event) for event in answer.chunk(chunk)]
    sent += [copy.deepcopy(event) for event in answer.end()]
    assert [name for name, _ in sent] == [data["type"] for _, data in sent]
    return [data for _, data in sent]


def ended(reason, **choice):
    return [{"choices": [{"delta": {"content": "x"}, "finish_reason": reason, **choice}]}]


def refused(module, request):
    with pytest.raises(FieldError) as caught:
        module.to_chat(request)
    assert str(caught.value).startswith(caught.value.param + ": ")
    return caught.value.param


# Messages -------------------------------------------------------------------------------------------------------


def test_a_conversation_with_tools_becomes_chat_messages():
    chat = anthropic.to_chat(FULL[anthropic])
    assert chat == {
        "model": "m", "max_tokens": 9, "temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["END"],
        "stream": True, "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"},
        "tools": [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}}],
        "messages": [
            {"role": "system", "content": "Be brief.\n\nMetric."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Error: offline"},
            {"role": "tool", "tool_call_id": "call_2", "content": "12 °C"},
            {"role": "tool", "tool_call_id": "call_3", "content": ""},
            {"role": "user", "content": "And now?"},
        ],
    }  # fmt: skip


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("module", [anthropic, responses])
def test_a_broken_request_is_refused_and_never_crashes(module, data):
    request = copy.deepcopy(FULL[module])
    node, key = data.draw(st.sampled_from(list(places(request))))
    node[key] = data.draw(st.sampled_from([None, True, -1, 1.5, "", "x", [], [None], [[]], {}, {"type": []}, {"a": 1}]))
    try:
        json.dumps(module.to_chat(request))
        module.Answer(request)
    except FieldError:
        pass


def places(node):
    """Every (container, key) of nested JSON."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


@pytest.mark.parametrize("module", [anthropic, responses])
def test_turns_alternate_whatever_the_agent_sends(module):
    said = [("user", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("assistant", "e"), ("user", "f")]
    messages = [{"role": role, "content": text} for role, text in said]
    chat = module.to_chat(ask(messages=messages) if module is anthropic else {"input": messages})
    assert chat["messages"] == [
        {"role": "user", "content": "a\n\nb\n\n<system>\nc\n</system>"},
        {"role": "assistant", "content": "d\n\ne"},
        {"role": "user", "content": "f"},
    ]


def test_absent_options_leave_the_template_its_own():
    chat = anthropic.to_chat(ask())
    assert chat == {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    assert anthropic.to_chat(ask(thinking={"type": "disabled"}))["chat_template_kwargs"] == {"enable_thinking": False}
    assert "tools" not in anthropic.to_chat(ask(tools=[{"name": "weather"}], tool_choice={"type": "none"}))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [RESULT_IMAGE]}]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]}, "messages"),
        ({"system": [{"type": "document"}]}, "system[0].type"),
        ({"tools": [{"name": "a"}, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"name": "a", "strict": True}]}, "tools[0].strict"),
        ({"tools": [{"input_schema": WEATHER}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "description": 5}]}, "tools[0].description"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_a_message_that_cant_be_done_is_refused_by_field(fields, field):
    assert refused(anthropic, ask(**fields)) == field


def test_a_streamed_message_is_complete_and_in_order():
    read = events(anthropic.Answer(ask()), REASONED)
    assert [(e["type"], e.get("index")) for e in read] == [
        ("message_start", None),
        ("content_block_start", 0), ("content_block_delta", 0), ("content_block_delta", 0),
        ("content_block_delta", 0), ("content_block_stop", 0),
        ("content_block_start", 1), ("content_block_delta", 1), ("content_block_delta", 1), ("content_block_stop", 1),
        ("content_block_start", 2), ("content_block_delta", 2), ("content_block_stop", 2),
        ("content_block_start", 3), ("content_block_delta", 3), ("content_block_stop", 3),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    deltas = [e["delta"]["type"] for e in read if e["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["signature_delta"] + ["text_delta"] * 2 + ["input_json_delta"] * 2
    assert read[0]["message"]["content"] == []
    assert read[0]["message"]["usage"] == {
        "input_tokens": 6, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 0,
    }  # fmt: skip
    assert read[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert read[-2]["dflash"] == FIGURES


def test_a_whole_message_holds_what_the_stream_holds():
    answer = anthropic.Answer(ask())
    events(answer, REASONED)
    message = whole(anthropic.Answer(ask()), WHOLE)
    assert message | {"id": 0} == answer.body | {"id": 0}
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][2] == {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}}
    assert message["usage"] == {
        "input_tokens": 6, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 5,
    }  # fmt: skip
    assert message["dflash"] == FIGURES


@pytest.mark.parametrize(
    ("reason", "choice", "stop_reason", "stop_sequence"),
    [
        ("stop", {}, "end_turn", None),
        ("stop", {"stop_reason": "END"}, "stop_sequence", "END"),
        ("length", {}, "max_tokens", None),
        ("tool_calls", {}, "tool_use", None),
    ],
)
def test_stop_reasons(reason, choice, stop_reason, stop_sequence):
    delta = events(anthropic.Answer(ask()), ended(reason, **choice))[-2]["delta"]
    assert delta == {"stop_reason": stop_reason, "stop_sequence": stop_sequence}


def test_one_call_at_a_time_is_asked_of_the_chat_route():
    chat = anthropic.to_chat(ask(tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert chat["parallel_tool_calls"] is False
    assert responses.to_chat({**REQUEST, "parallel_tool_calls": False})["parallel_tool_calls"] is False


def test_an_answer_that_breaks_off_says_so():
    assert events(anthropic.Answer(ask()), REASONED[:2])[-1]["error"]["type"] == "api_error"
    read = events(responses.Answer(REQUEST), REASONED[:2])
    assert read[-1]["type"] == "response.failed"
    assert read[-1]["response"]["status"] == "failed"


@pytest.mark.parametrize(("error", "said"), [(ApiError(503, "the engine is down"), "is down"), (KeyError("x"), "log")])
def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(error, said):
    def stream(gone):
        yield REASONED[0]
        raise error

    completion, handler = (
        SimpleNamespace(stream=stream, usage=lambda: START),
        SimpleNamespace(gone=None, route_path="/v1/messages"),
    )
    last = list(agents._events(completion, anthropic.Answer(ask()), handler))[-1]
    assert last["event"] == "error"
    assert said in last["data"]["error"]["message"]
    last = list(agents._events(completion, responses.Answer(REQUEST), handler))[-1]
    assert (last["event"], last["data"]["response"]["status"]) == ("response.failed", "failed")
    assert said in last["data"]["response"]["error"]["message"]


def test_a_failure_before_a_stream_begins_is_an_http_error():
    def stream(gone):
        raise ApiError(429, "too many requests wait")
        yield

    with pytest.raises(ApiError):
        next(agents._events(SimpleNamespace(stream=stream), anthropic.Answer(ask()), SimpleNamespace(gone=None)))


# Responses ------------------------------------------------------------------------------------------------------

REQUEST = {"model": "m", "input": "hi"}


def test_items_become_chat_messages():
    chat = responses.to_chat(FULL[responses])
    assert chat == {
        "model": "m", "max_tokens": 9, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"},
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        "messages": [
            {"role": "system", "content": "Be brief.\n\nMetric."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant", "content": "I look.", "reasoning_content": "Let me see.",
                "tool_calls": [CALL, SECOND],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
            {"role": "tool", "tool_call_id": "call_2", "content": "13 °C"},
            {"role": "assistant", "content": "", "reasoning_content": "Once more.", "tool_calls": [CALL]},
        ],
    }  # fmt: skip
    assert responses.to_chat(REQUEST) == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"instructions": ["a"]}, "instructions"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "description": {}}]}, "tools[0].description"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools[0].strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": 5}, "include"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_a_response_that_cant_be_made_is_refused_by_field(fields, field):
    assert refused(responses, {**REQUEST, **fields}) == field


@pytest.mark.parametrize("module", [anthropic, responses])
def test_what_asks_for_nothing_is_accepted_as_by_the_chat_route(module):
    """Nothing is stored, as where `store` is absent; what is too long is refused, as where `truncation` is."""
    bare = REQUEST if module is responses else ask()
    asked = {name: "auto" if name == "truncation" else True for name in HARMLESS}
    assert module.to_chat({**bare, **asked}) == module.to_chat(bare)


def test_a_streamed_response_is_complete_and_in_order():
    read = events(responses.Answer(REQUEST), REASONED)
    assert [e["sequence_number"] for e in read] == list(range(len(read)))
    assert [(e["type"].removeprefix("response."), e.get("output_index")) for e in read] == [
        ("created", None), ("in_progress", None),
        ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0),
        ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1), ("output_text.delta", 1),
        ("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("output_item.added", 3), ("function_call_arguments.delta", 3), ("function_call_arguments.done", 3),
        ("output_item.done", 3),
        ("completed", None),
    ]  # fmt: skip
    added = {e["output_index"]: e["item"] for e in read if e["type"] == "response.output_item.added"}
    done = {e["output_index"]: e["item"] for e in read if e["type"] == "response.output_item.done"}
    assert [item["id"] for item in added.values()] == [item["id"] for item in done.values()]
    assert {item["status"] for item in added.values()} == {"in_progress"}
    assert list(done.values()) == read[-1]["response"]["output"]
    assert {item["status"] for item in done.values()} == {"completed"}


def test_a_whole_response_holds_what_the_stream_holds():
    answer = responses.Answer(REQUEST)
    events(answer, REASONED)
    response = whole(responses.Answer(REQUEST), WHOLE)
    for body in (response, answer.body):
        for item in body["output"]:
            item["id"] = item["type"]
    assert response | {"id": 0, "created_at": 0} == answer.body | {"id": 0, "created_at": 0}
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["output"][2]["arguments"] == '{"city": "Bern"}'
    assert response["usage"]["input_tokens"] == 10
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert response["status"] == "completed"
    assert response["dflash"] == FIGURES


def test_a_response_cut_by_its_limit_is_incomplete():
    last = events(responses.Answer(REQUEST), ended("length"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_what_a_function_calls_its_tools_is_no_namespace():
    request = {**REQUEST, "tools": [{"type": "function", "name": "f", "tools": 5}]}
    assert responses.to_chat(request)["tools"][0]["function"]["name"] == "f"
    assert responses.Answer(request).body["tools"] == request["tools"]


def test_tools_of_a_namespace_keep_their_names_apart():
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    said = {"type": "function_call", "call_id": "call_1", "namespace": "sky", "name": "weather", "arguments": "{}"}
    request = {**REQUEST, "tools": [tool, {"type": "namespace", "name": "sky", "tools": [tool]}], "input": [said]}
    chat = responses.to_chat(request)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather", "sky__weather"]
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "sky__weather"
    calls = [CALL, {**SECOND, "function": {"name": "sky__weather", "arguments": "{}"}}]
    chunk = {"choices": [{"delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
    plain, spaced = events(responses.Answer(request), [chunk])[-1]["response"]["output"]
    assert (plain["name"], plain.get("namespace")) == ("weather", None)
    assert (spaced["name"], spaced.get("namespace")) == ("weather", "sky")


PATCH = {
    "type": "custom", "name": "apply_patch", "description": "edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}  # fmt: skip


def test_tools_that_only_a_vendor_can_run_are_left_out_and_said_so(caplog):
    """Codex sends them unless told not to."""
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
    built_in = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "tool_search"}]
    caplog.set_level("INFO")
    chat = responses.to_chat({**REQUEST, "tools": [built_in[0], tool, *built_in[1:]]})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather"]
    assert "web_search, local_shell, tool_search" in caplog.text
    assert "tools" not in responses.to_chat({**REQUEST, "tools": built_in})
    answer = responses.Answer({**REQUEST, "tools": built_in})
    assert events(answer, REASONED)[-1]["response"]["tools"] == built_in, "the client reads what it asked for"


def test_a_custom_tool_is_a_function_of_one_text_there_and_back():
    request = {**REQUEST, "tools": [PATCH, {"type": "namespace", "name": "sky", "tools": [PATCH]}]}
    first, second = responses.to_chat(request)["tools"]
    assert (first["function"]["name"], second["function"]["name"]) == ("apply_patch", "sky__apply_patch")
    assert first["function"]["description"] == "edits files"
    schema = first["function"]["parameters"]
    assert (schema["type"], schema["required"]) == ("object", ["input"])
    assert "start: /x+/" in schema["properties"]["input"]["description"]

    text = '*** Begin\n"é" \\\n'
    calls = [
        {"id": "1", "function": {"name": "apply_patch", "arguments": json.dumps({"input": text})}},
        {"id": "2", "function": {"name": "sky__apply_patch", "arguments": json.dumps({"input": text})}},
        {"id": "3", "function": {"name": "apply_patch", "arguments": '{"patch": "x"}'}},
    ]
    read = events(responses.Answer(request), [{"choices": [{"delta": {"tool_calls": calls}, "finish_reason": "stop"}]}])
    of_first = [e for e in read if e.get("output_index") == 0]
    assert [e["type"].removeprefix("response.") for e in of_first] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    assert [e.get("delta", e.get("input")) for e in of_first[1:3]] == [text, text]
    output = read[-1]["response"]["output"]
    assert output == [e["item"] for e in read if e["type"] == "response.output_item.done"]
    assert [(item["type"], item["name"], item.get("namespace")) for item in output] == [
        ("custom_tool_call", "apply_patch", None),
        ("custom_tool_call", "apply_patch", "sky"),
        ("custom_tool_call", "apply_patch", None),
    ]
    assert [item["input"] for item in output] == [text, text, '{"patch": "x"}'], "the client tells the model"

    results = [{"type": "custom_tool_call_output", "call_id": str(i), "output": "done"} for i in (2, 1, 3)]
    chat = responses.to_chat({**request, "input": [*output, *results]})["messages"]
    assert [call["function"]["name"] for call in chat[0]["tool_calls"]] == [
        "apply_patch", "sky__apply_patch", "apply_patch",
    ]  # fmt: skip
    assert json.loads(chat[0]["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert [message["tool_call_id"] for message in chat[1:]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": "lark"}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format.definition"),
        ({"input": [{"type": "custom_tool_call", "name": "a", "call_id": "1"}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "output": "x"}]}, "input[0].call_id"),
    ],
)
def test_a_malformed_custom_tool_is_refused_by_field(fields, field):
    assert refused(responses, {**REQUEST, **fields}) == field
