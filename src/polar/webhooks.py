"""Signing webhooks, and checking them where they are received: `polar.webhooks.verify` is for receivers.

A notice carries `Polar-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256 of `SECONDS.BODY` with
the secret that server and receiver share. Delivery is at least once: answer 2xx when a notice has been
handled, remember its id, and answer 2xx without handling it again if the same id returns.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

from polar.errors import PolarError
from polar.models.views import Notice

SIGNATURE = "Polar-Signature"
DELIVERY = "Polar-Delivery"
"""This header repeats the notice's id for logs; trust only the id inside the signed body."""

MAX_AGE_SECONDS = 300.0


class InvalidNotice(PolarError):
    """The notice was not sent by the server, or is too old: answer 4xx and do nothing."""


class ReplayedNotice(PolarError):
    """The notice has already been handled: answer 2xx, so that it is not sent again, and do nothing."""


def sign(secret: str, body: bytes, at: float) -> str:
    """Return the signature header for a body sent at this time."""
    moment = str(int(at))
    return f"t={moment},v1={_digest(secret, moment, body)}"


def verify(
    secret: str | Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    seen: Container[str] = (),
    max_age_seconds: float = MAX_AGE_SECONDS,
    now: float | None = None,
) -> Notice:
    """Return the notice in a request, or raise InvalidNotice (forged or old) or ReplayedNotice (id in
    `seen`).

    While the secret is being changed, pass both the old and the new one. Add the notice's id to `seen` (a
    set, a `Recent`, a table) after handling it, not before: a notice whose handling failed is sent again.
    """
    moment, signatures = _parse_signature(_header(headers, SIGNATURE))
    secrets = (secret,) if isinstance(secret, str) else tuple(secret)
    expected = [_digest(one, moment, body) for one in secrets]
    if not any(hmac.compare_digest(wanted, given) for wanted in expected for given in signatures):
        raise InvalidNotice(
            "the signature does not match the body", hint="check that both sides have the same secret"
        )
    age = (time.time() if now is None else now) - int(moment)
    if abs(age) > max_age_seconds:
        raise InvalidNotice(f"the signature is {age:.0f} s old", hint="check the clocks of both machines")
    try:
        notice = Notice.model_validate_json(body)
    except ValueError:
        raise InvalidNotice(
            "the body is not a notice", hint="run the same version of Polar on both sides"
        ) from None
    if notice.id in seen:
        raise ReplayedNotice(f"notice {notice.id} has already been handled")
    return notice


class Recent:
    """The ids handled most recently, for one process; keep them in a table to survive restarts."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, id: object) -> bool:
        return id in self._ids

    def add(self, id: str) -> None:
        self._ids[id] = None
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)


def _digest(secret: str, moment: str, body: bytes) -> str:
    return hmac.new(secret.encode(), moment.encode() + b"." + body, hashlib.sha256).hexdigest()


def _header(headers: Mapping[str, str], name: str) -> str:
    for key, value in headers.items():
        if key.lower() == name.lower():
            return value
    raise InvalidNotice(f"the {name} header is missing")


def _parse_signature(header: str) -> tuple[str, list[str]]:
    moment, signatures = "", []
    for part in header.split(","):
        key, _, value = part.strip().partition("=")
        if key == "t":
            moment = value
        elif key == "v1" and value.isascii():
            signatures.append(value)
    if not (moment.isascii() and moment.isdigit() and len(moment) <= 12) or not signatures:
        raise InvalidNotice(f"the {SIGNATURE} header is not t=SECONDS,v1=HEX")
    return moment, signatures
