"""The page at `/`: three static files and the headers that confine them. Knows no model and no HTTP server.

The policy lets the page load from and reach this server only, run no inline script and stand in no frame; so what a
model writes can become text, never code.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def page_file(path: str) -> tuple[bytes, dict[str, str]] | None:
    """Content and headers of a file of the page, or None for another path."""
    if path not in FILES:
        return None
    name, kind = FILES[path]
    return files(__name__).joinpath(name).read_bytes(), {"Content-Type": kind, **HEADERS}
