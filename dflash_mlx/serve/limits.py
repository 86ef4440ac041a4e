"""What keeps a client from harming the server: deadlines, sizes, the key, and who may ask from a web page."""

from __future__ import annotations

import hmac
import io
import ipaddress
import select
import socket
import time
from email.message import Message
from typing import Any
from urllib.parse import SplitResult, urlsplit

from .errors import ApiError

HEAD_SECONDS = 10.0  # for a request's head
BODY_SECONDS = 30.0  # more, for its body
WRITE_SECONDS = 60.0  # for a client that does not read
LINGER_SECONDS = 2.0
LINGER_BYTES = 64 << 20


class DeadlineReader(io.RawIOBase):
    """Reads a connection until a deadline, so that a client that sends a byte now and then can't hold a thread."""

    def __init__(self, connection: socket.socket, seconds: float = HEAD_SECONDS):
        self.connection, self.deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


def client_left(connection: socket.socket) -> bool:
    """Whether the other side has closed, be it only its sending half; what it sent after its request is dropped."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        if not (ready := poll.poll(0)):
            return False
        return bool(ready[0][1] & (select.POLLERR | select.POLLNVAL)) or not connection.recv(1 << 16)
    except (OSError, ValueError):
        return True


def linger(connection: socket.socket) -> None:
    """Read what a refused client still sends, for a moment: closing on it would destroy the reply on its way."""
    end, room = time.monotonic() + LINGER_SECONDS, LINGER_BYTES
    try:
        connection.shutdown(socket.SHUT_WR)
        while room > 0 and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (data := connection.recv(1 << 16)):
                return
            room -= len(data)
    except OSError:
        return  # it left by itself


def check_key(headers: Message, key: str | None) -> None:
    """Raise `ApiError` 401 unless the request carries the key; the comparison takes the same time for any guess."""
    if key is None:
        return
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer ...", code="invalid_api_key")


def check_origin(headers: Message, allowed: list[str]) -> None:
    """Raise `ApiError` 403 for a web page of another site, which could otherwise use a server on this machine."""
    origin = headers.get("Origin")
    if origin is None or "*" in allowed or origin in allowed or _split(origin).netloc == headers.get("Host"):
        return
    raise ApiError(403, "pages of this origin may not use this server: --allowed-origins", code="origin_not_allowed")


def check_host(headers: Message, guarded: bool) -> None:
    """Raise `ApiError` 403 for a name that merely resolves to this machine (DNS rebinding).

    Args:
        guarded: whether the server is on a loopback address without a key.
    """
    name = _split(f"//{headers.get('Host', 'localhost')}").hostname or ""
    if guarded and not loopback(name):
        raise ApiError(403, "this server answers to localhost only; start it with --api-key for other names")


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise ApiError(400, "Host or Origin is no address") from None


def loopback(host: str) -> bool:
    """Whether only this machine reaches a server on that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
