"""The server under load: clients that leave, requests that fail, many at once, and what answers meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ServerProcess, until

from dflash_mlx.serve.engine import COMPANY_SECONDS

LONG = {"prompt": "def f(x):\n", "max_tokens": 1500, "logit_bias": {"0": -100}}  # no end token: about 20 s
PREFILL = {"prompt": "x = 1\n" * 300, "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--model", "demo", "--prefill-step-size", "16") as process:
        yield process


def send(server, body):
    """A connection with a request on it; nothing is read."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def until_busy(server):
    until(lambda: server.load() > 0)


def ended_early(server):
    return server.count('requests_total{outcome="cancelled"')


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [LONG, PREFILL], ids=["decode", "prefill"])
def test_a_client_that_leaves_frees_the_engine(server, body, stream):
    expected = server.complete("def g(", max_tokens=6)["choices"][0]["text"]
    before = ended_early(server)
    connection = send(server, {**body, "stream": stream, "seed": 1, "temperature": 0.01})
    until_busy(server)
    if stream:
        connection.recv(100)
    connection.close()
    server.until_idle()
    assert ended_early(server) == before + 1, "a request for nobody went on to its end"
    assert server.complete("def g(", max_tokens=6)["choices"][0]["text"] == expected


def test_half_of_ten_clients_vanish_and_the_others_are_answered(server):
    before = ended_early(server)
    gone = [send(server, {**LONG, "stream": i % 2 == 0}) for i in range(5)]
    with ThreadPoolExecutor(5) as pool:
        staying = [pool.submit(server.complete, f"def g{i}(", max_tokens=12) for i in range(5)]
        for connection in gone[::2]:
            connection.recv(1)  # its reply has begun
        for connection in gone:
            connection.close()
        assert all(reply.result(120)["usage"]["completion_tokens"] > 0 for reply in staying)
    server.until_idle()
    assert ended_early(server) == before + 5


def test_light_routes_answer_while_a_reply_is_written(server):
    connection = send(server, LONG)
    until_busy(server)
    for path in ("/health", "/v1/models", "/metrics"):
        assert server.request("GET", path)[0] == 200
    assert server.load() == 1, "all were answered before the reply was written"
    connection.close()
    server.until_idle()


def test_a_failing_request_harms_no_other(server):
    """Refused ones, one that the template can't take, and one that breaks inside the engine, among good ones."""
    good = {"prompt": "def h(", "max_tokens": 30}
    expected = server.complete(**good)["choices"][0]["text"]
    bad = [{**good, "n": 3}, {**good, "prompt": [5000]}, {**good, "max_tokens": "many"}, {"prompt": {"a": 1}}]

    def one(body):
        return server.request("POST", "/v1/completions", body)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, [good, bad[0], good, bad[1], bad[2], good, bad[3], good]))
    assert [status for status, _ in answers] == [200, 400, 200, 400, 400, 200, 400, 200]
    assert all(reply["choices"][0]["text"] == expected for status, reply in answers if status == 200)


def test_one_alone_drafts_and_many_share_a_batch(server):
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda i: server.complete(f"def many_{i}(", max_tokens=40), range(6)))
    ways = [reply["dflash"]["ran"] for reply in replies]
    assert any("batch" in way for way in ways), ways
    for reply in replies:
        block, usage = reply["dflash"], reply["usage"]
        assert usage["completion_tokens"] == block["accepted"] + block["bonus"] + block["plain_tokens"]
    alone = alone_at_last(server, prompt="def many_0(", max_tokens=40)
    assert alone["choices"][0]["text"] == replies[0]["choices"][0]["text"]


def alone_at_last(server, **body):
    """A completion with the draft: just behind a batch others are expected, and none starts alone."""
    for _ in range(40):
        time.sleep(2 * COMPANY_SECONDS)
        if (reply := server.complete(**body))["dflash"]["ran"] == "dflash":
            return reply
    raise AssertionError("the draft did not come back")


