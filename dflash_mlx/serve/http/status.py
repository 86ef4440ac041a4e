"""The light routes: health, models, metrics. They never wait for the engine."""

from __future__ import annotations

import time
from typing import Any

from ..engine import Engine
from ..errors import ApiError, shown
from .handler import Handler

STARTED = int(time.time())


def health(handler: Handler) -> None:
    """`ok` when a request would be served at once, `busy` while others are, 503 when none can be."""
    engine = handler.engine
    if not engine.is_healthy:
        return handler.reply({"status": "unavailable"}, 503)
    running, queued = engine.load()
    return handler.reply({"status": "busy" if running or queued else "ok", "running": running, "queued": queued})


def models(handler: Handler) -> None:
    """What can be served: the model that was loaded, by each of its names."""
    provider = handler.engine.provider
    names = (provider.public_name, *provider.cli_args.alias)
    handler.reply({"object": "list", "data": [_description(handler.engine, name) for name in names]})


def model(handler: Handler) -> None:
    """One model by name."""
    name = handler.route_path.removeprefix("/v1/models/")
    provider = handler.engine.provider
    if not provider.answers_to(name):
        message = f"no model {shown(name)} here; GET /v1/models lists what is served"
        raise ApiError(404, message, "model", "model_not_found")
    handler.reply(_description(handler.engine, name if name in provider.cli_args.alias else provider.public_name))


def metrics(handler: Handler) -> None:
    """Prometheus text."""
    handler.reply_bytes(handler.engine.metrics.text().encode(), "text/plain; version=0.0.4; charset=utf-8")


def _description(engine: Engine, name: str) -> dict[str, Any]:
    provider = engine.provider
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "dflash-mlx",
        "dflash": {
            "draft_model": provider.public_draft,
            "block_size": provider.block_size,
            "auto": provider.public_draft is not None and provider.pinned is None,
            "chat_template": bool(engine.front_tokenizer.has_chat_template),
        },
    }
