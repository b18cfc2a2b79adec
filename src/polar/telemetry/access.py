"""Who may read a page of metrics: this machine without a token, everyone else with one.

A web page can have its own name resolve to this machine (DNS rebinding), and then reads with the browser's
address what is open to this machine. Its requests carry that name as their Host.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of proxies: their own address says nothing of who asks."""


def is_local(address: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request comes from this machine itself, not through a proxy on it and under no foreign name.

    `headers` finds names in lower case.
    """
    if address is None or any(name in headers for name in _FORWARDED):
        return False
    if not is_known_host(headers.get("host")):
        return False
    try:
        peer = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(peer, "ipv4_mapped", None)
    return (mapped or peer).is_loopback


def is_known_host(header: str | None, names: Collection[str] = ()) -> bool:
    """Whether a Host header is an address, localhost or one of these names; browsers always send one."""
    if header is None:
        return True
    try:
        host = urlsplit(f"//{header}").hostname or ""
        if host == "localhost" or host.endswith(".localhost") or host in names:
            return True
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def bears(authorization: str | None, token: str | None) -> bool:
    """Whether a request brings the token; never, where there is none."""
    scheme, _, given = (authorization or "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())
