"""The gate before every route: who may pass, how much they may carry, and what is written down of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polar.errors import PolarError
from polar.rollout.access import BodyLimits, Rule, rule_for, words
from polar.rollout.keys import Holder, Keys
from polar.rollout.problems import problem
from polar.store.audit import Audit, Noted
from polar.telemetry.access import is_known_host, is_local

log = logging.getLogger(__name__)

MOST_REFUSALS = 20
REFUSALS_SECONDS = 60.0
"""So many refusals of one kind are written down in so long; the rest is counted with the next."""

MOST_KINDS = 10_000


@dataclass(slots=True)
class Caller:
    """Who asks, and for what: told to routes as `request.state.caller`."""

    rule: Rule
    address: str | None
    holder: Holder | None = None
    about: str | None = None
    """What the request is about: the id in its path, or what its route says."""

    def noted(self, status: int, detail: str | None = None, *, about: str | None = None) -> Noted:
        return Noted(
            action=self.rule.action,
            status=status,
            actor=self.holder.name if self.holder else None,
            role=self.holder.role if self.holder else None,
            address=self.address,
            object=about or self.about,
            detail=detail,
        )


def caller_of(request: Request) -> Caller:
    """Who made a request that the gate has let through."""
    caller: Caller = request.state.caller
    return caller


class Gate:
    """Checks token and role before anything of the request is read, then counts what is."""

    def __init__(
        self, app: ASGIApp, keys: Keys, audit: Audit, limits: BodyLimits, hosts: Collection[str] | None
    ) -> None:
        self._app = app
        self._keys = keys
        self._audit = audit
        self._limits = limits
        self._hosts = hosts
        self._refusals = _Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rule, about = rule_for(scope["method"], scope["path"])
        caller = Caller(rule, scope["client"][0] if scope.get("client") else None, about=about)
        # An answer that is written down leaves after its entry is stored.
        answer = _Answer(send, caller, lambda status, detail: self._note(caller, status, detail))
        headers = Headers(scope=scope)
        if self._hosts is not None and not is_known_host(headers.get("host"), self._hosts):
            await _misdirected(headers["host"])(scope, receive, send)
            return
        try:
            caller.holder = await self._holder(headers) if rule.roles is not None else None
        except PolarError as error:
            await problem(503, "unavailable", str(error))(scope, receive, send)
            return
        if (refusal := self._refusal(caller, headers)) is not None:
            await refusal(scope, receive, answer)
            return
        limit = self._limits.of(rule.body)
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            await problem(413, "too_large", f"the body may have at most {limit} bytes")(
                scope, receive, answer
            )
            return
        scope.setdefault("state", {})["caller"] = caller
        try:
            await self._app(scope, _counted(receive, limit), answer)
        except Exception:
            if rule.is_audited:
                await self._note(caller, 500, "the server failed on this request; its log says why")
            raise

    async def _holder(self, headers: Headers) -> Holder | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            return None
        return await self._keys.holder(given.strip())

    def _refusal(self, caller: Caller, headers: Headers) -> ASGIApp | None:
        """What is answered to those who may not pass."""
        rule, holder = caller.rule, caller.holder
        if rule.roles is None or (rule.is_open_here and is_local(caller.address, headers)):
            return None
        needed = f"{rule.action} needs a token of the role {words(rule.roles)}"
        if holder is None:
            return problem(
                401, "unauthorized", f"{needed}; none that is known was given", {"WWW-Authenticate": "Bearer"}
            )
        if holder.role not in rule.roles:
            return problem(403, "forbidden", f"{needed}; {holder.name!r} has the role {holder.role.value}")
        return None

    async def _note(self, caller: Caller, status: int, detail: str | None) -> None:
        if status >= 400:
            kind = caller.holder.name if caller.holder else caller.address or "", caller.rule.action, status
            left_out = self._refusals.left_out(kind)
            if left_out is None:
                return
            if left_out:
                detail = f"{detail or ''} (and {left_out} more like it before)".strip()
        try:
            await self._audit.append([caller.noted(status, detail)])
        except PolarError as error:
            log.error("%s by %s could not be written down: %s", caller.rule.action, caller.address, error)


class _Answer:
    """Passes an answer on, once what it says was written down; of a problem its reason is read first."""

    def __init__(
        self, send: Send, caller: Caller, note: Callable[[int, str | None], Awaitable[None]]
    ) -> None:
        self._send = send
        self._rule = caller.rule
        self._note = note
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._failed(message["status"]):
                self._start = message
                return
            if message["status"] < 400 and self._rule.is_audited:
                await self._note(message["status"], None)
        elif self._start is not None and message["type"] == "http.response.body":
            start, self._start = self._start, None
            await self._note(start["status"], _reason(message.get("body", b"")))
            await self._send(start)
        await self._send(message)

    def _failed(self, status: int) -> bool:
        """Whether it is to be written down that something was not done."""
        if status in (401, 403):
            return True
        # A server that cannot work cannot write either: that is told only of what people asked for.
        end = 600 if self._rule.is_audited else 500
        return 400 <= status < end and self._rule.method != "GET"


def _reason(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(slots=True)
class _Refusals:
    """Keeps whoever is refused again and again from filling the log."""

    clock: Callable[[], float] = time.monotonic
    _seen: dict[tuple[str, str, int], tuple[float, int]] = field(default_factory=dict)
    """Kind → since when it is counted, and how many there were."""

    def left_out(self, kind: tuple[str, str, int]) -> int | None:
        """How many were left out before this one; None: leave this one out too."""
        now = self.clock()
        since, count = self._seen.get(kind, (now, 0))
        if now - since > REFUSALS_SECONDS:
            left_out = max(count - MOST_REFUSALS, 0)
            self._seen[kind] = now, 1
            return left_out
        if len(self._seen) >= MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = since, count + 1
        return 0 if count < MOST_REFUSALS else None


def _misdirected(host: str) -> ASGIApp:
    """To a browser that was led here under a foreign name, or by one that nobody told this server."""
    known = f"this server does not answer under the name {host!r}; its owner can add it to server.hosts"
    return problem(421, "misdirected", known)


def _counted(receive: Receive, limit: int) -> Receive:
    """A body without a declared length is refused once it has become too long."""
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise HTTPException(413, f"the body may have at most {limit} bytes")
        return message

    return counted
