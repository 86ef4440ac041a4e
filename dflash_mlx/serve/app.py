"""Builds the parts and runs them until the process is told to end."""

from __future__ import annotations

import argparse
import socket
import sys

from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..errors import DFlashError
from ..loading import Plan
from .engine import Engine
from .http.access import loopback
from .http.server import Server
from .provider import Provider
from .routes import find


def serve(args: argparse.Namespace, plan: Plan) -> int:
    """Load the pair and serve it; returns the exit code.

    Raises `DFlashError` when the address can't be had or the pair can't be loaded.
    """
    args.known_hosts = known_hosts(args)
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


def known_hosts(args: argparse.Namespace) -> list[str] | None:
    """Names beside the private ones that it may be asked under, None for any; see `access`.

    A key, or an address that others reach, is another way in, so there only names that were given restrict it.
    """
    guarded = loopback(args.host) and args.api_key is None
    return args.allowed_hosts if guarded or args.allowed_hosts else None


def _bound(host: str, port: int, engine: Engine) -> Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return Server(address, family, engine, find)
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
    if not provider.tokenizer.has_chat_template:
        what = "chats are shown to it as a plain transcript; POST /v1/completions takes a raw prompt"
        print(f"this model has no chat template: {what}", file=sys.stderr)
    print(f"serving on http://{host}:{server.server_address[1]}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
