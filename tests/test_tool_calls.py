"""Tool calls: what goes out as one was written to its end, has an object of arguments and may come back."""

from __future__ import annotations

import importlib
import json
import pkgutil
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving import TEMPLATE, ServerProcess, save_scripts, save_tokenizer

from dflash_mlx.serve.dialects import anthropic, responses
from dflash_mlx.serve.dialects.answer import Answer
from dflash_mlx.serve.dialects.choice import Choice
from dflash_mlx.serve.dialects.completion import Completion
from dflash_mlx.serve.dialects.dialect import FieldError, results_in_order, whole
from dflash_mlx.serve.dialects.fields import checked
from dflash_mlx.serve.dialects.logprobs import NoLogprobs
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.job import Piece
from dflash_mlx.serve.tokens import Front, takes_tools, tokenized
from dflash_mlx.serve.unknown_fields import UnknownFields

STRINGS = {"path": {"type": "string"}, "only_older_than": {"type": "string"}}
TOOLS = [
    {"type": "function", "function": {"name": "delete_files", "parameters": {"type": "object", "properties": STRINGS}}},
    {"type": "function", "function": {"name": "now"}},  # no schema: it is optional
    {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "properties": {"n": True}}}},
]
ARGUMENTS = {"path": "/srv", "only_older_than": "30d"}
JSON = json.dumps(ARGUMENTS)
XML = "".join(f'<{{0}} name="{key}">{value}</{{0}}>' for key, value in ARGUMENTS.items())
GLM = "".join(f"<{{0}}arg_key>{k}</{{0}}arg_key><{{0}}arg_value>{v}</{{0}}arg_value>" for k, v in ARGUMENTS.items())
XTML = "".join(
    f'<|open|>argument key="{k}" type="string"<|sep|>{v}<|close|>argument<|sep|>' for k, v in ARGUMENTS.items()
)
# What stands between a parser's marks, in its own format.
BODIES = {
    "function_gemma": "call:delete_files{path:<escape>/srv<escape>,only_older_than:<escape>30d<escape>}",
    "gemma4": 'call:delete_files{path:<|"|>/srv<|"|>,only_older_than:<|"|>30d<|"|>}',
    "glm47": f"delete_files{GLM.format('')}",
    "json_tools": f'{{"name": "delete_files", "arguments": {JSON}}}',
    "kimi_k2": "<|tool_call_begin|>functions.delete_files:0<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
    "kimi_k3": f'<|open|>call tool="delete_files" index="1"<|sep|>{XTML}<|close|>call<|sep|>',
    "laguna": f"delete_files{GLM.format('')}",
    "longcat": f"delete_files{GLM.format('longcat_')}",
    "minicpm5": f'"delete_files">{XML.format("param")}',
    "minimax_m2": f'<invoke name="delete_files">{XML.format("parameter")}</invoke>',
    "mistral": f"delete_files[ARGS]{JSON}",
    "muse_spark": f'<atem:invoke name="delete_files">{XML.format("atem:parameter")}</atem:invoke>',
    "pythonic": '[delete_files(path="/srv", only_older_than="30d")]',
    "qwen3_coder": "<function=delete_files>\n<parameter=path>\n/srv\n</parameter>\n"
    "<parameter=only_older_than>\n30d\n</parameter>\n</function>",
}  # fmt: skip
ODD = [
    "", " ", "\n", "{}", "[]", "[[]]", "null", "7", '"now"', "{broken", "NaN", '{"a":', "}{", "\ud800", "\x00",
    '{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": [1]}', '{"name": null}',
    '{"name": "now", "arguments": "{\\"a\\": 1}"}', '{"name": "now", "arguments": "a"}',
    '{"name": "now", "args": {"a": 1}}', '{"name": "now", "parameters": {"a": 1}}', '{"arguments": {}}',
    '{"name": "now", "arguments": {"a": NaN}}', '{"name": "now", "arguments": {"a": "\\ud800"}}',
    '{"name": ["now"], "arguments": {}}', '{"name": "", "arguments": {}}', '{"name": "now", "id": 5, "arguments": {}}',
    '[{"name": "now", "id": "x"}, {"name": "now", "id": "x"}]', '[{"name": "now"}, 5]', '[{"name": "now"}, {"a": 1}]',
    '{"type": "function", "function": {"name": "now"}}', '{"name": "now", "arguments": {"a": ' + "[" * 3000,
    "I want to call now", "now", "now a=1 b=2", "now {1: 2}", "now {'a': {1, 2}}", "now\n{'a': b'x'}", "unknown",
    "[now()]", "[now(a={1, 2})]", "[now(a=b'x')]", "[now(a=...)]", "[now(1)]", "[now(a=1e999)]", "[now(**{})]",
    "[now(a=" + "(" * 300, "now[ARGS]", "now[ARGS]null", "now[ARGS][1]", "now[ARGS]{}", "now[ARGS]{}any[ARGS]",
    "call:now{}", "call:now{a:}", "call:now{a:1", "call:now{a}", "call:{}", 'call:now{a:<|"|>', "call:now{a:<escape>b}",
    "<function=now></function>", "<function=></function>", "<function=any><parameter=n>1</parameter></function>",
    "<function=any><parameter=n>1e999</parameter></function>", '<invoke name="any"><parameter name="n">1</invoke>',
    '<invoke name=""></invoke>', '"now">', '"any"><param name="n">1</param>', '<atem:invoke name="now"></atem:invoke>',
    "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}", "now:0<|tool_call_argument_begin|>[1]",
    "functions.now:0<|tool_call_argument_begin|>{1: {2}}", '<|open|>call tool=""<|sep|><|close|>call<|sep|>',
    '<|open|>call tool="now"<|sep|><|open|>json type="object"<|sep|>null<|close|>json<|sep|><|close|>call<|sep|>',
    "<arg_key>a</arg_key><arg_value>1</arg_value>", "now<arg_key>a</arg_key><arg_value>{1}</arg_value>",
    "now<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>{1}</longcat_arg_value>", "any<longcat_arg_key>",
]  # fmt: skip
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def tokenizer(name, eos=()):
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return SimpleNamespace(
        has_thinking=False,
        has_tool_calling=True,
        structural_markers=(),
        response_transitions={},
        eos_token_ids=set(eos),
        tool_parser=module.parse_tool_call,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_call_end_tokens=tuple(range(len(module.tool_call_end))),
    )


