"""The server and hostile, broken or mistaken clients: the right status, one error object, and nobody else is harmed."""

from __future__ import annotations

import argparse
import json
import socket
from types import SimpleNamespace

import pytest
from mlx_lm.server import CompletionRequest
from serving import ServerProcess

from dflash_mlx.cli import main
from dflash_mlx.serve import tokens
from dflash_mlx.serve.engine import Engine
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.http import limits

KEY = "sesame-open"


@pytest.fixture(scope="module")
def server():
    flags = ["--model", "demo", "--max-body-bytes", "100KB", "--max-prompt-tokens", "200"]
    with ServerProcess(*flags) as process:
        yield process


@pytest.fixture(scope="module")
def locked():
    with ServerProcess("--model", "demo", "--host", "0.0.0.0", env={"DFLASH_API_KEY": KEY}) as process:
        yield process


def refused(server, body, status=400, path="/v1/chat/completions", headers=None):
    """The error object of a request that must fail."""
    got, reply = server.request("POST", path, body, headers)
    assert got == status, reply
    assert reply["error"].keys() == {"message", "type", "param", "code"}
    assert "/" not in reply["error"]["message"].replace("/v1/", ""), "no path of this machine"
    return reply["error"]


MESSAGES = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("name", ["chat_template", "truncation", "max_length", "tokenize", "return_dict", "tools"])
def test_a_request_brings_no_template_and_no_option_of_its_rendering(server, name):
    for path, fields in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/responses", {"input": "hi"})):
        error = refused(server, {**fields, "chat_template_kwargs": {name: "x"}}, path=path)
        assert error["param"] == f"chat_template_kwargs.{name}"
    body = {"max_tokens": 1, "messages": MESSAGES, "chat_template_kwargs": {name: "x"}}
    status, reply = server.request("POST", "/v1/messages", body)
    assert (status, f"chat_template_kwargs.{name}" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "messages[0].content[1]"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"guided_json": {}}, "guided_json"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # the demo has no chat template
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"think": True}, "think"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"role_mapping": {"user": 5}}, "role_mapping.user"),
        ({"prompt": "text"}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"block_size": 64}, "block_size"),
        ({"draft_model": "other"}, "draft_model"),
        ({"temperature": 10**400}, "temperature"),
        ({"repetition_penalty": 2**63}, "repetition_penalty"),
        ({"top_k": 2**63}, "top_k"),
        ({"seed": 10**30}, "seed"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": 5}]}, "tools[0]"),
        ({"messages": [{"role": []}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 90_000}]}, "messages"),
        ({"adapters": "some"}, "adapters"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(server, fields, param):
    for stream in (False, True):
        assert refused(server, {"messages": MESSAGES, "stream": stream, **fields})["param"] == param


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"thinking": {"type": "adaptive"}}),
        ("/v1/messages", {"output_config": {"effort": "low"}}),
        ("/v1/messages", {"chat_template_kwargs": {"a": 1}}),
        ("/v1/responses", {"reasoning": {"effort": "low"}, "chat_template_kwargs": {}}),
    ],
)
def test_agents_are_told_what_a_model_without_a_template_cant_take_by_their_own_fields(server, path, fields):
    asked = {"messages": MESSAGES, "max_tokens": 2} if path == "/v1/messages" else {"input": "hi"}
    status, reply = server.request("POST", path, {**asked, **fields})
    assert (status, f"so {next(iter(fields))} can't" in reply["error"]["message"]) == (400, True)


def test_what_asks_for_nothing_is_accepted(server):
    harmless = {
        "user": "u", "metadata": {}, "store": True, "service_tier": "auto", "n": 1, "response_format": {"type": "text"},
        "parallel_tool_calls": True, "tools": [], "logprobs": None, "stop": None, "seed": None, "best_of": None,
        "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "tool_choice": "auto", "modalities": ["text"],
    }  # fmt: skip
    assert server.chat(MESSAGES, max_tokens=2, **harmless)["usage"]["completion_tokens"] <= 2


