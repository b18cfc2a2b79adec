"""Access: the role that each route needs, who asks with whose token, and the audit lines that tell of it.

A route says who may use it as a dependency: `dependencies=[allow(TRAINERS)]`. FastAPI reads a request's body
before it asks dependencies; `GuardedRoute` checks before that, and refuses to be made without a role.
"""

from __future__ import annotations

import logging
import secrets
import stat
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.openapi.models import HTTPBearer
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from starlette.types import Message, Receive

from polar.errors import PolarError
from polar.files import atomic_file, locked
from polar.models.access import TokenRole
from polar.rollout.long_poll import Gone
from polar.rollout.problems import RESPONSES, problem_of
from polar.store.tokens import OWNER, StoredToken, TokenStore, digest, id_in, new_token, without_secrets
from polar.telemetry.page import is_local

audit = logging.getLogger("polar.audit")

PREFIX = "/api/v1"

ANYONE: frozenset[TokenRole] = frozenset()
"""Also without a token: what shows no task and no secret."""
READERS = frozenset({TokenRole.ADMIN, TokenRole.TRAINER, TokenRole.READ_ONLY})
TRAINERS = frozenset({TokenRole.ADMIN, TokenRole.TRAINER})
NODES = frozenset({TokenRole.ADMIN, TokenRole.NODE})
ADMINS = frozenset({TokenRole.ADMIN})


SMALL = 4 << 20
"""Bytes of a body with a few fields, or with what a node says of its sessions."""
LARGE = 64 << 20
"""Bytes of tasks with their files, which are read into memory as a whole."""
STREAMED = 3 << 30
"""Bytes that go to the disk as they come: a session may have a GiB of recording and one of artifacts."""


@dataclass(frozen=True)
class Access:
    """What a route allows."""

    roles: frozenset[TokenRole]
    max_bytes: int = SMALL
    """How large a request's body may be."""
    is_audited: bool = True
    """Whether a change is logged also when it was done; one that was refused always is."""
    is_open_here: bool = False
    """Asked from this machine itself it needs no token."""

    async def __call__(self, request: Request) -> None:
        assert caller_of(request).access is self, "the route is not a GuardedRoute"


class TokenAccess(Access, SecurityBase):
    """What a route allows that needs a token, as the OpenAPI document says."""

    model = HTTPBearer()
    scheme_name = "token"


def allow(
    roles: frozenset[TokenRole], max_bytes: int = SMALL, *, audited: bool = True, open_here: bool = False
) -> Any:
    """The dependency by which a route says who may use it, and how much they may send."""
    kind = TokenAccess if roles else Access
    return Depends(kind(roles, max_bytes, audited, open_here))


def names_of(roles: Iterable[TokenRole]) -> str:
    """Roles as a person reads them."""
    return " or ".join(role.value for role in TokenRole if role in set(roles)) or "anyone"


@dataclass(slots=True)
class Caller:
    """Who makes a request, and for what; routes find it as `request.state.caller`."""

    action: str
    """The operation's name, as in the OpenAPI document."""
    access: Access
    address: str | None
    holder: Holder | None = None
    about: str | None = None
    """What the request is about: the id in its path, or what its route says."""

    def log(self, status: int, reason: str | None = None, *, about: str | None = None) -> None:
        """Write an audit line: who, from where, what, about what, and how it was answered."""
        fields = {
            "actor": self.holder.name if self.holder else None,
            "role": self.holder.role.value if self.holder else None,
            "address": self.address,
            "action": self.action,
            "object": _one_line(about or self.about),
            "status": status,
            "reason": _one_line(reason),
        }
        # Nodes ask all the time, and `polar serve` shows this level.
        done = logging.DEBUG if self.holder and self.holder.role is TokenRole.NODE else logging.INFO
        audit.log(
            done if status < 400 else logging.WARNING,
            "%s%s by %s from %s: %s",
            self.action,
            f" {fields['object']}" if fields["object"] else "",
            f"{fields['actor']} ({fields['role']})" if self.holder else "nobody known",
            self.address,
            f"{status} {fields['reason']}" if reason else status,
            extra={"fields": fields},
        )


def caller_of(request: Request) -> Caller:
    """Who made a request that reached its route."""
    caller: Caller = request.state.caller
    return caller


def gone(request: Request) -> Gone:
    """For a request that takes its time: whether its caller has hung up, or its token opens the route no
    more."""

    async def is_gone() -> bool:
        if await request.is_disconnected():
            return True
        try:
            await _check(request, replace(caller_of(request)))
        except HTTPException:
            return True
        return False

    return is_gone


def guarded(tag: str) -> APIRouter:
    """A router whose routes each say which role they need."""
    return APIRouter(prefix=PREFIX, responses=RESPONSES, tags=[tag], route_class=GuardedRoute)


class GuardedRoute(APIRoute):
    """Checks token, role and length before the body is read, and logs what became of the request."""

    access: Access

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.access = _access_in(path, options.get("dependencies") or ())
        # Whoever generates a client sees in the document what each operation needs.
        roles = [role.value for role in TokenRole if role in self.access.roles]
        options["openapi_extra"] = {**(options.get("openapi_extra") or {}), "x-roles": roles}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            about = next(iter(request.path_params.values()), None)
            caller = Caller(
                self.name, self.access, _address(request), about=None if about is None else str(about)
            )
            request.state.caller = caller
            is_change = request.method != "GET"
            try:
                await _check(request, caller)
                receive = _bounded(request, self.access.max_bytes)
                response = await handle(Request(request.scope, receive))
            except Exception as error:
                status, problem = problem_of(error)
                # A server that cannot work says so in its own lines, but for what people asked for.
                if status in (401, 403) or (is_change and (status < 500 or self.access.is_audited)):
                    caller.log(status, problem.error)
                raise
            if is_change and self.access.is_audited:
                caller.log(response.status_code)
            return response

        return guarded