def read(name, text, by_itself=False, step=1, eos=(), tools=TOOLS, **options):
    """Text and calls of a reply that comes in pieces of `step` characters."""
    answer = Answer(tokenizer(name, eos), "normal", tools, **{"streaming": False, **options})
    parts = []
    for at in range(0, len(text), step):
        parts += answer.add(text[at : at + step])
    parts += answer.add("", last=True, by_itself=by_itself)
    calls = [call for part in parts for call in part.calls]
    assert answer.called == len(calls)
    return "".join(part.text for part in parts), calls


def written(name, body):
    marks = tokenizer(name)
    return f"{marks.tool_call_start}{body}{marks.tool_call_end}"


def check_next_turn(calls):
    """What clients do: run the calls, send them back with their results, in each dialect."""
    names = [call["function"]["name"] for call in calls]
    said = {"choices": [{"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
    user = {"role": "user", "content": "x"}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    turns = [
        checked(
            {"messages": [user, {"role": "assistant", "content": None, "tool_calls": calls}, *results]},
            "chat",
            UnknownFields(),
        )
    ]

    message = whole(anthropic.Answer({}), said)
    blocks = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"} for block in message["content"]]
    assert all(isinstance(block["input"], dict) for block in message["content"])
    history = [user, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": blocks}]
    turns.append(checked(anthropic.to_chat({"max_tokens": 1, "messages": history}), "chat", UnknownFields()))

    output = whole(responses.Answer({}), said)["output"]
    back = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in output]
    turns.append(checked(responses.to_chat({"input": [user, *output, *back]}), "chat", UnknownFields()))
    for turn in turns:
        turn = json.loads(json.dumps(turn["messages"], ensure_ascii=False).encode())
        assert [call["function"]["name"] for call in turn[1]["tool_calls"]] == names
        assert [message["role"] for message in turn[2:]] == ["tool"] * len(calls)


def test_every_parser_of_mlx_lm_is_here():
    assert set(BODIES) == {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_whole_call_is_a_call(name, streaming):
    text, calls = read(name, f"Sure.{written(name, BODIES[name])}", by_itself=True, streaming=streaming)
    assert text == "Sure."
    (call,) = calls
    assert call["function"]["name"] == "delete_files"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert ("index" in call) == streaming
    check_next_turn(calls)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_call_that_is_cut_anywhere_is_text(name, step):
    """By max_tokens or a stop string; by its own end too, unless nothing marks where a call ends."""
    text = written(name, BODIES[name])
    marked = bool(tokenizer(name).tool_call_end)
    for end in range(len(text) if marked else len(text) + 1):
        assert read(name, text[:end], step=step) == (text[:end], [])
        if marked:
            assert read(name, text[:end], by_itself=True, step=step) == (text[:end], [])


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("options", [{}, {"single": True}, {"streaming": True}])
def test_a_call_of_a_tool_that_was_not_offered_is_text(name, step, options):
    """Of no tools at all: the client that sent none runs none, and may read the text itself."""
    twice = f"Sure.{written(name, BODIES[name])} And{written(name, BODIES[name])}"
    for text in (twice, twice[:-3], tokenizer(name).tool_call_start, written(name, "")):
        for tools in (None, []):
            assert read(name, text, by_itself=True, step=step, eos=[0], tools=tools, **options) == (text, [])


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_format_whose_own_transitions_lead_to_calls_keeps_them_as_text(step):
    """Muse Spark's, whose calls begin in a channel."""
    marks = tokenizer("json_tools")
    edges = {"normal": [(marks.tool_call_start, "tool")], "tool": [(marks.tool_call_end, "normal")]}
    marks.response_transitions = edges
    text = f"Hm.{written('json_tools', BODIES['json_tools'])} So."
    answer = Answer(marks, "normal", None, streaming=True)
    parts = [part for at in range(0, len(text), step) for part in answer.add(text[at : at + step])]
    parts += answer.add("", last=True)
    assert "".join(part.text for part in parts) == text
    assert {part.kind for part in parts} == {"normal"}


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_muse_spark_s_calls_are_text_where_no_tools_are_offered_and_the_answer_follows(step):
    """mlx-lm's own table of that format names no way out of a call; what stands in a header is shown to nobody."""
    from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT

    marks = tokenizer("muse_spark")
    marks.response_transitions = RESPONSE_FORMAT["transitions"]
    call = written("muse_spark", BODIES["muse_spark"])
    text = f"to=self<|message|>Hm.<|eom|><|start|>assistant to=x<|message|>{call}<|eom|>to=user<|message|>Done.<|eot|>"
    answer, said = Answer(marks, RESPONSE_FORMAT["initial_state"], None, streaming=True), {}
    for at in range(0, len(text), step):
        for part in answer.add(text[at : at + step], last=at + step >= len(text)):
            said[part.kind] = said.get(part.kind, "") + part.text
    assert said["reasoning"] == "Hm."
    assert said["normal"] == f"{call}Done."


def test_a_call_that_is_text_does_not_wait_for_its_end():
    answer = Answer(tokenizer("json_tools"), "normal", None, streaming=True)
    said = ["".join(part.text for part in answer.add(piece)) for piece in ("Hm.<tool", '_call>{"name', '": "now"')]
    assert said == ["Hm.<tool", '_call>{"name', '": "now"']


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("closed", [True, False])
def test_a_mark_in_the_reasoning_is_reasoning_where_no_tools_are_offered(name, closed):
    thinks = tokenizer(name)
    thinks.has_thinking, thinks.think_start, thinks.think_end = True, "<think>", "</think>"
    thought = f"Should I {written(name, BODIES[name]) if closed else thinks.tool_call_start}? No."
    for step in (1, 7, 1000):
        answer, said = Answer(thinks, "reasoning", None, streaming=True), {"reasoning": "", "normal": ""}
        text = f"{thought}</think>It is done."
        for at in range(0, len(text), step):
            for part in answer.add(text[at : at + step], last=at + step >= len(text)):
                said[part.kind] += part.text
        assert said == {"reasoning": thought, "normal": "It is done."}


@pytest.mark.parametrize("name", BODIES)
def test_where_the_closing_mark_ends_the_text_the_end_of_the_turn_closes_the_call(name):
    text = f"{tokenizer(name).tool_call_start}{BODIES[name]}"
    assert len(read(name, text, by_itself=True, eos=[0])[1]) == 1
    assert read(name, text, eos=[0]) == (text, [])


@pytest.mark.parametrize(
    ("reason", "stop", "calls"), [("stop", None, 1), ("stop", "30d", 0), ("length", None, 0), ("length", "30d", 0)]
)
def test_only_the_models_own_end_closes_a_call_that_no_mark_closes(reason, stop, calls):
    job, logprobs = SimpleNamespace(stopping=SimpleNamespace(found=stop)), SimpleNamespace(add=lambda piece: None)
    choice = Choice(0, job, Answer(tokenizer("mistral"), "normal", TOOLS, streaming=False), logprobs)
    parts = list(choice.add(Piece(written("mistral", BODIES["mistral"]), 0, reason)))
    assert sum(len(part.calls) for part in parts) == calls


def check_odd(name, body):
    text = written(name, body)
    shown, calls = read(name, text, by_itself=True, step=7)
    if calls:
        assert len({call["id"] for call in calls}) == len(calls)
        check_next_turn(calls)
    else:
        assert shown == text


@pytest.mark.parametrize("name", BODIES)
def test_odd_calls_are_calls_or_text(name):
    for body in ODD:
        check_odd(name, body)


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("name", BODIES)
def test_damaged_calls_are_calls_or_text(name, data):
    body = BODIES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(body))] * 2)))
        body = (
            body[:start]
            + data.draw(st.sampled_from(["", '"', "{1}", "b'x'", "null", "<", body[start:end] * 2]))
            + body[end:]
        )
    check_odd(name, body)


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "now"}', [("now", {})]),
        ('{"name": "now", "arguments": null}', [("now", {})]),
        ('{"name": "now", "parameters": {"a": 1}}', [("now", {"a": 1})]),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", {"a": 1})]),
        ('[{"name": "now"}, {"name": "other.tool-2", "arguments": {}}]', [("now", {}), ("other.tool-2", {})]),
        ('{"name": "now", "args": {"a": 1}}', []),
        ('{"name": "now", "arguments": [1]}', []),
        ('{"name": "now", "arguments": "a"}', []),
        ('{"name": "now", "arguments": {"a": NaN}}', []),
        ('[{"name": "now"}, {"name": "now", "arguments": [1]}]', []),
        ('{"name": "no name", "arguments": {}}', []),
        ('"now"', []),
        ("{broken", []),
    ],
)
def test_what_is_a_call_and_what_is_text(body, calls):
    said = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in read("json_tools", written("json_tools", body))[1]
    ]
    assert said == calls


