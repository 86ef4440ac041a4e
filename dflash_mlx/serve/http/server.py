"""The socket that listens: a thread a connection, a bounded number of them. Knows no routes."""

from __future__ import annotations

import logging
import socket
from http.server import ThreadingHTTPServer
from typing import Any

from ..engine import Engine
from .connections import Connections, most_connections
from .handler import Find, Handler


class Server(ThreadingHTTPServer):
    """A thread a connection, a bounded number of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...], family: socket.AddressFamily, engine: Engine, find: Find):
        self.address_family = family
        self._connections = Connections(most_connections())
        super().__init__(address[:2], lambda *args: Handler(engine, find, self._connections.begin, *args))

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.getLogger(__name__).info("a connection broke off", exc_info=True)