def test_bad_bodies_and_paths(server):
    assert refused(server, b"{nope")["code"] == "invalid_json"
    assert refused(server, b"\xff\xfe{")["code"] == "invalid_json"
    assert refused(server, b"[" * 50_000)["code"] == "invalid_json"
    assert "object" in refused(server, [1, 2])["message"]
    assert refused(server, {"messages": MESSAGES, "temperature": float("nan")})["param"] == "temperature"
    assert refused(server, b"x" * 200_000, 413)["code"] == "body_too_large"
    assert refused(server, {}, 404, "/v1/embeddings")["code"] == "not_found"
    assert refused(server, {}, 405, "/v1/models")["code"] == "method_not_allowed"
    assert refused(server, {"messages": MESSAGES, "model": "gpt-9"}, 404)["code"] == "model_not_found"
    assert refused(server, {"prompt": ""}, path="/v1/completions")["param"] == "prompt"
    assert refused(server, {"prompt": ["a", [1]]}, path="/v1/completions")["param"] == "prompt"
    assert refused(server, {"prompt": []}, path="/v1/completions")["param"] == "prompt"
    assert refused(server, {"prompt": [[1], []]}, path="/v1/completions")["param"] == "prompt"
    assert refused(server, {"prompt": [999999]}, path="/v1/completions")["param"] == "prompt"
    assert refused(server, {"prompt": [[[["a"]]]]}, path="/v1/completions")["param"] == "prompt"
    assert "characters" in refused(server, {"prompt": "x" * 90_000}, path="/v1/completions")["message"]
    for method in ("PUT", "DELETE", "PATCH"):
        status, reply = server.request(method, "/v1/models", b"{}")
        assert (status, reply["error"]["code"]) == (405, "method_not_allowed")
    assert server.request("GET", "/v1/models/gpt-9")[0] == 404
    assert server.request("HEAD", "/health")[0] == 200


