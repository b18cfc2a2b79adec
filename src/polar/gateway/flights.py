"""Generations in the air: identical requests of a session share one, and a retry gets what was delivered."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from polar.dialects.base import Answer
from polar.gateway.call import ModelCall, Send
from polar.gateway.session import Session, session_ended
from polar.rendering.base import MessageDelta

RETRY_COUNTER = "x-stainless-retry-count"
"""The header in which SDKs say how often they have sent this very request before."""

Work = Callable[[ModelCall, Callable[[], None], Send], Awaitable[Answer]]
"""Carries a call out: calls the second argument once the prompt is accepted, the third for each delta."""


class Flight:
    """One generation and whoever waits for it. It ends early when the last of them has left."""

    def __init__(self, call: ModelCall, work: Work) -> None:
        self.call = call
        self.landed_at: float | None = None
        """Monotonic time at which the answer was whole; None while it is not, or if it failed."""
        self._deltas: list[MessageDelta] = []
        self._is_accepted = False
        self._watching: list[asyncio.Future[None]] = []
        """Those who want to know of everything that happens; the others, only of the end."""
        self._waiting: list[asyncio.Future[None]] = []
        self._followers = 0
        self._is_given_up = False
        self.task = asyncio.create_task(self._fly(work))
        self.task.add_done_callback(self._notice_end)

    @property
    def is_open(self) -> bool:
        """Whether it may still be joined: one that everybody has left is ending, not waiting for a retry."""
        return not self.task.done() and not self._is_given_up

    @contextmanager
    def followed(self) -> Iterator[None]:
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._is_given_up = not self.task.done()
                self.task.cancel()

    async def accepted(self) -> None:
        """Return once the prompt is accepted; raise what stands against it."""
        while not self._is_accepted:
            if self.task.done():
                self._result()
                return
            await _woken(self._watching)

    async def deltas(self) -> AsyncIterator[list[MessageDelta]]:
        """Every delta from the first on, as they come: all that are new since the last look."""
        position = 0
        while True:
            if new := self._deltas[position:]:
                position += len(new)
                yield new
            elif self.task.done():
                return
            else:
                await _woken(self._watching)

    async def answer(self) -> Answer:
        """The whole answer; raises what ended the generation instead."""
        while not self.task.done():
            await _woken(self._waiting)
        return self._result()

    def _result(self) -> Answer:
        if self.task.cancelled():
            raise self.call.session.over() or session_ended()
        return self.task.result()

    async def _fly(self, work: Work) -> Answer:
        return await work(self.call, self._accept, self._append)

    def _accept(self) -> None:
        self._is_accepted = True
        _wake(self._watching)

    async def _append(self, delta: MessageDelta) -> None:
        self._deltas.append(delta)
        _wake(self._watching)

    def _notice_end(self, task: asyncio.Task[Answer]) -> None:
        # Asking for the exception also tells asyncio that somebody has seen it.
        if not task.cancelled() and task.exception() is None:
            self.landed_at = time.monotonic()
        _wake(self._watching)
        _wake(self._waiting)


class Flights:
    """The flights of one session, by what was asked."""

    def __init__(self, session: Session, replay_seconds: float) -> None:
        self._session = session
        self._replay_seconds = replay_seconds
        self._by_fingerprint: dict[bytes, Flight] = {}
        self._swept_at = time.monotonic()

    def join(self, fingerprint: bytes, headers: Mapping[str, str]) -> Flight | None:
        """The flight an identical request is to follow, if there is one.

        A request that says it was never sent before is none, however much it looks like another:
        two sub-agents may well ask the same at once.
        """
        self._forget_old()
        flight = None if _says_first_try(headers) else self._by_fingerprint.get(fingerprint)
        return flight if flight is not None and self._may_join(flight) else None

    def launch(self, call: ModelCall, work: Work, fingerprint: bytes) -> Flight:
        flight = Flight(call, work)
        self._by_fingerprint[fingerprint] = flight
        self._session.calls.add(flight.task)
        flight.task.add_done_callback(self._session.calls.discard)
        return flight

    def _may_join(self, flight: Flight) -> bool:
        horizon = time.monotonic() - self._replay_seconds
        return flight.is_open or (flight.landed_at is not None and flight.landed_at > horizon)

    def _forget_old(self) -> None:
        """Now and then, so that a busy session does not look through all its flights with every call."""
        now = time.monotonic()
        if now - self._swept_at < self._replay_seconds:
            return
        self._swept_at = now
        kept = {asked: flight for asked, flight in self._by_fingerprint.items() if self._may_join(flight)}
        self._by_fingerprint = kept


async def _woken(sleepers: list[asyncio.Future[None]]) -> None:
    sleeper = asyncio.get_running_loop().create_future()
    sleepers.append(sleeper)
    await sleeper


def _wake(sleepers: list[asyncio.Future[None]]) -> None:
    for sleeper in sleepers:
        if not sleeper.done():
            sleeper.set_result(None)
    sleepers.clear()


def fingerprint(path: str, body: bytes) -> bytes:
    """The same for requests that ask for exactly the same."""
    return hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()


def _says_first_try(headers: Mapping[str, str]) -> bool:
    return headers.get(RETRY_COUNTER) == "0"
