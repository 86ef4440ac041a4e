"""Who may ask: the key, the name that the server was asked under (`Host`), and the page that asks (`Origin`).

DNS rebinding: a page of evil.example has its own name resolve to 127.0.0.1, and the browser, which knows nothing but
names, lets it read the answers. Its requests still carry `Host: evil.example`, so a server on loopback without a key
answers only to names that nobody can have the public DNS point here:
  - an IP address, in any spelling: nothing is looked up, so nothing can be rebound;
  - localhost and *.localhost, which resolvers must keep to this machine (RFC 6761);
  - *.internal, kept out of the public DNS by ICANN; containers know their host as host.docker.internal and the like;
  - *.local, which only neighbours on the same network answer for (mDNS, RFC 6762), and this machine's own one-word
    name. Its full name is no such name: the network that one joins can hand it out.
Every other name is `--allowed-hosts`' to give.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from email.message import Message

from ..errors import ApiError

PRIVATE = ("localhost", "*.localhost", "*.internal", "*.local")
HOST = re.compile(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\s:/?#@\[\]\\]+))(?::\d*)?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-fA-F:.%]+\]|[^\s/?#@\[\]\\:]*)(?::\d+)?|null", re.IGNORECASE)


def check_key(headers: Message, key: str | None) -> None:
    """Raise `ApiError` 401 unless the request carries the key; the comparison takes the same time for any guess."""
    if key is None:
        return
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer ...", code="invalid_api_key")


def check_host(headers: Message, allowed: Sequence[str] | None) -> None:
    """Raise `ApiError` 403 for a name that merely resolves to this machine.

    Args:
        allowed: patterns beside the private names; None where any name will do.
    """
    host = headers.get("Host", "localhost").strip()
    found = HOST.fullmatch(host)
    if found is None:
        raise ApiError(400, "Host is no address")
    name = (found[1] or found[2]).lower().removesuffix(".")
    if allowed is None or _address(name) or matches(name, (*PRIVATE, _own_name(), *allowed)):
        return
    raise ApiError(403, "this server does not answer to that name: --allowed-hosts, or --api-key", code="host_refused")


def check_origin(headers: Message, allowed: Sequence[str]) -> None:
    """Raise `ApiError` 403 for a web page of another site, which could otherwise use a server on this machine.

    Args:
        allowed: patterns; the server's own page, told by name and port, needs none.
    """
    origin = headers.get("Origin")
    if origin is None or (ORIGIN.fullmatch(origin) and origin.partition("://")[2] == headers.get("Host")):
        return
    if ORIGIN.fullmatch(origin) is None:
        raise ApiError(400, "Origin is no address")
    if not matches(origin.lower(), allowed):
        raise ApiError(
            403, "pages of this origin may not use this server: --allowed-origins", code="origin_not_allowed"
        )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of the patterns, in which a * stands for anything."""
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in patterns)


def loopback(host: str) -> bool:
    """Whether only this machine reaches a server on that host."""
    name = host.lower().removesuffix(".")
    address = _address(name)
    return matches(name, ("localhost", "*.localhost")) if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name spells, as 127.0.0.1, 127.1, 0x7f.1 or ::ffff:127.0.0.1; None for any other name."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        # Of names that end in a number inet_aton reads what browsers read; its others are no host names.
        last = name.rpartition(".")[2]
        if not re.fullmatch(r"\d+|0x[0-9a-f]*", last):
            return None
        try:
            return ipaddress.IPv4Address(socket.inet_aton(name))
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _own_name() -> str:
    """The first word of this machine's name; asked each time, since it changes with the network."""
    return socket.gethostname().partition(".")[0].lower()
