"""The sessions a gateway serves, found by their keys; those that ended are remembered for a while."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeVar

from polar.config.settings import GatewaySettings
from polar.dialects.base import Refusal, RequestRefused
from polar.errors import Conflict, NotFound
from polar.gateway.quota import GatewayMemory, SessionQuota
from polar.gateway.request_coalescer import RequestCoalescer
from polar.gateway.session import Session, SessionGrant, Watch, session_ended
from polar.models.session import Progress

K = TypeVar("K")
V = TypeVar("V")

_REMEMBERED = 1_000
"""How many ended sessions are remembered, to answer 410 instead of 401 and to report progress."""


class Sessions:
    """Each key opens only its own session."""

    def __init__(self, settings: GatewaySettings, watch: Watch) -> None:
        self._settings = settings
        self._memory = GatewayMemory(settings)
        self._watch = watch
        self._by_key: dict[bytes, Session] = {}
        self._open: dict[str, Session] = {}
        self._coalescers: dict[str, RequestCoalescer] = {}
        self._ended_keys: OrderedDict[bytes, None] = OrderedDict()
        self._ended: OrderedDict[str, Progress] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        """Those that are open now."""
        return iter(tuple(self._open.values()))

    def open(self, grant: SessionGrant, *, is_paused: bool) -> None:
        if grant.session_id in self._open:
            raise Conflict(f"session {grant.session_id} is open already")
        quota = SessionQuota(self._settings, self._memory)
        session = Session(grant, quota, self._watch, is_paused=is_paused)
        self._coalescers[grant.session_id] = RequestCoalescer(session, self._settings.retry_seconds)
        self._open[grant.session_id] = session
        self._by_key[_digest(grant.key)] = session

    @property
    def load(self) -> tuple[int, int]:
        """How many sessions are open, and how many of their calls."""
        return len(self._open), sum(len(session.calls) for session in self._open.values())

    def get(self, session_id: str) -> Session:
        session = self._open.get(session_id)
        if session is None:
            raise NotFound(f"session {session_id} is not open")
        return session

    def coalescer(self, session: Session) -> RequestCoalescer:
        """The coalescer of a session; RequestRefused if it was closed since its key was read."""
        coalescer = self._coalescers.get(session.grant.session_id)
        if coalescer is None or session.ended:  # the id may be open again, under another key
            raise session_ended()
        return coalescer

    def progress(self, session_id: str) -> Progress:
        """What the session has done so far; nothing for one that was never opened."""
        session = self._open.get(session_id)
        return session.progress if session else self._ended.get(session_id, Progress())

    def of_key(self, key: str | None) -> Session:
        """The open session that a client's key belongs to; RequestRefused if there is none."""
        if key is not None:
            digest = _digest(key)
            session = self._by_key.get(digest)
            if session is not None and not session.ended:
                return session
            if session is not None or digest in self._ended_keys:
                raise session_ended()
        what = "No API key was given." if key is None else "Incorrect API key provided."
        raise RequestRefused(Refusal.UNKNOWN_KEY, f"{what} Use the key of a running Polar session.")

    async def close(self, session_id: str) -> None:
        """Abort what is in flight; later calls are told that the session has ended."""
        session = self._open.get(session_id)
        if session is None:
            return
        try:
            await session.close()
        finally:
            self._open.pop(session_id, None)
            self._coalescers.pop(session_id, None)
            digest = _digest(session.grant.key)
            self._by_key.pop(digest, None)
            _remember(self._ended_keys, digest, None)
            _remember(self._ended, session_id, session.progress)


def _digest(key: str) -> bytes:
    """What a key is looked up by: how long that takes tells nothing of any key."""
    # A header may hold any bytes; those that are no text come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
