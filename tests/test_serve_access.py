"""Who may ask the server and how many at once, over real sockets; no model is behind it."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from dflash_mlx.cli import make_parser
from dflash_mlx.serve import routes
from dflash_mlx.serve.app import known_hosts
from dflash_mlx.serve.http import connections
from dflash_mlx.serve.http.access import loopback
from dflash_mlx.serve.http.server import Server


class Edge:
    """The server's front with the given flags."""

    def __init__(self, *flags):
        args = make_parser()[0].parse_args(["serve", "--model", "demo", *flags])
        args.known_hosts = known_hosts(args)
        engine = SimpleNamespace(args=args, is_healthy=True, load=lambda: (0, 0))
        self.server = Server(("127.0.0.1", 0), socket.AF_INET, engine, routes.find)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def ask(self, method="GET", path="/health", body=b"", **headers):
        """Status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"localhost:{self.port}", "Content-Length": str(len(body)), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    def status(self, host, method="GET", **headers):
        return self.ask(method, Host=host, **headers)[0]


@pytest.fixture(scope="module")
def edge():
    with Edge() as edge:
        yield edge


# Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "localhost", "LOCALHOST", "localhost.", "app.localhost", "127.0.0.1", "127.1", "0x7f.1", "2130706433",
        "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "192.168.65.254", "host.docker.internal", "host.containers.internal",
        "mymac.local", "mymac.local.",
    ],
)  # fmt: skip
def test_names_that_no_public_dns_can_point_here_are_answered(edge, name):
    assert {edge.status(host) for host in (name, f"{name}:{edge.port}")} == {200}


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("evil.example", 403), ("evil.example.", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("host.docker.internal.evil.example", 403), ("evillocalhost", 403), ("evil-internal", 403), ("internal", 403),
        ("x.local.evil.example", 403), ("1.2.3.4.5", 403), ("256.0.0.1", 403), ("evil.example.127", 403),
        ("evil", 403), ("xn--localhost-.example", 403), ("*", 403), (".", 403), (".*", 403), ("", 400),
        ("localhost@evil.example", 400), ("evil.example/localhost", 400), ("localhost evil.example", 400),
        ("[::1", 400), ("localhost:80:80", 400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_rebound_name_is_refused(edge, name, status, method):
    own_page = {"Origin": f"http://{name}:{edge.port}"} if status == 403 else {}
    assert edge.status(f"{name}:{edge.port}" if name else "", method, **own_page) == status


def test_of_this_machines_names_only_the_one_word_is_its_own(edge, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "MyMac.hotel.evil.example")
    assert (edge.status("mymac"), edge.status("mymac:8080")) == (200, 200)
    assert edge.status("mymac.hotel.evil.example") == 403, "the network hands that name out"


@pytest.mark.parametrize(
    ("flags", "answered", "refused"),
    [
        (
            ["--allowed-hosts", "LLM.example.com,*.lan"],
            ["llm.example.com", "box.lan", "127.0.0.1"],
            ["lan", "x.example"],
        ),
        (["--allowed-hosts", "*"], ["evil.example"], []),
        (["--host", "0.0.0.0"], ["any.example"], []),
        (["--api-key", "sesame"], ["any.example"], []),
        (["--host", "0.0.0.0", "--allowed-hosts", "box.lan"], ["box.lan", "127.0.0.1"], ["any.example"]),
        (["--api-key", "sesame", "--allowed-hosts", "box.lan"], ["box.lan"], ["any.example"]),
        (["--host", "127.1"], ["localhost"], ["any.example"]),
    ],
)
def test_allowed_hosts_and_what_else_opens_the_server(flags, answered, refused):
    with Edge(*flags) as edge:
        assert [edge.status(name) for name in answered] == [200] * len(answered)
        assert [edge.status(name) for name in refused] == [403] * len(refused)


def test_which_addresses_only_this_machine_reaches():
    assert all(map(loopback, ["127.0.0.1", "127.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost", "Localhost."]))
    assert not any(map(loopback, ["0.0.0.0", "::", "192.168.1.2", "mymac.local", "10.1", "evil.example", ""]))


# Origins --------------------------------------------------------------------------------------------------------


def test_a_page_of_another_port_is_another_site(edge):
    """The page that a development server shows on this machine may not use it either."""
    own = f"localhost:{edge.port}"
    assert edge.status(own, Origin=f"http://{own}") == 200
    for other in ("http://localhost:3000", "http://localhost", f"http://127.0.0.1:{edge.port}", "null", "app://x"):
        assert edge.status(own, Origin=other) == 403
        assert edge.status(own, "OPTIONS", Origin=other) == 403


def test_allowed_origins_may_have_a_star_and_may_read_the_answer():
    with Edge("--allowed-origins", "app://*,http://localhost:3000/,https://*.example.com") as edge:
        for origin in ("app://obsidian.md", "http://localhost:3000", "https://a.example.com", "App://Obsidian.md"):
            for method in ("GET", "OPTIONS"):
                status, headers, _ = edge.ask(method, Origin=origin)
                assert (status, headers["Access-Control-Allow-Origin"]) == (204 if method == "OPTIONS" else 200, origin)
                assert headers["Vary"] == "Origin"
        for origin in (
            "http://localhost:3001",
            "https://example.com",
            "https://a.example.com.evil.example",
            "tauri://x",
        ):
            status, headers, _ = edge.ask(Origin=origin)
            assert (status, headers["Access-Control-Allow-Origin"]) == (403, None)
        assert edge.status("localhost", Origin="https://evil.example/.example.com") == 400
    with Edge("--allowed-origins", "*") as edge:
        assert edge.ask(Origin="null")[1]["Access-Control-Allow-Origin"] == "null"


# Connections ----------------------------------------------------------------------------------------------------


def closed(connection):
    """Whether the server has closed it, within a moment."""
    connection.settimeout(1)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"], ids=["idle", "body"]
)
def test_connections_that_wait_give_way_to_others(monkeypatch, said):
    """More of them than there are threads; the first to come are closed, those that are answered never."""
    monkeypatch.setattr(connections, "MOST", 8)
    answer = threading.Event()
    slow = routes.Route(lambda handler: (answer.wait(10), handler.reply({"slow": True})))
    monkeypatch.setitem(routes.ROUTES, ("GET", "/slow"), slow)
    with Edge() as edge, ExitStack() as stack:
        asked = stack.enter_context(edge.connect())
        asked.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        waiting = [stack.enter_context(edge.connect()) for _ in range(30)]
        for connection in waiting:
            connection.sendall(said)
        start = time.monotonic()
        assert edge.status("localhost") == 200
        assert time.monotonic() - start < 5, "it waited until the others were given up"
        assert [closed(connection) for connection in (*waiting[:20], waiting[-1])] == [True] * 20 + [False]
        answer.set()
        assert b"200" in asked.recv(100)


def test_more_requests_than_threads_are_told_so(monkeypatch):
    monkeypatch.setattr(connections, "MOST", 3)
    answer = threading.Event()
    slow = routes.Route(lambda handler: (answer.wait(10), handler.reply({"slow": True})))
    monkeypatch.setitem(routes.ROUTES, ("GET", "/slow"), slow)
    with Edge() as edge, ExitStack() as stack:
        asked = [stack.enter_context(edge.connect()) for _ in range(3)]
        for connection in asked:
            connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        status, _, body = edge.ask()
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        answer.set()
        assert all(b"200" in connection.recv(100) for connection in asked)
        time.sleep(0.2)
        assert edge.status("localhost") == 200, "their places are free again"


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [(1 << 20, 1 << 20, 512), (256, resource.RLIM_INFINITY, 512), (256, 256, 96), (10, 10, 1), (256, 500, 218)],
)
def test_connections_are_bounded_by_what_the_process_may_open(monkeypatch, soft, hard, most):
    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: now.__setitem__(slice(None), limits))
    assert connections.most_connections() == most
    assert now[1] == hard


# Bodies and paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 5000, "nested more than 100 levels deep"),
        (b'{"messages": ' + b"[" * 150 + b"]" * 150 + b"}", "nested more than 100 levels deep"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": }', "Expecting value"),
        (b'{"prompt": "a\\ud83d"}', "prompt holds half a surrogate pair"),
        (
            b'{"messages": [{"content": [{"text": "\\udc4d"}]}]}',
            "messages[0].content[0].text holds half a surrogate pair",
        ),
        (b'{"logit_bias": {"\\ud83d": 1}}', "logit_bias holds half a surrogate pair"),
        (b'["\\ud83d"]', "[0] holds half a surrogate pair"),
        (b'{"prompt": "\xed\xa0\x80"}', "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_what_is_wrong_with_a_body_is_said_in_words(edge, body, said, path):
    status, _, reply = edge.ask("POST", path, body)
    message = json.loads(reply)["error"]["message"]
    assert (status, said in message) == (400, True), message
    assert "Error" not in message


def test_whole_characters_and_common_nesting_are_read(edge):
    from dflash_mlx.serve.http.json_body import read_json

    body = {"a": "👍\u0000é", "b": [[[{"c": []}]]] * 40, "d": [1.5, None, True] * 50}
    assert read_json(json.dumps(body).encode()) == body
    assert read_json(b"\xef\xbb\xbf" + json.dumps(body, ensure_ascii=False).encode()) == body


def test_paths_are_decoded(edge):
    assert edge.ask(path="/he%61lth?x=%2F")[0] == 200
    status, _, reply = edge.ask(path="/no%0Awhere%ff")
    assert (status, json.loads(reply)["error"]["message"]) == (404, "there is nothing at /no\nwhere\ufffd")
