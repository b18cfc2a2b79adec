"""The two clients: the same methods, one for programs that use asyncio and one for those that do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from polar.client import calls, failures, policy, scripts
from polar.client.access import AccessCalls, AsyncAccessCalls
from polar.client.address import server_address, server_certificate, server_token
from polar.client.calls import Call
from polar.client.nodes import AsyncNodeCalls, NodeCalls
from polar.client.policy import AsyncPaused, Paused
from polar.client.scripts import Paginator
from polar.client.trust import Authority, pinned, trusting
from polar.models.dashboard import Overview
from polar.models.policy import PauseMode, PolicyView
from polar.models.session import SessionEvent, SessionResult, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import (
    EventPage,
    Health,
    ResultPage,
    SessionPage,
    SessionView,
    TaskBatchView,
    TaskPage,
    TaskView,
)

T = TypeVar("T")
P = TypeVar("P", TaskPage, SessionPage, ResultPage)

PIECE_BYTES = 1 << 18
"""How much of a file is read and sent at once."""

Task = TaskSpec | Mapping[str, Any]


class Client(AccessCalls, NodeCalls):
    """A connection to a rollout server, for programs that do not use asyncio."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: Authority = None,
    ) -> None:
        """Without arguments: as $POLAR_SERVER, $POLAR_TOKEN and $POLAR_CA say, else the server started here.

        `ca`: whose certificates to trust besides the machine's own, a file in PEM.
        """
        self.server = server_address(server)
        self._timeout = timeout
        self._http = httpx.Client(**_options(self.server, server_token(token), timeout, ca))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def health(self) -> Health:
        return self._send(calls.health())

    def overview(self) -> Overview:
        """Sessions, nodes, the policy, and what ended in the last hour."""
        return self._send(calls.overview())

    def metrics(self) -> str:
        """The server's page of metrics, in Prometheus' text form."""
        return self._send(calls.metrics(self.server))

    def submit(self, task: Task) -> TaskView:
        """Submit a task; submitting the same one again changes nothing."""
        return self._send(calls.submit(task))

    def submit_all(self, tasks: Iterable[Task]) -> Iterator[TaskView]:
        """Submit many tasks, some hundred a request; a task is stored when its view is yielded."""
        for batch in self.submit_batches(tasks):
            yield from batch.tasks

    def submit_batches(self, tasks: Iterable[Task]) -> Iterator[TaskBatchView]:
        """The same, a request at a time, with the ids of those that were there already."""
        for call in list(calls.submit_all(tasks)):
            yield self._send(call)

    def task(self, id: str) -> TaskView:
        return self._send(calls.task(id))

    def tasks(self, status: TaskStatus | None = None) -> Iterator[TaskView]:
        """All tasks, oldest first."""
        for page in self._pages(TaskPage, scripts.task_pages(status)):
            yield from page.tasks

    def cancel(self, task_id: str) -> TaskView:
        return self._send(calls.cancel_task(task_id))

    def session(self, id: str) -> SessionView:
        return self._send(calls.session(id))

    def sessions(
        self, task_id: str | None = None, status: SessionStatus | None = None
    ) -> Iterator[SessionView]:
        """All sessions, oldest first."""
        for page in self._pages(SessionPage, scripts.session_pages(task_id, status)):
            yield from page.sessions

    def cancel_session(self, id: str) -> SessionView:
        return self._send(calls.cancel_session(id))

    def recording(self, session_id: str) -> bytes:
        """The recording of an ended session, as its node packed it."""
        return self._send(calls.recording(session_id))

    def artifacts(self, session_id: str) -> bytes:
        """What was kept of an ended session's files and logs, as a zip archive."""
        return self._send(calls.artifacts(session_id))

    def session_events(self, session_id: str) -> tuple[SessionEvent, ...]:
        """Every change of a session's status, over all its attempts."""
        return self._send(calls.session_events(session_id))

    def events(self, cursor: int = 0) -> EventPage:
        """A page of the changes of all sessions' statuses, in the order they were stored."""
        return self._send(calls.events(cursor))

    def results(
        self,
        task_ids: Collection[str] | None = None,
        *,
        cursor: int = 0,
        follow: bool = False,
        max_staleness: int | None = None,
    ) -> Iterator[SessionResult]:
        """Results in the order they came, of all tasks or some.

        With `follow`, goes on as sessions complete: until the given tasks have ended, or for ever.
        Those with tokens of a policy more than `max_staleness` versions old are left out.
        """
        pages = self.result_pages(task_ids, cursor=cursor, follow=follow, max_staleness=max_staleness)
        for page in pages:
            yield from page.fresh

    def result_pages(
        self,
        task_ids: Collection[str] | None = None,
        *,
        cursor: int = 0,
        follow: bool = False,
        max_staleness: int | None = None,
    ) -> Iterator[ResultPage]:
        """Like `results`, in pages that carry the cursor to go on from later; some may be empty.

        They hold stale results too, and name them.
        """
        return self._pages(ResultPage, scripts.result_pages(task_ids, cursor, follow, max_staleness))

    def wait(self, task_ids: Collection[str], timeout: float | None = None) -> list[SessionResult]:
        """All results of these tasks in the order they came, once every session has ended."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        found: list[SessionResult] = []
        script = scripts.result_pages(task_ids, 0, follow=True)
        for page in self._pages(ResultPage, script, deadline):
            found += page.results
        return found

    def policy(self) -> PolicyView:
        """The policy's version, who pauses it, and how far each live node is."""
        return self._send(calls.policy())

    def pause_policy(
        self,
        holder: str,
        mode: PauseMode = PauseMode.KEEP,
        *,
        timeout_seconds: float = 60.0,
        wait_seconds: float = 60.0,
    ) -> PolicyView:
        """Have nothing sampled until `resume_policy`, or until the time is over; the same again renews it."""
        pause = policy.pause(holder, mode, timeout_seconds, wait_seconds)
        return self._send(calls.pause_policy(pause))

    def update_policy(
        self,
        path: str | Path | None = None,
        *,
        version: int | None = None,
        holder: str | None = None,
        wait_seconds: float = 600.0,
    ) -> PolicyView:
        """Have every engine sample with the weights at a path; None: those that it was started with."""
        update = policy.update(path, version, holder, wait_seconds)
        return self._send(calls.update_policy(update))

    def resume_policy(self, holder: str | None = None, *, wait_seconds: float = 60.0) -> PolicyView:
        """End a pause; without a holder, whoever holds it."""
        return self._send(calls.resume_policy(policy.resume(holder, wait_seconds)))

    @contextmanager
    def paused(
        self, mode: PauseMode = PauseMode.KEEP, *, holder: str | None = None, timeout_seconds: float = 60.0
    ) -> Iterator[Paused]:
        """Nothing is sampled while the block runs, however long; the pause ends if this process does."""
        with policy.kept(self, holder, mode, timeout_seconds) as pause:
            yield pause

    def _pages(self, kind: type[P], script: Paginator, deadline: float | None = None) -> Iterator[P]:
        answer: Any = None
        while (call := scripts.advance(script, answer)) is not None:
            answer = self._send(scripts.bounded(call, deadline))
            if isinstance(answer, kind):
                yield answer

    def _send(self, call: Call[T]) -> T:
        try:
            response = self._http.request(**_request(call, self._timeout))
        except httpx.TransportError as error:
            raise failures.unreachable(self.server, error) from error
        return _answer(call, response)


