"""The page at `/`: three static files and the headers that confine them. Knows no model.

The policy lets the page load from and reach this server only, run no inline script and stand in no frame; so what a
model writes can become text, never code.
"""

from __future__ import annotations

from importlib.resources import files

from ..handler import Handler

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


def answer(handler: Handler) -> None:
    """GET one of the files; they hold no secret, so that the page can ask for the key."""
    name, kind = FILES[handler.route_path]
    handler.reply_bytes(files(__name__).joinpath(name).read_bytes(), kind, headers=HEADERS)
