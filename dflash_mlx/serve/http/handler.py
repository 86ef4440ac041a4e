"""HTTP: reads a request within its limits, finds its route, writes the reply or the error. Knows no tokens."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote_to_bytes

from ..engine import Engine
from ..errors import ApiError, ClientGone, internal_error
from .access import check_host, check_key, check_origin, matches
from .json_body import read_json
from .limits import BODY_SECONDS, WRITE_SECONDS, DeadlineReader, client_left, linger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Route:
    """What answers, whether anyone may ask, and what its errors look like."""

    answer: Callable[[Handler], Any]
    open: bool = False
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body


Find = Callable[[str, str], tuple[Route | None, list[str]]]  # by method and path; the path's methods beside it


class Handler(BaseHTTPRequestHandler):
    """One connection, which carries one request.

    Args:
        find: the route of a request. begin: whether another connection may be answered now.

    Attributes:
        engine: what serves. body: the request's JSON, of a POST. route_path: its path decoded, without the query.
    """

    server_version = "dflash-mlx"
    sys_version = ""

    def __init__(self, engine: Engine, find: Find, begin: Callable[[socket.socket], bool], *args: Any, **kwargs: Any):
        self.engine, self.find, self.begin = engine, find, begin
        self.body: Any = None
        self.route_path = ""
        self.begun = False  # whether any of the reply was sent
        self.error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body
        super().__init__(*args, **kwargs)

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = io.BufferedReader(DeadlineReader(self.connection))

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (TimeoutError, ConnectionError):
            self.close_connection = True  # too slow, or gone

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_HEAD(self) -> None:
        self._serve("GET")

    def do_PUT(self) -> None:
        self._serve(self.command)

    do_PATCH = do_DELETE = do_PUT

    def do_OPTIONS(self) -> None:
        """What a browser asks before a page of another origin may post."""
        try:
            check_host(self.headers, self.engine.args.known_hosts)
            check_origin(self.headers, self.engine.args.allowed_origins)
        except ApiError as error:
            return self._refuse(error)
        self.send_response(204)
        self._set_cors_headers()
        self.end_headers()

    def _serve(self, method: str) -> None:
        args = self.engine.args
        self.route_path = unquote_to_bytes(self.path.partition("?")[0].encode("latin-1")).decode(errors="replace")
        try:
            route, methods = self.find(method, self.route_path)
            if route is not None:
                self.error_body = route.error_body
            check_host(self.headers, args.known_hosts)
            check_origin(self.headers, args.allowed_origins)
            if route is None or not route.open:
                check_key(self.headers, args.api_key)
            if route is None:
                raise _no_route(method, self.route_path, methods)
            if method == "POST":
                self.body = self._read_body()
            if not self.begin(self.connection):
                raise ApiError(503, "too many requests at once; try again later", code="too_many_connections")
            self.connection.settimeout(WRITE_SECONDS)
            route.answer(self)
        except ApiError as error:
            self._refuse(error)
        except (ClientGone, ConnectionError):
            log.info("the client of %r left", self.route_path)
        except TimeoutError:
            if self.body is None and not self.begun:
                self._refuse(ApiError(408, "the request took too long to arrive", code="timeout"))
        except Exception:
            log.exception("%s %r failed", method, self.route_path)
            self._refuse(internal_error())

    def _read_body(self) -> Any:
        """The JSON body, read only if it is announced and not too large."""
        length = self.headers.get("Content-Length")
        if length is None:
            raise ApiError(411, "Content-Length is needed", code="length_required")
        if not length.isascii() or not length.isdigit():
            raise ApiError(400, "Content-Length is no number")
        if len(length) > 18 or int(length) > self.engine.args.max_body_bytes:
            limit = self.engine.args.max_body_bytes
            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        self.rfile.raw.deadline += BODY_SECONDS
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            raise ClientGone
        return read_json(raw)

    # For routes ----------------------------------------------------------------------------------------------

    def gone(self) -> bool:
        """Whether the client has closed the connection."""
        return client_left(self.connection)

    def reply(self, packet: Mapping[str, Any], status: int = 200) -> None:
        """Answer with JSON."""
        self.reply_bytes(json.dumps(packet).encode(), "application/json", status)

    def reply_bytes(self, data: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with a whole body of that content type."""
        self.begun = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def events(self, packets: Iterable[Mapping[str, Any] | str], done: str | None = None) -> None:
        """Answer with server-sent events, one a packet; a string is a comment.

        A packet may carry its event's name under the key `event` of a pair `{"event": name, "data": packet}`.
        The head goes out with the first packet, so that an error before it still has its status.

        Args:
            done: data of a last event.
        """
        for packet in packets:
            if not self.begun:
                self._begin_events()
            self._write(_event(packet))
        if not self.begun:
            self._begin_events()
        if done is not None:
            self._write(f"data: {done}\n\n")

    def _begin_events(self) -> None:
        self.begun = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self._set_cors_headers()
        self.send_header("X-Accel-Buffering", "no")
        self.end_headers()

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _refuse(self, error: ApiError) -> None:
        """Send an error: as the reply, or as the last event of a stream that has begun."""
        self.close_connection = True
        try:
            if self.begun:
                self._write(_event(self.error_body(error)))
                return
            self.connection.settimeout(WRITE_SECONDS)
            self.reply(self.error_body(error), error.status)
            if self.command not in ("GET", "HEAD") and self.body is None:
                linger(self.connection)
        except OSError:
            log.info("the client of %r left before its error", self.route_path)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the HTTP parser refuses, as an error object too."""
        self.request_version = self.protocol_version  # it may not have got as far as to know it
        self._refuse(ApiError(int(code), message or "not a request that can be read"))

    def _set_cors_headers(self) -> None:
        """Let the page that asks read the answer; it has passed `check_origin`, or the answer is its refusal."""
        headers = getattr(self, "headers", None)  # there are none yet when a request line can't be read
        origin = headers.get("Origin") if headers is not None else None
        if not origin:
            return
        if matches(origin.lower(), self.engine.args.allowed_origins):
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
        self.send_header("Access-Control-Allow-Methods", "*")
        self.send_header("Access-Control-Allow-Headers", "*")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged at INFO, in the server's own log; the key stands in no line."""
        log.info("%s " + format, self.client_address[0], *args)


def _event(packet: Mapping[str, Any] | str) -> str:
    if isinstance(packet, str):
        return f": {packet}\n\n"
    if packet.keys() == {"event", "data"}:
        return f"event: {packet['event']}\ndata: {json.dumps(packet['data'])}\n\n"
    return f"data: {json.dumps(packet)}\n\n"


def _no_route(method: str, path: str, methods: list[str]) -> ApiError:
    if methods:
        return ApiError(405, f"{path} takes {', '.join(methods)}, not {method}", code="method_not_allowed")
    return ApiError(404, f"there is nothing at {path[:100]}", code="not_found")