class AsyncClient(AsyncAccessCalls, AsyncNodeCalls):
    """A connection to a rollout server, for asyncio; also what nodes use."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: Authority = None,
    ) -> None:
        """Without arguments: as $POLAR_SERVER, $POLAR_TOKEN and $POLAR_CA say, else the server started here.

        `ca`: whose certificates to trust besides the machine's own, a file in PEM.
        """
        self.server = server_address(server)
        self._timeout = timeout
        self._http = httpx.AsyncClient(**_options(self.server, server_token(token), timeout, ca))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        await self.close()

    async def health(self) -> Health:
        return await self._send(calls.health())

    async def overview(self) -> Overview:
        """Sessions, nodes, the policy, and what ended in the last hour."""
        return await self._send(calls.overview())

    async def metrics(self) -> str:
        """The server's page of metrics, in Prometheus' text form."""
        return await self._send(calls.metrics(self.server))

    async def submit(self, task: Task) -> TaskView:
        """Submit a task; submitting the same one again changes nothing."""
        return await self._send(calls.submit(task))

    async def submit_all(self, tasks: Iterable[Task]) -> AsyncIterator[TaskView]:
        """Submit many tasks, some hundred a request; a task is stored when its view is yielded."""
        async for batch in self.submit_batches(tasks):
            for view in batch.tasks:
                yield view

    async def submit_batches(self, tasks: Iterable[Task]) -> AsyncIterator[TaskBatchView]:
        """The same, a request at a time, with the ids of those that were there already."""
        for call in list(calls.submit_all(tasks)):
            yield await self._send(call)

    async def task(self, id: str) -> TaskView:
        return await self._send(calls.task(id))

    async def tasks(self, status: TaskStatus | None = None) -> AsyncIterator[TaskView]:
        """All tasks, oldest first."""
        async for page in self._pages(TaskPage, scripts.task_pages(status)):
            for task in page.tasks:
                yield task

    async def cancel(self, task_id: str) -> TaskView:
        return await self._send(calls.cancel_task(task_id))

    async def session(self, id: str) -> SessionView:
        return await self._send(calls.session(id))

    async def sessions(
        self, task_id: str | None = None, status: SessionStatus | None = None
    ) -> AsyncIterator[SessionView]:
        """All sessions, oldest first."""
        async for page in self._pages(SessionPage, scripts.session_pages(task_id, status)):
            for session in page.sessions:
                yield session

    async def cancel_session(self, id: str) -> SessionView:
        return await self._send(calls.cancel_session(id))

    async def recording(self, session_id: str) -> bytes:
        """The recording of an ended session, as its node packed it."""
        return await self._send(calls.recording(session_id))

    async def artifacts(self, session_id: str) -> bytes:
        """What was kept of an ended session's files and logs, as a zip archive."""
        return await self._send(calls.artifacts(session_id))

    async def session_events(self, session_id: str) -> tuple[SessionEvent, ...]:
        """Every change of a session's status, over all its attempts."""
        return await self._send(calls.session_events(session_id))

    async def events(self, cursor: int = 0) -> EventPage:
        """A page of the changes of all sessions' statuses, in the order they were stored."""
        return await self._send(calls.events(cursor))

    async def results(
        self,
        task_ids: Collection[str] | None = None,
        *,
        cursor: int = 0,
        follow: bool = False,
        max_staleness: int | None = None,
    ) -> AsyncIterator[SessionResult]:
        """Results in the order they came, of all tasks or some.

        With `follow`, goes on as sessions complete: until the given tasks have ended, or for ever.
        Those with tokens of a policy more than `max_staleness` versions old are left out.
        """
        pages = self.result_pages(task_ids, cursor=cursor, follow=follow, max_staleness=max_staleness)
        async for page in pages:
            for result in page.fresh:
                yield result

    def result_pages(
        self,
        task_ids: Collection[str] | None = None,
        *,
        cursor: int = 0,
        follow: bool = False,
        max_staleness: int | None = None,
    ) -> AsyncIterator[ResultPage]:
        """Like `results`, in pages that carry the cursor to go on from later; some may be empty.

        They hold stale results too, and name them.
        """
        return self._pages(ResultPage, scripts.result_pages(task_ids, cursor, follow, max_staleness))

    async def wait(self, task_ids: Collection[str], timeout: float | None = None) -> list[SessionResult]:
        """All results of these tasks in the order they came, once every session has ended."""
        try:
            async with asyncio.timeout(timeout):
                pages = self.result_pages(task_ids, follow=True)
                return [result async for page in pages for result in page.results]
        except TimeoutError:
            raise failures.waited_too_long() from None

    async def policy(self) -> PolicyView:
        """The policy's version, who pauses it, and how far each live node is."""
        return await self._send(calls.policy())

    async def pause_policy(
        self,
        holder: str,
        mode: PauseMode = PauseMode.KEEP,
        *,
        timeout_seconds: float = 60.0,
        wait_seconds: float = 60.0,
    ) -> PolicyView:
        """Have nothing sampled until `resume_policy`, or until the time is over; the same again renews it."""
        pause = policy.pause(holder, mode, timeout_seconds, wait_seconds)
        return await self._send(calls.pause_policy(pause))

    async def update_policy(
        self,
        path: str | Path | None = None,
        *,
        version: int | None = None,
        holder: str | None = None,
        wait_seconds: float = 600.0,
    ) -> PolicyView:
        """Have every engine sample with the weights at a path; None: those that it was started with."""
        update = policy.update(path, version, holder, wait_seconds)
        return await self._send(calls.update_policy(update))

    async def resume_policy(self, holder: str | None = None, *, wait_seconds: float = 60.0) -> PolicyView:
        """End a pause; without a holder, whoever holds it."""
        return await self._send(calls.resume_policy(policy.resume(holder, wait_seconds)))

    @asynccontextmanager
    async def paused(
        self, mode: PauseMode = PauseMode.KEEP, *, holder: str | None = None, timeout_seconds: float = 60.0
    ) -> AsyncIterator[AsyncPaused]:
        """Nothing is sampled while the block runs, however long; the pause ends if this process does."""
        async with policy.kept_async(self, holder, mode, timeout_seconds) as pause:
            yield pause

    async def _pages(self, kind: type[P], script: Paginator) -> AsyncIterator[P]:
        answer: Any = None
        while (call := scripts.advance(script, answer)) is not None:
            answer = await self._send(call)
            if isinstance(answer, kind):
                yield answer

    async def _send(self, call: Call[T]) -> T:
        try:
            response = await self._http.request(**_request(call, self._timeout))
        except httpx.TransportError as error:
            raise failures.unreachable(self.server, error) from error
        return _answer(call, response)


def _options(server: str, token: str, timeout: float, ca: Authority) -> dict[str, Any]:
    local = server_certificate(server) if ca is None else None
    return {
        "verify": trusting(ca, server) if local is None else pinned(local),
        "base_url": f"{server}/api/v1",
        "headers": {"Authorization": f"Bearer {token}"},
        "timeout": timeout,
        # Proxies and .netrc of the environment are not meant for the control plane, often on loopback.
        "trust_env": False,
    }


def _request(call: Call[Any], timeout: float) -> dict[str, Any]:
    return {
        "method": call.method,
        "url": call.path,
        "params": call.query,
        "headers": call.headers,
        "content": _pieces(call.content) if isinstance(call.content, Path) else call.content,
        "timeout": httpx.Timeout(timeout, read=timeout + call.waits),
    }


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


def _answer(call: Call[T], response: httpx.Response) -> T:
    # It has been read. Its stream refers to it, so both and the request would wait for the garbage collector.
    response.stream = httpx.ByteStream(b"")
    if not response.is_success:
        raise failures.failure(response.status_code, response.content)
    return call.read(response.content)
