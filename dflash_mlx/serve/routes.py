"""Which path is answered by what: one table.

A new route is a line here and a function `(handler) -> None` in a module of its own that answers with
`handler.reply(...)` or `handler.events(...)`. A dialect of another vendor turns its body into that of a chat
completion, runs `Completion(handler.engine, body, "chat")` and translates its packets; errors are raised as `ApiError`.
A GET path that ends in "/*" also matches what follows. `open` routes need no API key.
"""

from __future__ import annotations

from .dialects import agents, anthropic, completion
from .http import page, status
from .http.handler import Route

ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/v1/chat/completions"): Route(completion.answer_chat),
    ("POST", "/chat/completions"): Route(completion.answer_chat),
    ("POST", "/v1/completions"): Route(completion.answer_text),
    ("POST", "/v1/messages"): Route(agents.answer_messages, error_body=anthropic.error_body),
    ("POST", "/v1/messages/count_tokens"): Route(agents.count_tokens, error_body=anthropic.error_body),
    ("POST", "/v1/responses"): Route(agents.answer_responses),
    **{("GET", path): Route(page.answer, open=True) for path in page.FILES},
    ("GET", "/v1/models"): Route(status.models),
    ("GET", "/v1/models/*"): Route(status.model),
    ("GET", "/metrics"): Route(status.metrics),
    ("GET", "/health"): Route(status.health, open=True),
}


def find(method: str, path: str) -> tuple[Route | None, list[str]]:
    """The route of a request, and the methods that its path takes."""
    matching = {known[0]: route for known, route in ROUTES.items() if _matches(known[1], path)}
    return matching.get(method), sorted(matching)


def _matches(pattern: str, path: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("/*") else path == pattern
