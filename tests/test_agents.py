"""Coding agents' dialects on a real server, through their vendors' own clients."""

from __future__ import annotations

import json

import pytest
from serving import ServerProcess, save_scripted_pair

KEY = "sesame-open"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "adds", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
ASK = {"model": "default_model", "max_tokens": 40, "messages": [{"role": "user", "content": "2+2?"}]}
SAYS = [("thinking", "Two and two."), ("text", "It is 4."), ("tool_use", {"a": 2, "b": 2})]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A pair that reasons, answers and calls a tool."""
    target, draft = save_scripted_pair(tmp_path_factory.mktemp("scripted"))
    flags = ["--model", target, "--draft-model", draft, "--block-size", "8"]
    with ServerProcess(*flags, env={"DFLASH_API_KEY": KEY}) as process:
        yield process


@pytest.fixture(scope="module")
def anthropic():
    """Seconds to import, so by the tests that use it alone."""
    return pytest.importorskip("anthropic", reason="needs the anthropic client")


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai", reason="needs the openai client")


@pytest.fixture(scope="module")
def claude(server, anthropic):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def gpt(server, openai):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def said(message):
    return [
        (block.type, getattr(block, {"tool_use": "input"}.get(block.type, block.type))) for block in message.content
    ]


# Messages -------------------------------------------------------------------------------------------------------


def test_a_message_whole_and_streamed(claude):
    whole = claude.messages.create(**ASK, tools=[ADD], system="brief", metadata={"user_id": "me"})
    assert said(whole) == SAYS
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("tool_use", None, "assistant")
    assert whole.usage.output_tokens == 7
    assert whole.model_extra["dflash"]["draft_used"]
    with claude.messages.stream(**ASK, tools=[ADD], system="brief") as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert texts == "It is 4."
    assert said(final) == SAYS
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == 7
    held = final.usage.cache_read_input_tokens
    assert held > 0, "the second time the prompt is cached"
    assert final.usage.input_tokens + held == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_the_raw_events_of_a_message(claude):
    events = list(claude.messages.create(**ASK, tools=[ADD], stream=True))
    assert [event.type for event in events][:2] == ["message_start", "content_block_start"]
    begun, ended = events[0].message.usage, events[-2].usage
    assert begun.input_tokens + begun.cache_read_input_tokens > 10, "the prompt is known before the answer"
    assert (begun.input_tokens, begun.cache_read_input_tokens) == (ended.input_tokens, ended.cache_read_input_tokens)
    assert [event.type for event in events][-2:] == ["message_delta", "message_stop"]
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2]
    assert events[-2].model_extra["dflash"]["tau"] > 0


def test_a_turn_with_a_tool_result(claude):
    first = claude.messages.create(**ASK, tools=[ADD])
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4"}]}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(**{**ASK, "messages": messages}, tools=[ADD])
    assert said(second) == SAYS
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": [" is"]}, "stop_sequence", " is"),
        ({"thinking": {"type": "disabled"}, "tools": [ADD]}, "tool_use", None),
    ],
)
def test_why_a_message_ends(claude, fields, reason, sequence, stream):
    if stream:
        with claude.messages.stream(**{**ASK, **fields}) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**{**ASK, **fields})
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    if sequence:
        assert said(message)[-1] == ("text", "It")
    assert ("thinking" in dict(said(message))) == ("thinking" not in fields)


def test_tokens_are_counted_before_they_are_sent(claude):
    fields = {name: ASK[name] for name in ("model", "messages")}
    count = claude.messages.count_tokens(**fields, tools=[ADD]).input_tokens
    usage = claude.messages.create(**ASK, tools=[ADD]).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    assert claude.messages.count_tokens(**fields).input_tokens < count


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_a_message_cant_have_is_named_in_anthropics_shape(claude, fields, named, anthropic):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{**ASK, **fields})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert named in caught.value.body["error"]["message"]


def test_keys_and_models_of_a_message(server, claude, anthropic):
    bearer = anthropic.Anthropic(base_url=server.url, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(**ASK).stop_reason
    wrong = anthropic.Anthropic(base_url=server.url, api_key="guess", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(**ASK)
    assert caught.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**{**ASK, "model": "another"})
    assert caught.value.body["error"]["type"] == "not_found_error"


# Responses ------------------------------------------------------------------------------------------------------


def test_a_response_whole_and_streamed(gpt):
    fields = {"model": "default_model", "input": "2+2?", "tools": [FUNCTION], "store": False}
    whole = gpt.responses.create(**fields)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "Two and two."
    assert whole.output_text == "It is 4."
    assert (whole.output[2].name, json.loads(whole.output[2].arguments)) == ("add", {"a": 2, "b": 2})
    assert (whole.status, whole.usage.output_tokens) == ("completed", 7)
    assert whole.model_extra["dflash"]["draft_used"]
    with gpt.responses.stream(**fields) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == final.output_text == "It is 4."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == whole.output[2].arguments
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_the_raw_events_of_a_response(gpt):
    events = list(gpt.responses.create(model="default_model", input="2+2?", tools=[FUNCTION], stream=True))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "tau" in events[-1].response.model_extra["dflash"]


def test_a_turn_with_a_function_call_output(gpt):
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}]
    first = gpt.responses.create(model="default_model", input=asked, tools=[FUNCTION])
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "4"}
    second = gpt.responses.create(model="default_model", input=[*asked, *first.output, result], tools=[FUNCTION])
    assert second.output_text == "It is 4."
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_is_incomplete(gpt, stream):
    fields = {"model": "default_model", "input": "2+2?", "max_output_tokens": 2}
    reply = list(gpt.responses.create(**fields, stream=True))[-1].response if stream else gpt.responses.create(**fields)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_effort_none_switches_thinking_off(gpt):
    reply = gpt.responses.create(model="default_model", input="2+2?", reasoning={"effort": "none"}, tools=[FUNCTION])
    assert [item.type for item in reply.output] == ["message", "function_call"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_what_a_response_cant_have_is_named(gpt, fields, param, openai):
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(**{"model": "default_model", "input": "hi", **fields})
    assert caught.value.body["param"] == param
    assert param in caught.value.body["message"]


def test_both_dialects_say_what_the_chat_route_says(server, claude, gpt):
    chat = server.request("POST", "/v1/chat/completions", ASK, {"Authorization": f"Bearer {KEY}"})[1]
    message = chat["choices"][0]["message"]
    assert dict(said(claude.messages.create(**ASK)))["text"] == message["content"]
    stored = gpt.responses.create(model="default_model", input="2+2?", store=True, truncation="auto")
    assert (stored.output_text, stored.store, stored.truncation) == (message["content"], False, "disabled")