def test_a_schema_that_says_little_does_not_lose_the_call():
    """`parameters` is optional, and `true` is a schema: parsers that trip over them are given what they expect."""
    for name, body in (
        ("longcat", "now<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>1</longcat_arg_value>"),
        ("glm47", "any<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ):
        (call,) = read(name, written(name, body))[1]
        assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_a_tool_that_is_offered_may_have_any_name():
    said = written("json_tools", '{"name": "look up"}')
    assert read("json_tools", said) == (said, [])
    (call,) = read("json_tools", said, tools=[{"type": "function", "function": {"name": "look up"}}])[1]
    assert call["function"]["name"] == "look up"


def test_a_stop_string_behind_a_call_is_not_why_the_answer_ends():
    job = SimpleNamespace(stopping=SimpleNamespace(found="\n"))
    for said, reason in ((BODIES["json_tools"], "tool_calls"), ("", "stop")):
        choice = Choice(0, job, Answer(tokenizer("json_tools"), "normal", TOOLS, streaming=False), NoLogprobs())
        list(choice.add(Piece(written("json_tools", said) if said else "Hm.", 0, "stop")))
        assert (choice.whole()["finish_reason"], choice.whole().get("stop_reason")) == (
            reason, "\n" if reason == "stop" else None,
        )  # fmt: skip


def test_ids_of_the_model_are_kept_once():
    text = written("json_tools", '[{"name": "now", "id": "a"}, {"name": "now", "id": "a"}]') * 2
    ids = [call["id"] for call in read("json_tools", text)[1]]
    assert ids[0] == "a"
    assert len(set(ids)) == 4
    numbers = [call["index"] for call in read("json_tools", text, streaming=True)[1]]
    assert numbers == list(range(4))


# On a server -----------------------------------------------------------------------------------------------------

CALL = '{"name": "now", "arguments": {"zone": "UTC"}}'
SAID = {
    "whole": ["I look.", "<tool_call>", CALL, "</tool_call>"],
    "bare": ['<tool_call>{"name": "now"}</tool_call>'],
    "string": ['<tool_call>"now"</tool_call>'],
    "broken": ["<tool_call>{broken</tool_call>"],
    "list": ['<tool_call>{"name": "now", "arguments": [1]}</tool_call>'],
}
PROMPT = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% for tool_call in m.tool_calls %}
<tool_call>{{ tool_call.name }}{{ tool_call.function.arguments | tojson }}</tool_call>{% endfor %}
{{ m.content }}{% endfor %}"""
ROUTES = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_scripts(tmp_path_factory.mktemp("scripts"), {f"@{word}": said for word, said in SAID.items()}, PROMPT)
    with ServerProcess("--model", folder, "--draft-model", "none") as process:
        yield process


def ask(server, dialect, stream, messages, limit, **fields):
    """Text, calls, the reason for the end and the assistant's part of the next request."""
    schema = {"type": "object"}
    body = {
        "chat": {"messages": messages, "max_tokens": limit, "tools": [TOOLS[1]]},
        "messages": {"messages": messages, "max_tokens": limit, "tools": [{"name": "now", "input_schema": schema}]},
        "responses": {
            "input": messages, "max_output_tokens": limit,
            "tools": [{"type": "function", "name": "now", "parameters": schema}],
        },
    }[dialect]  # fmt: skip
    status, reply = server.request("POST", ROUTES[dialect], {**body, "stream": stream, **fields})
    assert status == 200, reply
    events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")] if stream else []
    if dialect == "chat":
        if stream:
            assert reply.rstrip().endswith("data: [DONE]")
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            message = {"content": "".join(delta.get("content", "") for delta in deltas)}
            message["tool_calls"] = [call for delta in deltas for call in delta.get("tool_calls", ())]
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            message, reason = reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "@bare"} for c in message.get("tool_calls", [])]
        return message["content"] or "", calls, reason, [{"role": "assistant", **message}, *results]
    if dialect == "messages":
        content = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        for event in events:
            if event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                content[event["index"]]["text"] += event["delta"]["text"]
            elif event["type"] == "content_block_delta":
                content[event["index"]]["input"] = json.loads(event["delta"]["partial_json"])
        content = content if stream else reply["content"]
        reason = (events[-2]["delta"] if stream else reply)["stop_reason"]
        calls = [(block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "@bare"}
            for block in content
            if block["type"] == "tool_use"
        ]
        history = [{"role": "assistant", "content": content}, {"role": "user", "content": results or "@bare"}]
        return "".join(block.get("text", "") for block in content), calls, reason, history
    output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    output = output if stream else reply["output"]
    calls = [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]
    text = "".join(part["text"] for item in output for part in item.get("content", ()))
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "@bare"}
        for item in output
        if item["type"] == "function_call"
    ]
    return text, calls, (events[-1]["response"] if stream else reply)["status"], [*output, *results]


