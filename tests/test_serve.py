"""The server with a draft: what it says, against the command, mlx-lm's own server and itself without a draft."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import mlx.core as mx
import pytest
from serving import ServerProcess, save_scripted_pair

from dflash_mlx import demo, generate
from dflash_mlx.serve.engine import COMPANY_SECONDS

PROMPTS = ["def read(path):\n", "class Node:\n    def __init__(self", "import os\n\n\ndef main():\n    for name in"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The demo target in float32 in a folder, so that mlx-lm's server runs the same model."""
    folder = tmp_path_factory.mktemp("demo") / "demo32"
    shutil.copytree(demo.TARGET, folder)
    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def servers(target):
    """With a draft, without one, and mlx-lm's own, started at the same time."""
    flags = [{"draft": "demo"}, {"draft": "none"}, {"plain": True}]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield [stack.enter_context(process) for process in pool.map(lambda f: start(target, **f), flags)]


def start(target, draft=None, plain=False):
    flags = ["--draft-model", draft] if draft else []
    if draft == "demo":
        flags += ["--block-size", "16"]  # by itself it may find the draft too dear here
    return ServerProcess("--model", target, *flags, plain=plain)


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


@pytest.fixture(scope="module")
def undrafted(servers):
    return servers[1]


@pytest.fixture(scope="module")
def plain(servers):
    return servers[2]


@pytest.fixture(scope="module")
def openai(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module", params=["auto", "none"])
def scripted(request, tmp_path_factory):
    """A target that reasons, answers and calls a tool; with and without a draft."""
    folder, draft = save_scripted_pair(tmp_path_factory.mktemp("scripted"))
    with ServerProcess("--model", folder, "--draft-model", draft if request.param == "auto" else "none") as process:
        yield process


def test_text_equals_the_command_and_mlx_lms_server(server, undrafted, plain, demo_pair):
    model, draft, tokenizer = demo_pair
    for prompt in PROMPTS:
        reply = server.complete(prompt, max_tokens=30)
        text = reply["choices"][0]["text"]
        assert text == generate(model, tokenizer, prompt, max_tokens=30, draft_model=draft)
        assert reply["dflash"]["ran"] == "dflash"
        assert reply["dflash"]["draft_used"]
        assert undrafted.complete(prompt, max_tokens=30)["choices"][0]["text"] == text
        theirs = plain.complete(prompt, max_tokens=30)["choices"][0]["text"]
        assert text in (theirs, f" {theirs}"), "mlx-lm's detokenizer drops one leading space"


def test_chat_logprobs_and_usage_equal_mlx_lms_server(server, plain):
    fields = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    ours, theirs = server.chat("def f(x):", **fields), plain.chat("def f(x):", **fields)
    assert ours["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][key] == theirs["usage"][key]
    for mine, other in zip(
        ours["choices"][0]["logprobs"]["content"], theirs["choices"][0]["logprobs"]["content"], strict=True
    ):
        best = sorted(other["top_logprobs"], key=lambda t: -t["logprob"])  # mlx-lm leaves them in no order
        assert [t["id"] for t in mine["top_logprobs"]] == [t["id"] for t in best]
        assert [t["logprob"] for t in mine["top_logprobs"]] == pytest.approx([t["logprob"] for t in best], abs=1e-4)
        assert (mine["id"], mine["logprob"]) == (best[0]["id"], pytest.approx(best[0]["logprob"], abs=1e-4))


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3, "repetition_context_size": 30},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"logit_bias": {"300": 3.5}},
        {"stop": ["\n\n", "return"]},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 1.2, "seed": 8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    ],
)
def test_options_say_the_same_with_a_draft_and_without(server, undrafted, fields):
    # The second time the prompt's caches are there: a hit must not change a penalty or the noise.
    texts = {
        process.complete(PROMPTS[1], max_tokens=24, **fields)["choices"][0]["text"]
        for process in (server, undrafted, server)
    }
    assert len(texts) == 1
    assert not any(stop in text for stop in fields.get("stop", []) for text in texts)


