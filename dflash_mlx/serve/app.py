"""Builds the parts and runs them until the process is told to end."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any

from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..errors import DFlashError
from ..loading import Plan
from .engine import Engine
from .handler import Handler
from .limits import loopback
from .provider import Provider

MAX_CONNECTIONS = 512


class Server(ThreadingHTTPServer):
    """A thread a connection, a bounded number of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...], family: socket.AddressFamily, engine: Engine):
        self.address_family = family
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address[:2], lambda *args: Handler(engine, *args))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.getLogger(__name__).info("a connection broke off", exc_info=True)


def serve(args: argparse.Namespace, plan: Plan) -> int:
    """Load the pair and serve it; returns the exit code.

    Raises `DFlashError` when the address can't be had or the pair can't be loaded.
    """
    args.guarded = loopback(args.host) and args.api_key is None
    if not loopback(args.host) and args.api_key is None:
        print(
            f"WARNING: anyone who reaches {args.host} can use this server. Give --api-key, or leave --host away.",
            file=sys.stderr,
        )
    maybe_set_recommended_wired_limit()
    engine = Engine(Provider(args, plan), args)
    try:
        server = _bound(args.host, args.port, engine)
        engine.loaded.wait()
        if engine.load_error is not None:
            raise engine.load_error
        _announce(args, engine, server)
        try:
            server.serve_forever(poll_interval=0.1)
        finally:
            server.server_close()
    finally:
        engine.stop_and_join()
    return 0


def _bound(host: str, port: int, engine: Engine) -> Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return Server(address, family, engine)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DFlashError(f"--host {host} --port {port}: {reason}; give another address") from None


def _announce(args: argparse.Namespace, engine: Engine, server: Server) -> None:
    provider = engine.provider
    block = (
        f"block {provider.pinned}"
        if provider.pinned
        else f"blocks of up to {provider.block_size}, chosen round by round"
    )
    draft = f"draft {provider.public_draft}, {block}" if provider.public_draft else "no draft"
    host = f"[{args.host}]" if ":" in args.host else args.host
    many = f"one at a time ({provider.one_by_one})" if provider.one_by_one else "batched without the draft"
    print(f"{provider.public_name}, {draft}; several requests at once run {many}", file=sys.stderr)
    print(f"serving on http://{host}:{server.server_address[1]}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
