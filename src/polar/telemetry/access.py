"""Who may read a page of metrics: this machine without a token, everyone else with one."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from ipaddress import ip_address

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of proxies: their own address says nothing of who asks."""


def is_local(address: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request comes from this machine itself, and not through a proxy on it.

    `headers` finds names in lower case.
    """
    if address is None or any(name in headers for name in _FORWARDED):
        return False
    try:
        peer = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(peer, "ipv4_mapped", None)
    return (mapped or peer).is_loopback


def bears(authorization: str | None, token: str | None) -> bool:
    """Whether a request brings the token; never, where there is none."""
    scheme, _, given = (authorization or "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())