def raw(server, text, wait=5.0):
    """Send bytes as they are; the status line of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        connection.sendall(text)
        return connection.recv(100).split(b"\r\n")[0]


def test_raw_sockets_get_a_status(server):
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    assert b"411" in raw(server, post + b"\r\n")
    assert b"411" in raw(server, post + b"Transfer-Encoding: chunked\r\n\r\n")
    assert b"400" in raw(server, post + b"Content-Length: x\r\n\r\n")
    assert b"400" in raw(server, post + b"Content-Length: -5\r\n\r\n")
    assert b"413" in raw(server, post + b"Content-Length: 99999999999999999999999\r\n\r\n")
    assert b"400" in raw(server, b"nonsense\r\n\r\n")
    assert b"414" in raw(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert b"403" in raw(server, b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n"), "DNS rebinding"
    assert b"403" in raw(server, b"OPTIONS /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    for wrong in (b"Host: [", b"Host: localhost\r\nOrigin: http://["):
        for method in (b"GET", b"OPTIONS"):
            assert b"400" in raw(server, method + b" /v1/models HTTP/1.1\r\n" + wrong + b"\r\n\r\n")


def test_a_page_of_another_site_may_not_use_it_and_one_that_is_allowed_may(server):
    origin = {"Origin": "https://evil.example"}
    assert refused(server, {"messages": MESSAGES}, 403, headers=origin)["code"] == "origin_not_allowed"
    own = {"Origin": server.url, "Host": f"127.0.0.1:{server.port}"}
    assert server.request("GET", "/v1/models", headers=own)[0] == 200
    assert server.request("OPTIONS", "/v1/models", headers=origin)[0] == 403


def test_the_key_is_asked_for_everywhere_but_at_health(locked):
    assert any("WARNING" in line for line in locked.lines) is False, "a key was given"
    for path in ("/v1/models", "/metrics", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "ключ".encode().decode("latin-1")}):
            status, reply = locked.request("GET", path, headers=headers)
            assert status == 401
            assert KEY not in json.dumps(reply)
    assert refused(locked, {"messages": MESSAGES}, 401)["code"] == "invalid_api_key"
    assert locked.request("GET", "/health")[0] == 200
    assert locked.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})[0] == 200
    assert locked.request("GET", "/v1/models", headers={"Authorization": f"bearer  {KEY}"})[0] == 200
    assert locked.request("GET", "/v1/models", headers={"x-api-key": KEY})[0] == 200
    body = {"messages": MESSAGES, "max_tokens": 2}
    assert locked.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})[0] == 200
    assert not any(KEY in line for line in locked.lines)


def test_models_are_listed_without_a_hub_cache(locked):
    headers = {"Authorization": f"Bearer {KEY}"}
    with ServerProcess("--model", "demo", env={"HF_HUB_CACHE": "/nonexistent", "HF_HOME": "/nonexistent"}) as process:
        status, reply = process.request("GET", "/v1/models", headers=headers)
        assert (status, reply["data"][0]["id"]) == (200, "demo")
        assert process.stop() == 143, "SIGTERM ends it"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block-size", "40"], "--block-size"),
        (["--pipeline"], "--pipeline"),
        (["--api-key", "ключ"], "--api-key"),
        (["--host", "256.0.0.1"], "--host"),
        (["--prompt-cache-dir", "/proc/none"], "--prompt-cache-dir"),
        (["--draft-model", "/missing/draft"], "draft"),
    ],
)
def test_flags_that_can_not_be_obeyed_end_in_one_line(capsys, flags, said):
    assert main(["serve", "--model", "demo", "--port", "0", *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("dflash-mlx: error:")
    assert said in last


def test_a_port_that_is_taken_or_none_is_refused(capsys, server):
    assert main(["serve", "--model", "demo", "--port", str(server.port)]) == 1
    assert f"--port {server.port}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--model", "demo", "--port", "99999"])
    assert "no port" in capsys.readouterr().err


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    ours, theirs = socket.socketpair()
    reader, buffer = limits.DeadlineReader(ours, seconds=64), bytearray(10)
    for left in (64, 48, 32, 16):
        theirs.send(b"x")
        assert reader.readinto(buffer) == 1
        assert ours.gettimeout() == left, "a read waits no longer than that"
        now[0] += 16
    theirs.send(b"x")
    with pytest.raises(TimeoutError):
        reader.readinto(buffer)
    ours.close()
    theirs.close()


def test_what_a_refused_client_still_sends_is_read_within_bounds(monkeypatch):
    """In time and in bytes, however fast it sends."""
    for room, seconds, reads in ((3 << 16, 1e9, 3), (1 << 40, 5, 5)):
        now, read = [0.0], []

        def receive(size, now=now, read=read):
            now[0] += 1
            read.append(size)
            assert len(read) < 9
            return bytes(size)

        monkeypatch.setattr(limits, "LINGER_BYTES", room)
        monkeypatch.setattr(limits, "LINGER_SECONDS", seconds)
        monkeypatch.setattr(limits.time, "monotonic", lambda now=now: now[0])
        limits.linger(SimpleNamespace(shutdown=lambda how: None, settimeout=lambda left: None, recv=receive))
        assert len(read) == reads


def test_a_client_that_left_is_seen_behind_what_it_sent():
    ours, theirs = socket.socketpair()
    assert not limits.client_left(ours)
    theirs.send(b"\n")
    assert not limits.client_left(ours)
    theirs.send(b"\n")
    theirs.close()
    assert any(limits.client_left(ours) for _ in range(2))
    ours.close()


def test_token_ids_do_not_wait_for_a_long_text():
    """`prepare` takes the tokenizer's lock for text only, and refuses what is too long before it is encoded."""

    class Taken:
        def __enter__(self):
            raise AssertionError("it would wait")

        def __exit__(self, *_):
            pass

    class Tokenizer:
        def encode(self, text, **kwargs):
            raise AssertionError("it was encoded")

        def apply_chat_template(self, messages, tokenize=True, **kwargs):
            assert not tokenize
            return messages[0]["content"]

    bounded = tokens.Front(Tokenizer(), limit=10, longest=4, field="prompt")
    with pytest.raises(ApiError, match="41 characters"):
        bounded.encode("x" * 41)
    with pytest.raises(ApiError, match="41 characters"):
        bounded.apply_chat_template([{"content": "x" * 41}])

    engine = Engine.__new__(Engine)
    engine._tokenizing, engine.front_tokenizer, engine.longest_token = Taken(), Tokenizer(), 4
    engine.args = argparse.Namespace(max_prompt_tokens=2)
    engine.model_provider = engine.provider = None
    request = CompletionRequest("text", [1, 2, 3], [], None, None)
    with pytest.raises(ApiError, match="3 tokens"):
        engine.prepare(request, None)


def test_a_host_that_others_reach_is_warned_about_without_a_key():
    with ServerProcess("--model", "demo", "--host", "0.0.0.0", env={"DFLASH_API_KEY": ""}) as process:
        assert any(line.startswith("WARNING") and "--api-key" in line for line in process.lines)
