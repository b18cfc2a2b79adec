"""Rolls planned tasks out on a rollout server: what has ended is found, what failed is tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from polar import errors
from polar.app.datagen.plan import PlannedTask
from polar.app.datagen.progress import Tally
from polar.client import AsyncClient, Client
from polar.errors import PolarError, Unavailable
from polar.models.session import SessionResult, SessionStatus
from polar.recordings.recording import decode
from polar.tasksets.expressions import CannotJudge, Condition, session_names
from polar.tasksets.sft import Attempt, Group

log = logging.getLogger(__name__)

MOST_TASKS_AT_ONCE = 64
"""Each is waited for on a connection of its own."""


@dataclass(slots=True)
class Generation:
    """One run over a plan. The server keeps all that has come of it; here it is only counted."""

    plan: Sequence[PlannedTask]
    accept: Condition
    retries: int
    tally: Tally
    changed: Callable[[], None] = lambda: None
    """Called whenever the tally has changed."""

    async def run(self, client: AsyncClient, at_once: int) -> None:
        """Run until every sample of every task has ended, with at most `at_once` tasks in flight."""
        waiting = iter(self.plan)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, MOST_TASKS_AT_ONCE, len(self.plan))):
                    group.create_task(self._work(client, waiting))
        except ExceptionGroup as errors:
            # All of them talk to one server: what one says of it is what the others would.
            if isinstance(first := errors.exceptions[0], PolarError):
                raise first from None
            raise

    async def _work(self, client: AsyncClient, waiting: Iterator[PlannedTask]) -> None:
        for planned in waiting:
            async for result, was_found in _results(client, planned):
                if self._is_to_retry(result, 0):
                    result, was_found = await self._retried(client, planned, result)
                is_accepted = self._is_accepted(planned, result)
                self.tally.add(result, is_accepted=is_accepted, was_found=was_found)
                self.changed()

    async def _retried(
        self, client: AsyncClient, planned: PlannedTask, failed: SessionResult
    ) -> tuple[SessionResult, bool]:
        """What came of a failed sample in the end, and whether all of it had ended before."""
        sample, last, was_found, retry = failed.sample, failed, True, 0
        while self._is_to_retry(last, retry):
            retry += 1
            log.info("session %s failed and is tried again: %s", last.session_id, last.error)
            async for result, found_again in _results(client, planned.again(sample, retry)):
                last, was_found = result.model_copy(update={"sample": sample}), found_again
            self.tally.retried += not was_found
        return last, was_found

    def _is_to_retry(self, result: SessionResult, retries: int) -> bool:
        return result.status is SessionStatus.FAILED and retries < self.retries

    def _is_accepted(self, planned: PlannedTask, result: SessionResult) -> bool:
        if result.status is not SessionStatus.COMPLETED:
            return False
        try:
            return self.accept(session_names(result, planned.name, planned.spec.metadata))
        except CannotJudge:
            return False

    def groups(self, client: Client) -> Iterator[Group]:
        """What has ended by now, in the order of the plan, read from the server a task at a time."""
        for planned in self.plan:
            results = [self._last(client, planned, result) for result in client.results([planned.spec.id])]
            if results:
                results.sort(key=lambda result: result.sample)
                spec = planned.spec
                yield Group(planned.name, spec.harness.name, spec.metadata, _attempts(client, results))

    def _last(self, client: Client, planned: PlannedTask, result: SessionResult) -> SessionResult:
        """What came of a sample in the end, so far."""
        sample, retry = result.sample, 0
        while self._is_to_retry(result, retry):
            retry += 1
            for later in client.results([planned.again(sample, retry).spec.id]):
                result = later.model_copy(update={"sample": sample})
        return result


async def _results(client: AsyncClient, planned: PlannedTask) -> AsyncIterator[tuple[SessionResult, bool]]:
    """The results of a task as its sessions end, each with whether it had ended before; once each."""
    seen: set[str] = set()
    found: int | None = None
    failures = errors.RESTART.pauses()
    while True:
        try:
            view = await client.submit(planned.spec)
            if found is None:
                found = sum(count for status, count in view.sessions.items() if status.ended)
            async for result in client.results([planned.spec.id], follow=True):
                failures = errors.RESTART.pauses()
                if result.session_id not in seen:
                    seen.add(result.session_id)
                    yield result, len(seen) <= found
            return
        except Unavailable as error:
            pause = next(failures, None)
            if pause is None:
                raise
            log.warning("%s; asking again in %g s", error, pause)
            await asyncio.sleep(pause)


def _attempts(client: Client, results: Iterable[SessionResult]) -> Iterator[Attempt]:
    for result in results:
        recording = decode(client.recording(result.session_id)) if result.has_recording else None
        yield Attempt(result, recording)
