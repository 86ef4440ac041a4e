"""What keeps a client from harming the server by time: deadlines, and whether it is still there."""

from __future__ import annotations

import io
import select
import socket
import time
from typing import Any

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
