"""The two clients: the same methods, one for programs that use asyncio and one for those that do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from polar.client import calls
from polar.client.address import server_address, server_token
from polar.client.calls import Call, Script
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import (
    Health,
    Heartbeat,
    HeartbeatAnswer,
    LeaseRequest,
    Leases,
    Release,
    ResultPage,
    ResultPost,
    SessionPage,
    SessionView,
    TaskPage,
    TaskView,
)

T = TypeVar("T")
P = TypeVar("P", TaskPage, SessionPage, ResultPage)

Task = TaskSpec | Mapping[str, Any]


class Client:
    """A connection to a rollout server, for programs that do not use asyncio."""

    def __init__(self, server: str | None = None, token: str | None = None, *, timeout: float = 30.0) -> None:
        """Without arguments: what $POLAR_SERVER and $POLAR_TOKEN say, else the server started here."""
        self.server = server_address(server)
        self._timeout = timeout
        self._http = httpx.Client(**_options(self.server, server_token(token), timeout))

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

    def submit(self, task: Task) -> TaskView:
        """Submit a task; submitting the same one again changes nothing."""
        return self._send(calls.submit(task))

    def task(self, id: str) -> TaskView:
        return self._send(calls.task(id))

    def tasks(self, status: TaskStatus | None = None) -> Iterator[TaskView]:
        """All tasks, oldest first."""
        for page in self._pages(TaskPage, calls.task_pages(status)):
            yield from page.tasks

    def cancel(self, task_id: str) -> TaskView:
        return self._send(calls.cancel_task(task_id))

    def session(self, id: str) -> SessionView:
        return self._send(calls.session(id))

    def sessions(
        self, task_id: str | None = None, status: SessionStatus | None = None
    ) -> Iterator[SessionView]:
        """All sessions, oldest first."""
        for page in self._pages(SessionPage, calls.session_pages(task_id, status)):
            yield from page.sessions

    def cancel_session(self, id: str) -> SessionView:
        return self._send(calls.cancel_session(id))

    def recording(self, session_id: str) -> bytes:
        """The recording of an ended session, as its node packed it."""
        return self._send(calls.recording(session_id))

    def results(
        self, task_ids: Collection[str] | None = None, *, cursor: int = 0, follow: bool = False
    ) -> Iterator[SessionResult]:
        """Results in the order they came, of all tasks or some.

        With `follow`, goes on as sessions complete: until the given tasks have ended, or for ever.
        """
        for page in self.result_pages(task_ids, cursor=cursor, follow=follow):
            yield from page.results

    def result_pages(
        self, task_ids: Collection[str] | None = None, *, cursor: int = 0, follow: bool = False
    ) -> Iterator[ResultPage]:
        """Like `results`, in pages that carry the cursor to go on from later; some may be empty."""
        return self._pages(ResultPage, calls.result_pages(task_ids, cursor, follow))

    def wait(self, task_ids: Collection[str], timeout: float | None = None) -> list[SessionResult]:
        """All results of these tasks in the order they came, once every session has ended."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        found: list[SessionResult] = []
        script = calls.result_pages(task_ids, 0, follow=True)
        for page in self._pages(ResultPage, script, deadline):
            found += page.results
        return found

    def _pages(self, kind: type[P], script: Script, deadline: float | None = None) -> Iterator[P]:
        answer: Any = None
        while (call := calls.advance(script, answer)) is not None:
            answer = self._send(calls.bounded(call, deadline))
            if isinstance(answer, kind):
                yield answer

    def _send(self, call: Call[T]) -> T:
        try:
            response = self._http.request(**_request(call, self._timeout))
        except httpx.TransportError as error:
            raise calls.unreachable(self.server, error) from error
        return _answer(call, response)


class AsyncClient:
    """A connection to a rollout server, for asyncio; also what nodes use."""

    def __init__(self, server: str | None = None, token: str | None = None, *, timeout: float = 30.0) -> None:
        """Without arguments: what $POLAR_SERVER and $POLAR_TOKEN say, else the server started here."""
        self.server = server_address(server)
        self._timeout = timeout
        self._http = httpx.AsyncClient(**_options(self.server, server_token(token), timeout))

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

    async def submit(self, task: Task) -> TaskView:
        """Submit a task; submitting the same one again changes nothing."""
        return await self._send(calls.submit(task))

    async def task(self, id: str) -> TaskView:
        return await self._send(calls.task(id))

    async def tasks(self, status: TaskStatus | None = None) -> AsyncIterator[TaskView]:
        """All tasks, oldest first."""
        async for page in self._pages(TaskPage, calls.task_pages(status)):
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
        async for page in self._pages(SessionPage, calls.session_pages(task_id, status)):
            for session in page.sessions:
                yield session

    async def cancel_session(self, id: str) -> SessionView:
        return await self._send(calls.cancel_session(id))

    async def recording(self, session_id: str) -> bytes:
        """The recording of an ended session, as its node packed it."""
        return await self._send(calls.recording(session_id))

    async def results(
        self, task_ids: Collection[str] | None = None, *, cursor: int = 0, follow: bool = False
    ) -> AsyncIterator[SessionResult]:
        """Results in the order they came, of all tasks or some.

        With `follow`, goes on as sessions complete: until the given tasks have ended, or for ever.
        """
        async for page in self.result_pages(task_ids, cursor=cursor, follow=follow):
            for result in page.results:
                yield result

    def result_pages(
        self, task_ids: Collection[str] | None = None, *, cursor: int = 0, follow: bool = False
    ) -> AsyncIterator[ResultPage]:
        """Like `results`, in pages that carry the cursor to go on from later; some may be empty."""
        return self._pages(ResultPage, calls.result_pages(task_ids, cursor, follow))

    async def wait(self, task_ids: Collection[str], timeout: float | None = None) -> list[SessionResult]:
        """All results of these tasks in the order they came, once every session has ended."""
        try:
            async with asyncio.timeout(timeout):
                return [result async for result in self.results(task_ids, follow=True)]
        except TimeoutError:
            raise calls.waited_too_long() from None

    async def lease(self, node: str, request: LeaseRequest) -> Leases:
        return await self._send(calls.lease(node, request))

    async def heartbeat(self, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        return await self._send(calls.heartbeat(node, beat))

    async def put_recording(self, session_id: str, fencing_token: int, data: bytes) -> None:
        return await self._send(calls.put_recording(session_id, fencing_token, data))

    async def post_result(self, session_id: str, post: ResultPost) -> None:
        return await self._send(calls.post_result(session_id, post))

    async def release(self, session_id: str, given_back: Release) -> None:
        return await self._send(calls.release(session_id, given_back))

    async def _pages(self, kind: type[P], script: Script) -> AsyncIterator[P]:
        answer: Any = None
        while (call := calls.advance(script, answer)) is not None:
            answer = await self._send(call)
            if isinstance(answer, kind):
                yield answer

    async def _send(self, call: Call[T]) -> T:
        try:
            response = await self._http.request(**_request(call, self._timeout))
        except httpx.TransportError as error:
            raise calls.unreachable(self.server, error) from error
        return _answer(call, response)


def _options(server: str, token: str, timeout: float) -> dict[str, Any]:
    return {
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
        "content": call.content,
        "timeout": httpx.Timeout(timeout, read=timeout + call.waits),
    }


def _answer(call: Call[T], response: httpx.Response) -> T:
    if not response.is_success:
        raise calls.failure(response.status_code, response.content)
    return call.read(response.content)