def test_greedy_options_equal_mlx_lms_server(server, plain):
    for fields in ({"repetition_penalty": 1.3}, {"logit_bias": {"300": 3.5}}, {"stop": ["return"]}):
        ours = server.complete(PROMPTS[1], max_tokens=24, **fields)["choices"][0]
        theirs = plain.complete(PROMPTS[1], max_tokens=24, **fields)["choices"][0]
        assert (ours["text"].strip(), ours["finish_reason"]) == (theirs["text"].strip(), theirs["finish_reason"])


def test_blocks_are_chosen_unless_pinned(target, server):
    """Here the draft never pays, or does: the text is the same, and what was chosen is told and kept."""
    prompt = "x = [1, 2, 3]\n" * 12
    with ServerProcess("--model", target, "--draft-model", "demo") as choosing:
        assert choosing.request("GET", "/v1/models")[1]["data"][0]["dflash"]["auto"] is True
        assert any("chosen round by round" in line for line in choosing.lines)
        assert any("no chat template: " in line and "/v1/completions takes" in line for line in choosing.lines)
        reason = choosing.complete("y", max_tokens=2)["dflash"]["draft_off_reason"]
        assert reason == "the text ended before anything was proposed"
        texts = []
        for _ in range(3):
            reply = choosing.complete(prompt, max_tokens=24)
            texts.append(reply["choices"][0]["text"])
            block = reply["dflash"]
            assert block["auto"] is True
            assert block["ran"] == "dflash"
            assert block["draft_used"] or block["draft_off_reason"]
        assert block["cached_tokens"] > 100, "a request that chose plain decoding leaves its caches too"
        assert choosing.complete(prompt, max_tokens=24, block_size=4)["dflash"]["auto"] is False
    assert set(texts) == {server.complete(prompt, max_tokens=24)["choices"][0]["text"]}
    assert server.request("GET", "/v1/models")[1]["data"][0]["dflash"]["auto"] is False


def test_counts_reconcile_with_each_other_and_the_metrics(server):
    before = metrics(server)
    reply = server.complete(PROMPTS[0], max_tokens=33)
    block, usage = reply["dflash"], reply["usage"]
    assert usage["completion_tokens"] == 33 == block["accepted"] + block["bonus"] + block["plain_tokens"]
    assert block["tau"] == pytest.approx((block["accepted"] + block["bonus"]) / block["rounds"], abs=1e-3)
    assert sum(block["rounds_by_accepted"].values()) == block["rounds"]
    assert sum(int(kept) * n for kept, n in block["rounds_by_accepted"].items()) == block["accepted"]
    assert block["block_size"] == 16
    after = metrics(server)
    for name, value in (("generated", 33), ("accepted", block["accepted"]), ("prompt", usage["prompt_tokens"])):
        assert after[f"dflash_{name}_tokens_total"] - before[f"dflash_{name}_tokens_total"] == value
    assert after["dflash_rounds_total"] - before["dflash_rounds_total"] == block["rounds"]
    emitted = [figures["dflash_tau"] * figures["dflash_rounds_total"] for figures in (before, after)]
    assert emitted[1] - emitted[0] == pytest.approx(block["accepted"] + block["bonus"])