def test_a_running_reply_is_handed_over_and_comes_back_to_the_draft(server):
    expected = server.complete("class Long:\n", max_tokens=150)["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        long = pool.submit(streamed, server, begun, {"prompt": "class Long:\n", "max_tokens": 150, "stream": True})
        assert begun.wait(60)
        short = pool.submit(server.complete, "def short(", max_tokens=8).result()
        text, ran = long.result()
    assert text == expected
    assert ran == "dflash+batch+dflash"
    assert short["dflash"]["ran"] == "batch", "it did not wait for the long one"


def streamed(server, begun, body):
    """Text and way of a completion; `begun` is set at its first packet."""
    text, packet = "", {}
    for packet in server.stream("/v1/completions", body):
        text += packet["choices"][0]["text"]
        begun.set()
    return text, packet["dflash"]["ran"]


def test_too_many_waiting_requests_are_told_so():
    with ServerProcess("--model", "demo", "--max-queue", "2", "--decode-concurrency", "1") as process:
        held = [send(process, LONG)]
        until_busy(process)
        held += [send(process, LONG) for _ in range(2)]
        until(lambda: process.request("GET", "/health")[1]["queued"] == 2)
        status, reply = process.request("POST", "/v1/completions", {"prompt": "x"})
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        for connection in held:
            connection.close()
        process.until_idle()
        assert ended_early(process) == 3


@pytest.fixture
def engine():
    """The engine in this process, to break it from inside."""
    from dflash_mlx.cli import make_parser
    from dflash_mlx.loading import plan
    from dflash_mlx.serve.engine import Engine
    from dflash_mlx.serve.provider import Provider

    args = make_parser()[0].parse_args(["serve", "--model", "demo"])
    engine = Engine(Provider(args, plan("demo")), args)
    assert engine.loaded.wait(60)
    yield engine
    engine.stop_and_join()


def whole(engine, prompt, **fields):
    from dflash_mlx.serve.dialects.completion import Completion

    return Completion(engine, {"prompt": prompt, "max_tokens": 24, **fields}, "text").whole(lambda: False)


def test_a_seeded_request_stops_no_other_and_says_the_same_in_company(engine):
    from dflash_mlx.serve.dialects.completion import Completion
    from dflash_mlx.serve.job import Piece

    seeded = {"max_tokens": 60, "seed": 5, "temperature": 0.8, "logit_bias": {"0": -100}}
    expected = whole(engine, "class Long:\n", **seeded)["choices"][0]["text"]
    long = Completion(engine, {"prompt": "class Long:\n", **seeded}, "text")
    pieces = (piece for _, piece in long.pieces(lambda: False))
    text = "".join(next(piece.text for piece in pieces if isinstance(piece, Piece)) for _ in range(2))
    short = whole(engine, "def short(", max_tokens=4, seed=6, temperature=0.8)
    assert not long.job.done, "the short one waited"
    text += "".join(piece.text for piece in pieces if isinstance(piece, Piece))
    assert text == expected
    assert "batch" in short["dflash"]["ran"]
    assert "batch" in long.job.report.ways


def test_a_batch_that_fails_goes_on_one_by_one_and_is_the_last(engine, monkeypatch, caplog):
    from dflash_mlx.serve.batch import Batch

    prompts = [f"def f{i}(" for i in range(4)]
    expected = [whole(engine, prompt)["choices"][0]["text"] for prompt in prompts]
    step, steps = Batch.step, []

    def broken(self):
        steps.append(len(self.jobs))
        if len(steps) >= 9:
            raise RuntimeError("the mask does not fit")
        return step(self)

    monkeypatch.setattr(Batch, "step", broken)
    for meeting in range(2):
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda prompt: whole(engine, prompt), prompts))
        assert [reply["choices"][0]["text"] for reply in replies] == expected
        assert any("batch+dflash" in reply["dflash"]["ran"] for reply in replies) == (meeting == 0)
    assert len(steps) == 9
    assert sum("one by one from now on" in record.message for record in caplog.records) == 1


