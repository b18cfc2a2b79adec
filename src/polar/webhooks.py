"""Signing webhooks, and checking them where they are received: `polar.webhooks.verify` is for receivers.

A notice comes with `Polar-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256 of `SECONDS.BODY`
under the secret that server and receiver share. It comes at least once: a receiver answers 2xx when it has
handled one, remembers its id, and answers 2xx without handling it when that id comes again.
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
"""Carries the notice's id too, for logs; only the id inside the signed body counts."""

MAX_AGE_SECONDS = 300.0


class InvalidNotice(PolarError):
    """A notice that is not from the server, or not from now: answer 4xx, and do nothing."""


class ReplayedNotice(PolarError):
    """A notice that was handled before: answer 2xx, so that it does not come again, and do nothing."""


def sign(secret: str, body: bytes, at: float) -> str:
    """The signature of a body at a moment."""
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
    """The notice in a request; InvalidNotice if it is forged or old, ReplayedNotice if its id is in `seen`.

    While the secret is changed, give the old and the new one. Add the notice's id to `seen` (a set, a
    `Recent`, a table) once it is handled, not before: what fails in between comes again.
    """
    moment, signatures = _parsed(_header(headers, SIGNATURE))
    secrets = (secret,) if isinstance(secret, str) else tuple(secret)
    expected = [_digest(one, moment, body) for one in secrets]
    if not any(hmac.compare_digest(wanted, given) for wanted in expected for given in signatures):
        raise InvalidNotice("the signature is not that of this body", hint="check the secret on both sides")
    age = (time.time() if now is None else now) - int(moment)
    if abs(age) > max_age_seconds:
        raise InvalidNotice(f"the signature is {age:.0f} s old", hint="check the clocks of both machines")
    try:
        notice = Notice.model_validate_json(body)
    except ValueError:
        raise InvalidNotice(
            "the body is no notice", hint="server and receiver should be the same version"
        ) from None
    if notice.id in seen:
        raise ReplayedNotice(f"notice {notice.id} was handled before")
    return notice


class Recent:
    """The ids handled last: enough of a memory for one process, since older notices are refused by their age.

    The server sends a notice until it is taken, so a receiver that must not handle one twice, also after a
    restart, keeps ids in a table instead.
    """

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
    raise InvalidNotice(f"there is no {name} header")


def _parsed(header: str) -> tuple[str, list[str]]:
    """The moment and the signatures of a header."""
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