def metrics(server):
    status, text = server.request("GET", "/metrics")
    assert status == 200
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_a_stream_joins_to_the_whole_and_ends_with_the_figures(server):
    whole = server.complete(PROMPTS[2], max_tokens=30)
    packets = list(server.stream("/v1/completions", {"prompt": PROMPTS[2], "max_tokens": 30}))
    assert "".join(p["choices"][0]["text"] for p in packets) == whole["choices"][0]["text"]
    assert [p["choices"][0]["finish_reason"] for p in packets][-1] == "length"
    assert packets[-1]["dflash"]["draft_used"]
    assert packets[-1]["usage"]["completion_tokens"] == 30
    asked = {"prompt": PROMPTS[2], "max_tokens": 30, "stream_options": {"include_usage": True, "include_dflash": True}}
    packets = list(server.stream("/v1/completions", asked))
    assert packets[-1]["choices"] == []
    assert packets[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all("tau" in packet["dflash"] for packet in packets)


def test_the_block_size_of_a_request_and_num_draft_tokens(server):
    assert server.complete(PROMPTS[0], max_tokens=9, block_size=4)["dflash"]["block_size"] == 4
    assert server.complete(PROMPTS[0], max_tokens=9, num_draft_tokens=2)["dflash"]["block_size"] == 3
    reply = server.complete(PROMPTS[0], max_tokens=9, block_size=1)["dflash"]
    assert not reply["draft_used"]
    assert reply["draft_off_reason"] == "block size 1 is plain decoding"


def test_token_ids_as_a_prompt(server, demo_pair):
    ids = demo_pair[2].encode(PROMPTS[0])
    texts = [server.complete(p, max_tokens=8)["choices"][0]["text"] for p in (PROMPTS[0], ids, [PROMPTS[0]], [ids])]
    assert len(set(texts)) == 1


def test_the_openai_client_streams_and_completes(openai):
    time.sleep(2 * COMPANY_SECONDS)  # right after a batch nobody starts alone
    done = openai.chat.completions.create(
        model="demo32", messages=[{"role": "user", "content": "def f("}], max_tokens=10, temperature=0, user="me",
        metadata={"a": "b"}, store=False, n=1, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert done.usage.completion_tokens == 10
    assert len(done.choices[0].logprobs.content) == 10
    assert done.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0
    assert done.model_extra["dflash"]["draft_used"]
    stream = openai.chat.completions.create(
        model="demo32", messages=[{"role": "user", "content": "def f("}], max_tokens=10, stream=True,
        stream_options={"include_usage": True}, extra_body={"top_k": 1},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == done.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 10
    assert openai.completions.create(model="default_model", prompt="x = ", max_tokens=4).choices[0].finish_reason
    assert [model.id for model in openai.models.list()] == ["demo32"]
    assert openai.models.retrieve("demo32").id == "demo32"


def test_reasoning_answer_and_tool_call_come_apart_streamed_and_not(scripted):
    body = {"messages": [{"role": "user", "content": "2+2?"}], "tools": TOOLS}
    choice = scripted.chat(**body)["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["reasoning"], message["content"]) == (
        "tool_calls", "Two and two.", "It is 4.",
    )  # fmt: skip
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 2}
    packets = list(scripted.stream("/v1/chat/completions", body))
    deltas = [packet["choices"][0]["delta"] for packet in packets]
    assert "".join(d.get("reasoning", "") for d in deltas) == "Two and two."
    assert "".join(d.get("content", "") for d in deltas) == "It is 4."
    (streamed,) = [c for d in deltas for c in d.get("tool_calls", [])]
    assert streamed["function"] == call["function"]
    assert packets[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_thinking_options_reach_the_template(scripted):
    prompts = {}
    for name, fields in {
        "default": {},
        "on": {"enable_thinking": True},
        "off": {"chat_template_kwargs": {"enable_thinking": False}},
    }.items():
        reply = scripted.chat([{"role": "system", "content": "brief"}], tools=TOOLS, **fields)
        prompts[name] = reply["usage"]["prompt_tokens"]
        assert ("reasoning" in reply["choices"][0]["message"]) == (name != "off")
        assert reply["choices"][0]["message"]["content"] == "It is 4."
    assert prompts["default"] == prompts["on"] == prompts["off"] - 1


def test_a_turn_with_a_tool_result_and_the_openai_client(scripted):
    from openai import OpenAI

    client = OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    first = client.chat.completions.create(model="default_model", messages=messages, tools=TOOLS, tool_choice="auto")
    call = first.choices[0].message.tool_calls[0]
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    second = client.chat.completions.create(
        model="default_model", messages=messages, tools=TOOLS, parallel_tool_calls=False
    )
    assert second.choices[0].finish_reason == "tool_calls"
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    none = client.chat.completions.create(model="default_model", messages=messages, tools=TOOLS, tool_choice="none")
    assert none.usage.prompt_tokens < second.usage.prompt_tokens, "the template was not given the tools"


def test_a_reply_that_ends_inside_a_tool_call_shows_what_was_written(scripted):
    choice = scripted.chat("2+2?", tools=TOOLS, max_tokens=4)["choices"][0]  # up to and with <tool_call>
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    choice = scripted.chat("2+2?", tools=TOOLS, max_tokens=4 + 1, stop=['"a": 2'])["choices"][0]
    assert choice["message"]["content"] == 'It is 4.<tool_call>{"name": "add", "arguments": {'
    assert choice["finish_reason"] == "stop"