ENDS = {  # why an answer ends: with a call, by itself, by its limit
    "chat": ("tool_calls", "stop", "length"),
    "messages": ("tool_use", "end_turn", "max_tokens"),
    "responses": ("completed", "completed", "incomplete"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ROUTES)
def test_every_dialect_tells_calls_from_text(server, dialect, stream):
    called, ended, cut = ENDS[dialect]
    start = "<tool_call>"
    for word, limit, text, calls, reason in (
        ("whole", 9, "I look.", [("now", {"zone": "UTC"})], called),
        ("whole", 3, f"I look.{start}{CALL}", [], cut),
        ("whole", 2, f"I look.{start}", [], cut),
        ("bare", 9, "", [("now", {})], called),
        ("string", 9, SAID["string"][0], [], ended),
        ("broken", 9, SAID["broken"][0], [], ended),
        ("list", 9, SAID["list"][0], [], ended),
    ):
        asked = [{"role": "user", "content": f"@{word}"}]
        *said, history = ask(server, dialect, stream, asked, limit)
        assert said == [text, calls, reason]
        if calls:
            again = ask(server, dialect, stream, [*asked, *history], 9)
            assert again[1:3] == ([("now", {})], called), "the model goes on from the result"


NO_CALLS = {  # ways to say so; a vendor's own tool is one that the model is not told of
    "chat": ({"tool_choice": "none"}, {"tools": []}, {"tools": None}),
    "messages": ({"tool_choice": {"type": "none"}}, {"tools": []}, {"tools": None}),
    "responses": ({"tool_choice": "none"}, {"tools": []}, {"tools": None}, {"tools": [{"type": "web_search"}]}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ROUTES)
def test_where_no_call_is_asked_for_there_is_none(server, dialect, stream):
    for fields in NO_CALLS[dialect]:
        for word in ("whole", "bare"):
            said = ask(server, dialect, stream, [{"role": "user", "content": f"@{word}"}], 9, **fields)
            assert said[:3] == ("".join(SAID[word]), [], ENDS[dialect][1])


# What a request may say of tools --------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}


def turn(*calls, **message):
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": None, "tool_calls": calls, **message}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (turn(("a", "f", "{broken")), "messages[1].tool_calls[0].function.arguments"),
        (turn(("a", "f", "{}"), ("b", "f", "[]")), "messages[1].tool_calls[1].function.arguments"),
        (turn(("a", "f", None)), "messages[1].tool_calls[0].function.arguments"),
        (turn(("a", "f", 5)), "messages[1].tool_calls[0].function.arguments"),
        (turn(("a", None, "{}")), "messages[1].tool_calls[0].function.name"),
        (turn(tool_calls=[{"id": "a"}]), "messages[1].tool_calls[0].function"),
        (turn(tool_calls=["a"]), "messages[1].tool_calls[0]"),
        (turn(tool_calls="a"), "messages[1].tool_calls"),
        ({"role": "tool", "tool_call_id": {}, "content": "x"}, "messages[1].tool_call_id"),
    ],
)
def test_malformed_calls_of_an_earlier_turn_are_named(message, field):
    with pytest.raises(ApiError) as caught:
        checked({"messages": [USER, message]}, "chat", UnknownFields())
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"name": "f", "strict": True}, "tools[1].function.strict"),
        ({"parameters": {}}, "tools[1].function.name"),
        ({"name": 5}, "tools[1].function.name"),
        ({"name": "g", "description": 5}, "tools[1].function.description"),
        ({"name": "g", "parameters": "x"}, "tools[1].function.parameters"),
    ],
)
def test_a_tool_that_cant_be_had_is_named(tool, field):
    tools = [{"type": "function", "function": {"name": "f", "strict": False}}, {"type": "function", "function": tool}]
    with pytest.raises(FieldError) as caught:
        checked({"messages": [USER], "tools": tools}, "chat", UnknownFields())
    assert caught.value.param == field


