"""Lets a retried request follow the generation of its first attempt; any other request gets its own.

Sampling the same prompt several times at once is ordinary work (best-of-n, sub-agents), so an equal body
proves nothing. A request is a retry where it says so, or where the answer to an equal one could not be
delivered because its client was gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polar.dialects.base import Answer
from polar.rendering.base import MessageDelta

if TYPE_CHECKING:
    from polar.gateway.call import ModelCall

RETRY_COUNT = "x-stainless-retry-count"
"""The header in which SDKs say how many times they have sent this very request before."""
IDEMPOTENCY_KEY = "Idempotency-Key"
"""The header whose value a client repeats when it sends the same request again."""

Fingerprint = Hashable
"""What is compared of two requests: path, idempotency key, and the body's length and Python's own keyed hash,
which takes a tenth of the time of a digest and is compared only within this process and session."""
ChoiceDelta = tuple[int, MessageDelta]
"""Which call of its request a delta comes from, and the delta."""


class InFlight:
    """What one request samples, and the clients that wait for it; it is aborted when all of them have left.

    Each sample is a call of its own. One that fails ends the others: the request cannot be answered then.
    """

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self.calls = calls
        self.finished_at: float | None = None
        """Monotonic time at which the answer was complete; None before that, and if it failed."""
        self.is_delivered = False
        """Whether a client was sent the whole answer."""
        self._deltas: list[ChoiceDelta] = []
        self._accepted = 0
        self._news = asyncio.Event()
        """Wakes clients with every delta; each stands for one piece of news."""
        self._followers = 0
        self._is_aborted = self._is_failed = False
        self.tasks = [asyncio.create_task(self._run(call, choice)) for choice, call in enumerate(calls)]
        for task in self.tasks:
            task.add_done_callback(self._notice_end)

    @property
    def is_open(self) -> bool:
        """Whether it is sampling: not once all clients have left, although it may still be ending then."""
        return not self._is_done and not self._is_aborted

    @property
    def is_undelivered(self) -> bool:
        """Whether the answer is complete and every client left before it was sent."""
        return self.finished_at is not None and not self.is_delivered and not self._followers

    @contextmanager
    def followed(self) -> Iterator[None]:
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._is_aborted = not self._is_done
                self._abort()

    async def accepted(self) -> None:
        """Return once the prompt is accepted; raise what stands against it."""
        while self._accepted < len(self.calls):
            if self._is_done:
                self._results()
                return
            await self._news.wait()

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Every delta from the first on, as they come: all that are new since the last look."""
        position = 0
        while True:
            if new := self._deltas[position:]:
                position += len(new)
                yield new
            elif self._is_done:
                return
            else:
                await self._news.wait()

    async def answers(self) -> list[Answer]:
        """The whole answers, in the order of the calls; raises what ended them instead."""
        await asyncio.wait(self.tasks)
        return self._results()

    @property
    def _is_done(self) -> bool:
        return all(task.done() for task in self.tasks)

    def _results(self) -> list[Answer]:
        # One that failed tells more than those that were aborted for it.
        whole = [task.result() for task in self.tasks if not task.cancelled()]
        if len(whole) < len(self.tasks):
            raise self.calls[0].session.why_over()
        return whole

    async def _run(self, call: ModelCall, choice: int) -> Answer:
        def append(delta: MessageDelta) -> None:
            self._deltas.append((choice, delta))
            self._wake()

        await call.prepare()
        self._accepted += 1
        self._wake()
        return await call.run(append)

    def _abort(self) -> None:
        for task in self.tasks:
            task.cancel()

    def _notice_end(self, task: asyncio.Task[Answer]) -> None:
        # Asking for the exception also tells asyncio that somebody has seen it.
        if task.cancelled() or task.exception() is not None:
            self._is_failed, self.finished_at = True, None
            self._abort()
        elif self._is_done and not self._is_failed:
            self.finished_at = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news.clear()


class RequestCoalescer:
    """The generations of one session, by the request that began them."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._by_fingerprint: dict[Fingerprint, list[InFlight]] = {}
        self._swept_at = time.monotonic()

    def join(self, fingerprint: Fingerprint, headers: Mapping[str, str]) -> InFlight | None:
        """The generation that this request retries; None if it is not known to retry one."""
        self._remove_expired()
        same = [known for known in self._by_fingerprint.get(fingerprint, ()) if self._is_current(known)]
        if _says_first_attempt(headers):
            return None
        undelivered = next((known for known in same if known.is_undelivered), None)
        if undelivered is not None or not _says_retry(headers):
            return undelivered
        # Of several equal requests nothing says which one is sent again.
        return same[0] if len(same) == 1 else None

    def launch(self, calls: Sequence[ModelCall], fingerprint: Fingerprint) -> InFlight:
        """Begin the calls of a request that retries none."""
        launched = InFlight(calls)
        self._by_fingerprint.setdefault(fingerprint, []).append(launched)
        open_calls = calls[0].session.calls
        for task in launched.tasks:
            open_calls.add(task)
            task.add_done_callback(open_calls.discard)
        return launched

    def forget(self) -> None:
        """Drop every answer; those who wait for one still get it."""
        self._by_fingerprint.clear()

    def _is_current(self, known: InFlight) -> bool:
        horizon = time.monotonic() - self._retry_seconds
        return known.is_open or (known.finished_at is not None and known.finished_at > horizon)

    def _remove_expired(self) -> None:
        """Only now and then: a busy session does not look through all its generations on every call."""
        now = time.monotonic()
        if now - self._swept_at < self._retry_seconds:
            return
        self._swept_at = now
        current = {
            asked: list(filter(self._is_current, same)) for asked, same in self._by_fingerprint.items()
        }
        self._by_fingerprint = {asked: same for asked, same in current.items() if same}


def fingerprint(path: str, body: bytes, headers: Mapping[str, str]) -> Fingerprint:
    """Equal for requests that ask for exactly the same under the same idempotency key, if they have one."""
    return path, headers.get(IDEMPOTENCY_KEY, ""), len(body), hash(body)


def _says_first_attempt(headers: Mapping[str, str]) -> bool:
    return headers.get(RETRY_COUNT) == "0" and IDEMPOTENCY_KEY not in headers


def _says_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get(RETRY_COUNT, "")
    return IDEMPOTENCY_KEY in headers or (count.isdecimal() and count.strip("0") != "")
