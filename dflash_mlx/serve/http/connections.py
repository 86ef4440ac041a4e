"""The connections of the server: those whose request is still on its way, and those that are being answered.

A connection says nothing until its request is there, and may never. So when there are too many of these the one that
has waited longest is closed for a new one, and what is being answered is never closed. Knows sockets only.
"""

from __future__ import annotations

import resource
import socket
import threading
from contextlib import suppress

MOST = 512  # of either kind, each a thread
OTHER_FILES = 64  # that this process may have open beside its connections


class Connections:
    """Both kinds, bounded; any thread may call.

    Args:
        most: of either kind.
    """

    def __init__(self, most: int):
        self.most = most
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # oldest first
        self._answered: set[socket.socket] = set()

    def add(self, connection: socket.socket) -> None:
        """A new one, whose request is awaited; the oldest such one may lose its place to it."""
        with self._lock:
            self._waiting[connection] = None
            if len(self._waiting) > self.most:
                self._drop_oldest()

    def begin(self, connection: socket.socket) -> bool:
        """Its request is there; False where too many are being answered already."""
        with self._lock:
            if len(self._answered) >= self.most:
                return False
            self._waiting.pop(connection, None)
            self._answered.add(connection)
            return True

    def remove(self, connection: socket.socket) -> None:
        """It is about to be closed."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._answered.discard(connection)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        with suppress(OSError):  # the other side may have closed it
            oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end and closes it


def most_connections() -> int:
    """How many of either kind this process may have; its bound on open files (256 on a Mac) is raised as it may be."""
    wanted = 2 * MOST + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, (soft - OTHER_FILES) // 2))