def test_an_exception_in_one_request_ends_only_that_one(engine, monkeypatch):
    from dflash_mlx.serve import alone
    from dflash_mlx.serve.errors import ApiError

    real = alone.generate_step

    def broken(prompt, *args, **options):
        if len(prompt) > 30:
            raise RuntimeError("/secret/path is broken")
        return real(prompt, *args, **options)

    monkeypatch.setattr(alone, "generate_step", broken)
    with pytest.raises(ApiError) as refused:
        whole(engine, "x = 1\n" * 20)
    assert refused.value.status == 500
    assert "secret" not in str(refused.value.body())
    assert whole(engine, "def g(")["usage"]["completion_tokens"] > 0
    assert engine.is_healthy
    assert engine.metrics._requests[("error", "dflash")] == 1


def test_a_batch_that_can_not_be_made_ends_the_request_that_needs_it(engine, monkeypatch):
    from dflash_mlx.serve import engine as module
    from dflash_mlx.serve.errors import ApiError

    def broken(*args):
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(module, "Batch", broken)
        with pytest.raises(ApiError) as refused:
            whole(engine, "def f(", block_size=1)  # no draft: it goes to a batch
    assert refused.value.status == 500
    assert whole(engine, "def f(", block_size=1)["dflash"]["ran"] == "batch"


def test_a_reply_that_is_out_is_not_written_again_when_its_batch_fails(engine, monkeypatch):
    from dflash_mlx.serve import alone
    from dflash_mlx.serve.batch import Batch

    text = whole(engine, "def f(", block_size=1, logit_bias={"0": -100})["choices"][0]["text"]
    ran = []

    def broken(self, uids):
        raise RuntimeError("no rows")

    monkeypatch.setattr(Batch, "_remove", lambda self, uids: broken(self, uids) if uids else {})
    monkeypatch.setattr(alone, "generate_step", lambda *args, **options: ran.append(args) or iter(()))
    ended = engine.metrics._requests["ok", "batch"]
    fields = {"block_size": 1, "logit_bias": {"0": -100}, "stop": text[4:8]}
    assert whole(engine, "def f(", **fields)["choices"][0]["finish_reason"] == "stop"
    until(lambda: engine.provider.one_by_one and engine.load() == (0, 0))
    assert not ran
    assert engine.metrics._requests["ok", "batch"] == ended + 1


def test_what_a_request_can_not_have_is_told_and_logged(engine, monkeypatch, caplog):
    import logging

    from dflash_mlx.errors import TargetError
    from dflash_mlx.serve import alone
    from dflash_mlx.serve.errors import ApiError

    def refused(*args, **options):
        raise TargetError("this cache can't be rewound")

    monkeypatch.setattr(alone, "generate_step", refused)
    with caplog.at_level(logging.INFO), pytest.raises(ApiError, match="this cache can't be rewound") as told:
        whole(engine, "def f(")
    assert told.value.status == 400
    assert any(record.exc_info and record.exc_info[0] is TargetError for record in caplog.records)


def test_a_checkpoint_that_exits_is_an_error_of_the_load(engine):
    """Its code runs in the engine's thread, whose end nobody would see."""
    from types import SimpleNamespace

    from dflash_mlx.serve.engine import Engine

    def leave():
        raise SystemExit("I need another library")

    other = Engine(SimpleNamespace(load_default=leave), engine.args)
    assert other.loaded.wait(60)
    assert isinstance(other.load_error, SystemExit)
    assert not other.is_healthy


def test_going_down_ends_what_runs():
    with ServerProcess("--model", "demo") as process:
        connection = send(process, LONG)
        until_busy(process)
        assert process.stop() == 143
        assert b"503" in connection.recv(100), "the reply was not written to its end first"
        connection.close()