def result(call_id, text="ok"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_results_follow_their_calls_in_the_order_of_the_calls():
    """Most templates show no id: the model takes the first result for the first call's."""
    both = turn(("a", "f", "{}"), ("b", "f", "{}"))
    later = {"role": "user", "content": "and?"}
    assert results_in_order([USER, both, result("b"), result("a")]) == [USER, both, result("a"), result("b")]
    assert results_in_order([both, later, result("b")]) == [both, result("b"), later]
    first, second = turn(("a", "f", "{}")), turn(("a", "f", '{"again": 1}'))
    repeated = [first, result("a", "1"), second, result("a", "2")]
    assert results_in_order(repeated) == repeated, "some models number the calls of each turn anew"
    assert results_in_order([first, second, result("a", "2"), result("a", "1")]) == [
        first, result("a", "1"), second, result("a", "2"),
    ]  # fmt: skip
    twins = turn(("a", "f", "1"), ("a", "f", "2"))
    assert results_in_order([twins, result("a", "1"), result("a", "2")]) == [twins, result("a", "1"), result("a", "2")]
    unnamed = turn((None, "f", "{}"))
    unknown = [first, unnamed, later, result("z"), result(None), {"role": "tool", "content": "no id"}]
    assert results_in_order(unknown) == unknown


def test_each_route_hands_results_over_in_order():
    calls = [("a", "f", '{"n": 1}'), ("b", "f", '{"n": 2}')]
    items = [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in calls]
    outputs = [{"type": "function_call_output", "call_id": i, "output": i} for i in "ba"]
    developer = {"role": "developer", "content": "hurry"}
    responses_chat = responses.to_chat({"input": [USER, items[0], items[1], developer, *outputs]})
    blocks = [{"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in calls]
    results = [{"type": "tool_result", "tool_use_id": i, "content": i} for i in "ba"]
    messages = [
        USER, {"role": "assistant", "content": blocks}, {"role": "system", "content": "hurry"},
        {"role": "user", "content": results},
    ]  # fmt: skip
    anthropic_chat = anthropic.to_chat({"max_tokens": 1, "messages": messages})
    system = {"role": "user", "content": "<system>\nhurry\n</system>"}
    expected = [USER, turn(*calls, content=""), result("a", "a"), result("b", "b"), system]
    assert responses_chat["messages"] == anthropic_chat["messages"] == expected

    sent = []
    engine = SimpleNamespace(
        unknown_fields=UnknownFields(),
        provider=SimpleNamespace(answers_to=bool, plan=SimpleNamespace(block_size=None, draft=None), public_draft=None),
        args=SimpleNamespace(temp=0, top_p=1, top_k=0, min_p=0, max_tokens=1),
        front_tokenizer=SimpleNamespace(chat_template=""),
        prepare=lambda request, *_: sent.append(request.messages) or SimpleNamespace(initial_state="normal"),
    )  # fmt: skip
    asked = [USER, turn(*calls), developer, result("b", "b"), result("a", "a")]
    with pytest.raises(AttributeError):  # behind what is looked at: it has no tokenizer
        Completion(engine, {"messages": asked}, "chat")
    assert [message["content"] for message in sent[0]] == ["x", "", "a", "b", "hurry"]
    assert [call["function"]["arguments"] for call in sent[0][1]["tool_calls"]] == [{"n": 1}, {"n": 2}]


def test_reasoning_belongs_to_the_turn_it_stands_in():
    def reasoning(text):
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "ok"}
    answer = {"role": "assistant", "content": "y"}
    lone = responses.to_chat({"input": [USER, reasoning("lost"), USER, answer, USER, reasoning("last")]})
    assert lone["messages"] == [{"role": "user", "content": "x\n\nx"}, answer, USER]
    around = responses.to_chat({"input": [USER, reasoning("1"), call, reasoning("2"), output, reasoning("3"), answer]})
    assert around["messages"] == [
        USER, {**turn(("a", "f", "{}")), "content": "", "reasoning_content": "1\n\n2"}, result("a"),
        {**answer, "reasoning_content": "3"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (TEMPLATE, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.role }}{% endfor %}{{ tools | tojson if messages[0].role == 'system' }}", True),
        ("{{ raise_exception('no') }}{{ messages }}", True),  # nothing is known: the request itself will tell
    ],
)
def test_tools_that_a_template_does_not_show_are_refused(tmp_path, template, shown):
    save_tokenizer(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path)
    assert takes_tools(tokenizer, {}) == shown
    if not shown:
        request = SimpleNamespace(request_type="chat", prompt="", messages=[USER], tools=TOOLS)
        front = Front(tokenizer, None, 1, "messages")
        with pytest.raises(ApiError, match="tools") as caught:
            tokenized(SimpleNamespace(takes_tools=shown), front, request, None)
        assert (caught.value.status, caught.value.param) == (400, "tools")
