"""The account of what one session holds of its gateway and wastes: bytes, calls, failed calls, capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from polar.config.settings import GatewaySettings
from polar.dialects.base import Refusal, RequestRefused
from polar.models.chat import Message

_GUARANTEED = 4
"""A session may always hold this part of its limit, whatever the others hold: one of the longest calls."""
_BYTES_PER_VALUE = 64
"""About what a JSON value takes in memory in addition to its text."""
_LITTLE = 1 << 16
"""Memory that is not worth a closer look at the values it is taken for."""
_QUOTE = ord('"')
_NOT_THE_AGENTS_FAULT = frozenset(
    {
        Refusal.UNKNOWN_KEY,
        Refusal.UNKNOWN_ROUTE,
        Refusal.SESSION_ENDED,
        Refusal.BUDGET_SPENT,
        Refusal.OVER_QUOTA,
        Refusal.ENGINE_DOWN,
        Refusal.INTERNAL,
    }
)
"""Refusals that are not counted as failed calls."""


class GatewayMemory:
    """Bytes of requests that all sessions of a gateway hold together."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.limit = settings.max_gateway_bytes_in_flight
        self.held = 0


class SessionQuota:
    """What a session holds now and has wasted so far, and the limits of both."""

    def __init__(self, settings: GatewaySettings, memory: GatewayMemory) -> None:
        self._settings = settings
        self._memory = memory
        self._held = 0
        self._requests = 0
        self._failed_calls = 0
        self.capture_bytes = 0
        """How long the session's capture is."""

    @contextmanager
    def request(self) -> Iterator[HeldRequest]:
        """Admit one more request while it is answered; RequestRefused where too many are in flight."""
        self.refuse_calls(1, in_flight=self._requests)
        self._requests += 1
        held = HeldRequest(self)
        try:
            yield held
        finally:
            self._requests -= 1
            self._take(-held.size)

    def count_failure(self, error: RequestRefused) -> None:
        """Count a request that got an error for an answer, unless the error was not the agent's doing."""
        self._failed_calls += error.refusal not in _NOT_THE_AGENTS_FAULT

    @property
    def spent(self) -> str | None:
        """Which limit is used up for good, in words; None if none is."""
        settings = self._settings
        if self._failed_calls >= settings.max_failed_calls:
            return f"{self._failed_calls} model calls have failed"
        if self.capture_bytes >= settings.max_capture_bytes:
            return f"its capture has {self.capture_bytes} bytes"
        return None

    def refuse_calls(self, count: int, *, in_flight: int) -> None:
        """RequestRefused if a session that has this many calls in flight may not begin `count` more."""
        limit = self._settings.max_calls_in_flight
        if count > limit:
            raise RequestRefused(
                Refusal.MALFORMED,
                f"{count} answers are asked for; one request may ask for {limit} at most.",
                field="n",
            )
        if in_flight + count > limit:
            raise _over_quota(f"{in_flight} calls of this session are in flight already, of {limit} at most")

    def grow(self, before: int, after: int) -> None:
        limit, more = self._settings.max_bytes_in_flight, after - before
        if after > limit:
            raise RequestRefused(
                Refusal.TOO_LARGE, f"The request takes {after} bytes of memory; {limit} are allowed."
            )
        if self._held + more > limit:
            raise _over_quota(f"the requests of this session in flight hold {self._held} bytes")
        is_full = self._memory.held + more > self._memory.limit
        if is_full and self._held + more > limit // _GUARANTEED:
            raise _over_quota("the requests of all sessions in flight hold too much memory")
        self._take(more)

    def _take(self, more: int) -> None:
        self._held += more
        self._memory.held += more


class HeldRequest:
    """The memory that one request holds, from its first byte until it is answered."""

    def __init__(self, quota: SessionQuota) -> None:
        self._quota = quota
        self.size = 0

    def hold(self, size: int) -> None:
        """Hold this many bytes from now on; RequestRefused if that is more than the quota allows."""
        self._quota.grow(self.size, size)
        self.size = size


def memory_of(document: bytes) -> int:
    """About how much memory a JSON document takes once it is parsed: many small values take far more
    than their text."""
    most = len(document) - len(document.translate(None, b"{[,"))
    is_little = _BYTES_PER_VALUE * most <= _LITTLE
    return len(document) + _BYTES_PER_VALUE * (most if is_little else values_in(document))


def memory_of_calls(messages: Iterable[Message]) -> int:
    """As `memory_of`, for the arguments of all tool calls in messages: strings, whose JSON is read too."""
    arguments = (call.arguments for message in messages for call in message.tool_calls)
    return sum(memory_of(text.encode("utf-8", "surrogatepass")) for text in arguments)


def values_in(document: bytes, step: int = 1 << 18) -> int:
    """How many values a JSON document has, about. What stands in a string is text alone, however much it
    looks like JSON."""
    values = 0
    is_in_string = is_escaped = False
    for start in range(0, len(document), step):
        piece = document[start : start + step]
        plain = (b"_" + piece[1:] if is_escaped else piece).replace(b"\\\\", b"__").replace(b'\\"', b"__")
        is_escaped = plain.endswith(b"\\")
        characters = np.frombuffer(plain, np.uint8)
        inside = (np.cumsum(characters == _QUOTE, dtype=np.uint8) + is_in_string) & 1
        is_in_string = bool(inside[-1])
        values += sum(int(np.count_nonzero((characters == mark) & (inside == 0))) for mark in b"{[,")
    return values


def _over_quota(why: str) -> RequestRefused:
    return RequestRefused(Refusal.OVER_QUOTA, f"Too much at once: {why}. Try again later.")