def _access_in(path: str, dependencies: Iterable[Dependency]) -> Access:
    for dependency in dependencies:
        if isinstance(dependency.dependency, Access):
            return dependency.dependency
    raise TypeError(f"the route {path} does not say which role it needs")


async def _check(request: Request, caller: Caller) -> None:
    """HTTPException unless the request brings a token of a role that the route allows."""
    access = caller.access
    if not access.roles or (access.is_open_here and is_local(caller.address, request.headers)):
        return
    authenticator: Authenticator = request.app.state.authenticator
    caller.holder = await authenticator.holder(request.headers.get("authorization"))
    needed = f"{caller.action} needs a token of the role {names_of(access.roles)}"
    if caller.holder is None:
        raise HTTPException(
            401, f"{needed}; it is missing, invalid or expired", headers={"WWW-Authenticate": "Bearer"}
        )
    if caller.holder.role not in access.roles:
        raise HTTPException(403, f"{needed}; {caller.holder.name!r} has the role {caller.holder.role.value}")


def _bounded(request: Request, limit: int) -> Receive:
    """HTTPException for a body that says it is too long, or without saying so becomes it."""
    too_long = HTTPException(413, f"the body may have at most {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        message = await request.receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise too_long
        return message

    return receive


def _address(request: Request) -> str | None:
    """Who asks, or for whom a proxy on this machine says that it asks, where that is an address."""
    address = request.client.host.partition("%")[0] if request.client else ""
    try:
        ip_address(address)
    except ValueError:
        return None
    return address


def _one_line(text: str | None) -> str | None:
    """What came from outside, so that it cannot pass for a line of its own, and without secrets."""
    if not text:
        return text
    shown = without_secrets(text)[:1_000]
    return shown if shown.isprintable() else repr(shown)


log = logging.getLogger(__name__)

MIN_TOKEN_LENGTH = 16

CACHE_SECONDS = 1.0
"""How long another server's revocation may take to be known here; our own is known at once."""

CACHE_SIZE = 1_000


@dataclass(frozen=True, slots=True)
class Holder:
    """Who brings a token."""

    name: str
    role: TokenRole


class Authenticator:
    """Finds the holder of a token; every comparison with a secret takes the same time, equal or not."""

    def __init__(self, token: str, tokens: TokenStore) -> None:
        self._owner = token.encode()
        self._tokens = tokens
        self._cache: dict[str, tuple[StoredToken, float]] = {}
        self._of_process: dict[str, StoredToken] = {}

    def issue(self, name: str, role: TokenRole) -> str:
        """A token for a part of this process: it ends with it and is stored nowhere."""
        id, token = new_token()
        self._of_process[id] = StoredToken(name, role, digest(token), expires_at=None)
        return token

    def clear_cache(self) -> None:
        """Look every token up anew, after one was revoked."""
        # What is being looked up just now is noted in the old one.
        self._cache = {}

    async def holder(self, authorization: str | None) -> Holder | None:
        """Who brings the bearer token of this header; None: nobody that is known."""
        scheme, _, given = (authorization or "").partition(" ")
        token = given.strip()
        if scheme.lower() != "bearer" or not token:
            return None
        if secrets.compare_digest(token.encode(), self._owner):
            return Holder(OWNER, TokenRole.ADMIN)
        id = id_in(token)
        if id is None:
            return None
        stored = self._of_process.get(id) or await self._stored(id)
        if stored is None or not secrets.compare_digest(stored.digest, digest(token)):
            return None
        return None if self._tokens.has_expired(stored) else Holder(stored.name, stored.role)

    async def _stored(self, id: str) -> StoredToken | None:
        cache = self._cache
        found, expires = cache.get(id, (None, 0.0))
        if found is not None and expires > time.monotonic():
            return found
        found = await self._tokens.find(id)
        if found is None:
            cache.pop(id, None)
            return None
        if len(cache) >= CACHE_SIZE:
            cache.clear()
        cache[id] = found, time.monotonic() + CACHE_SECONDS
        return found


def load_or_create_token(data_dir: Path) -> str:
    """The token of this data directory; processes that ask at once get the same one."""
    return load_or_create_secret(data_dir / "token")


def load_or_create_secret(path: Path) -> str:
    """The secret in this file, made if there is none."""
    try:
        if not path.exists():
            _create(path)
        return _read(path)
    except OSError as error:
        raise PolarError(f"the token file {path} cannot be used: {error.strerror}") from None


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            with atomic_file(path, mode=0o600, durable=True) as part:
                part.write_text(secrets.token_urlsafe(32) + "\n")


def _read(path: Path) -> str:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        log.warning("%s could be read by others (mode %o); setting mode 600", path, mode)
        path.chmod(0o600)
    token = path.read_text().strip()
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii():
        raise PolarError(
            f"{path} does not hold a token of at least {MIN_TOKEN_LENGTH} characters",
            hint="delete it; a new one is made at the next start",
        )
    return token
