"""The client: what a trainer or a script asks of a rollout server, and what a node does."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from polar.client import connection
from polar.client.connection import Connection, error_of, segment
from polar.errors import RESTART, Conflict, InvalidInput, PolarError, Unavailable, explain
from polar.models.access import MadeToken, NewToken, TokenPage, TokenRole, TokenView
from polar.models.dashboard import NodeList, NodeOverview, Overview, WatchedSession, WatchEvent
from polar.models.delivery import SIZES, CaptureGrowth, CaptureLengths, Delivery, DeliveryAnswer
from polar.models.policy import Pause, PauseMode, PolicyOrder, PolicyReport, PolicyView, Resume, Update
from polar.models.session import LeaseKey, SessionEvent, SessionResult, SessionStatus
from polar.models.task import BudgetScope, OnDivergence, Run, RunKind, TaskSpec, TaskStatus
from polar.models.views import (
    BranchRequest,
    EventPage,
    Health,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    Release,
    ReplayRequest,
    ResultPage,
    RunPage,
    RunStart,
    RunStep,
    RunSteps,
    RunView,
    SessionPage,
    SessionView,
    TaskBatchView,
    TaskPage,
    TaskView,
    WebhookList,
    WebhookView,
)

log = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)

MAX_BATCH = 500
MAX_BATCH_BYTES = 8 << 20
"""The most tasks that one request carries, and the most bytes of them."""

MAX_BATCH_SECONDS = 30.0
"""How much longer than others the server may take to store a batch."""

MAX_FILTER_CHARACTERS = 30_000
"""Beyond this the task ids do not fit a URL: the client reads the whole feed and filters it."""

POLL_SECONDS = 20.0
"""How long one request waits for results before the client asks again."""

PIECE_BYTES = 1 << 18
"""How much of a file is read and sent at once."""

Task = TaskSpec | Mapping[str, Any]

_EVENTS = TypeAdapter(tuple[SessionEvent, ...])
_WATCHED: TypeAdapter[WatchEvent] = TypeAdapter(WatchEvent)


class AsyncClient(Connection):
    """A connection to a rollout server, for asyncio; also what nodes use."""

    async def health(self) -> Health:
        return await self._get("/health", Health)

    async def overview(self) -> Overview:
        """Sessions, nodes, the policy, and what ended in the last hour."""
        return await self._get("/dashboard/overview", Overview)

    async def metrics(self) -> str:
        """The server's page of metrics, in Prometheus' text form."""
        # Outside the API, where scrapers look for it.
        return (await self._send("GET", f"{self.server}/metrics")).decode()

    async def submit(self, task: Task) -> TaskView:
        """Submit a task; submitting the same one again changes nothing."""
        return await self._post("/tasks", _spec(task), TaskView)

    async def submit_all(self, tasks: Iterable[Task]) -> AsyncIterator[TaskView]:
        """Submit many tasks, some hundred per request; a task is stored when its view is yielded."""
        async for batch in self.submit_batches(tasks):
            for view in batch.tasks:
                yield view

    async def submit_batches(self, tasks: Iterable[Task]) -> AsyncIterator[TaskBatchView]:
        """Like `submit_all`, one request at a time, with the ids of the tasks that the server had already."""
        for body in list(_batches(tasks)):
            yield await self._post("/tasks/batch", body, TaskBatchView, waits=MAX_BATCH_SECONDS)

    async def task(self, id: str) -> TaskView:
        return await self._get(f"/tasks/{segment(id)}", TaskView)

    async def tasks(
        self, status: TaskStatus | None = None, run: str | None = None
    ) -> AsyncIterator[TaskView]:
        """All tasks, oldest first."""
        async for page in self._pages("/tasks", TaskPage, {"status": status, "run": run}):
            for task in page.tasks:
                yield task

    async def cancel(self, task_id: str) -> TaskView:
        return await self._post(f"/tasks/{segment(task_id)}/cancel", None, TaskView)

    async def session(self, id: str) -> SessionView:
        return await self._get(f"/sessions/{segment(id)}", SessionView)

    async def runs(self, kind: RunKind | None = None) -> AsyncIterator[RunView]:
        """All runs, newest first."""
        async for page in self._pages("/runs", RunPage, {"kind": kind}):
            for run in page.runs:
                yield run

    async def run(self, name: str) -> RunView:
        return await self._get(f"/runs/{segment(name)}", RunView)

    async def begin_run(self, run: Run, step: int = 0) -> RunView:
        """Begin a run whose steps will be reported, or resume it after a step: later ones are dropped."""
        start = RunStart(kind=run.kind, step=step)
        return await self._post(f"/runs/{segment(run.name)}", start, RunView)

    async def report_steps(self, run: str, steps: Iterable[RunStep]) -> RunView:
        """Store the numbers of steps, and which tasks they learned from."""
        return await self._post(f"/runs/{segment(run)}/steps", RunSteps(steps=tuple(steps)), RunView)

    async def sessions(
        self, task_id: str | None = None, status: SessionStatus | None = None, run: str | None = None
    ) -> AsyncIterator[SessionView]:
        """All sessions, oldest first."""
        query = {"task_id": task_id, "status": status, "run": run}
        async for page in self._pages("/sessions", SessionPage, query):
            for session in page.sessions:
                yield session

    async def cancel_session(self, id: str) -> SessionView:
        return await self._post(f"/sessions/{segment(id)}/cancel", None, SessionView)

    async def branch(
        self,
        session_id: str,
        calls: int,
        samples: int = 1,
        *,
        on_divergence: OnDivergence = OnDivergence.LIVE,
        budgets: BudgetScope = BudgetScope.NEW,
        request_id: str | None = None,
    ) -> tuple[SessionView, ...]:
        """Add sessions to the task of one that has ended: its first `calls` model calls are answered from its
        recording, and then they sample on.

        With a `request_id`, the same request again adds nothing.
        """
        ways = {"on_divergence": on_divergence, "budgets": budgets}
        asked = {"calls": calls, "samples": samples, "request_id": request_id, **ways}
        path = f"/sessions/{segment(session_id)}/branches"
        return (await self._post(path, _checked(BranchRequest, asked), SessionPage)).sessions

    async def replay(
        self,
        session_id: str,
        calls: int | None = None,
        *,
        on_divergence: OnDivergence = OnDivergence.STOP,
        samples_on: bool = False,
        request_id: str | None = None,
    ) -> SessionView:
        """Run an ended session again in a copy of its task: its first `calls` model calls, or all of them,
        are answered from its recording.

        With a `request_id`, the same request again changes nothing.
        """
        ways = {"on_divergence": on_divergence, "samples_on": samples_on}
        asked = _checked(ReplayRequest, {"calls": calls, "request_id": request_id, **ways})
        return await self._post(f"/sessions/{segment(session_id)}/replay", asked, SessionView)

    async def recording(self, session_id: str) -> bytes:
        """The recording of an ended session, as its node packed it."""
        return await self._send("GET", f"/sessions/{segment(session_id)}/recording")

    async def artifacts(self, session_id: str) -> bytes:
        """The files and logs that an ended session left, as a zip archive."""
        return await self._send("GET", f"/sessions/{segment(session_id)}/artifacts")

    async def session_events(self, session_id: str) -> tuple[SessionEvent, ...]:
        """Every change of a session's status, over all its attempts."""
        return _EVENTS.validate_json(await self._send("GET", f"/sessions/{segment(session_id)}/events"))

    async def watch(self, session_id: str) -> AsyncIterator[WatchEvent]:
        """A session's model calls, those that were made and those that follow, until it has ended.

        The last event is that of the session with its result. A connection that is lost is made anew.
        """
        path, after = f"/dashboard/sessions/{segment(session_id)}/watch", None
        pauses: Iterator[float] = iter(())
        while True:
            try:
                async with aclosing(self._events(path, after)) as events:
                    async for id, data in events:
                        event = _WATCHED.validate_json(data)
                        after, pauses = id or after, RESTART.pauses()
                        yield event
                        if isinstance(event, WatchedSession) and event.session.result is not None:
                            return
                problem = Unavailable(f"the server at {self.server} ended the stream")
            except Unavailable as error:
                problem = error
            if (pause := next(pauses, None)) is None:
                raise problem
            await asyncio.sleep(pause)

    async def events(self, cursor: int = 0) -> EventPage:
        """A page of the changes of all sessions' statuses, in the order they were stored."""
        return await self._get("/events", EventPage, {"cursor": cursor, "limit": connection.PAGE})

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

    async def result_pages(
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
        if isinstance(task_ids, str):
            task_ids = [task_ids]
        if task_ids is not None and not task_ids:
            return
        # A task is seen to have ended before the feed is read to its end for the last time, so that
        # none of its results is missed.
        running = await self._running(task_ids or ()) if follow else set()
        while True:
            goes_on = bool(running) or (follow and task_ids is None)
            page = await self._results(cursor, task_ids, POLL_SECONDS if goes_on else 0.0, max_staleness)
            yield page
            nothing_came, cursor = page.cursor == cursor, page.cursor
            if nothing_came and not goes_on:
                return
            seen = {result.task_id for result in page.results}
            suspects = running if nothing_came else running & seen
            running = (running - suspects) | await self._running(suspects)

    async def newest_result(self) -> int:
        """The cursor after which only results that are still to come are found."""
        return (await self._get("/results", ResultPage, {"limit": 1})).end

    async def _running(self, task_ids: Collection[str]) -> set[str]:
        """Those of the tasks that have not ended."""
        views = [await self.task(id) for id in sorted(task_ids)]
        ended = (TaskStatus.FINISHED, TaskStatus.CANCELLED)
        return {view.spec.id for view in views if view.status not in ended}

    async def _results(
        self, cursor: int, task_ids: Collection[str] | None, wait_seconds: float, max_staleness: int | None
    ) -> ResultPage:
        fits = sum(len(id) + len("&task_id=") for id in task_ids or ()) <= MAX_FILTER_CHARACTERS
        query = {
            "cursor": cursor,
            "limit": connection.PAGE,
            "wait_seconds": wait_seconds,
            "max_staleness": max_staleness,
            "task_id": list(task_ids) if task_ids is not None and fits else None,
        }
        page = await self._get("/results", ResultPage, query, waits=wait_seconds)
        if task_ids is None or fits:
            return page
        wanted = frozenset(task_ids)
        chosen = tuple(result for result in page.results if result.task_id in wanted)
        return page.model_copy(update={"results": chosen})

    async def wait(self, task_ids: Collection[str], timeout: float | None = None) -> list[SessionResult]:
        """All results of these tasks in the order they came, once every session has ended."""
        try:
            async with asyncio.timeout(timeout):
                pages = self.result_pages(task_ids, follow=True)
                return [result async for page in pages for result in page.results]
        except TimeoutError:
            raise Unavailable("the tasks did not end in time", hint="they go on; wait again") from None

    async def policy(self) -> PolicyView:
        """The policy's version, who pauses it, and how far each live node is."""
        return await self._get("/policy", PolicyView)

    async def pause_policy(
        self,
        holder: str,
        mode: PauseMode = PauseMode.KEEP,
        *,
        timeout_seconds: float = 60.0,
        wait_seconds: float = 60.0,
    ) -> PolicyView:
        """Have nothing sampled until `resume_policy`, or until the time is over; the same again renews it."""
        timing = {"timeout_seconds": timeout_seconds, "wait_seconds": wait_seconds}
        pause = _checked(Pause, {"holder": holder, "mode": mode, **timing})
        return await self._post("/policy/pause", pause, PolicyView, waits=wait_seconds)

    async def update_policy(
        self,
        path: str | Path | None = None,
        *,
        version: int | None = None,
        holder: str | None = None,
        wait_seconds: float = 600.0,
    ) -> PolicyView:
        """Have every engine sample with the weights at a path; None: those that it was started with."""
        absolute = None if path is None else str(Path(path).absolute())
        asked = {"path": absolute, "version": version, "holder": holder, "wait_seconds": wait_seconds}
        update = _checked(Update, asked)
        # Where it fails, the way back is waited for as well.
        return await self._post("/policy/update", update, PolicyView, waits=2 * wait_seconds)

    async def resume_policy(self, holder: str | None = None, *, wait_seconds: float = 60.0) -> PolicyView:
        """End a pause; without a holder, whoever holds it."""
        resume = _checked(Resume, {"holder": holder, "wait_seconds": wait_seconds})
        return await self._post("/policy/resume", resume, PolicyView, waits=wait_seconds)

    @asynccontextmanager
    async def paused(
        self, mode: PauseMode = PauseMode.KEEP, *, holder: str | None = None, timeout_seconds: float = 60.0
    ) -> AsyncIterator[AsyncPaused]:
        """Nothing is sampled while the block runs, however long; the pause ends if this process does."""
        # Tells people who pauses, and this pause from any other.
        host = "".join(filter(str.isalnum, socket.gethostname())) or "host"
        name = holder or f"{host[:40]}-{os.getpid()}-{secrets.token_hex(4)}"

        async def renew() -> None:
            while True:
                await asyncio.sleep(timeout_seconds / 3)
                try:
                    await self.pause_policy(name, mode, timeout_seconds=timeout_seconds, wait_seconds=0)
                except PolarError as error:
                    log.warning("the pause could not be renewed: %s", error)

        renewal: asyncio.Task[None] | None = None
        try:
            view = await self.pause_policy(name, mode, timeout_seconds=timeout_seconds)
            if late := [node.node for node in view.nodes if not node.is_settled]:
                unpaused = f"not every node has paused: {', '.join(late)}"
                raise Unavailable(unpaused, hint="try again, or another mode")
            renewal = asyncio.create_task(renew())
            yield AsyncPaused(name, self)
        finally:
            if renewal is not None:
                renewal.cancel()
                await asyncio.wait({renewal})
            try:
                await self.resume_policy(name)
            except Conflict as error:
                log.warning("this process no longer held the pause: %s", error)

    async def nodes(self) -> tuple[NodeOverview, ...]:
        """The nodes that report or hold sessions, and how full they are."""
        return (await self._get("/nodes", NodeList)).nodes

    async def drain_node(self, name: str) -> NodeOverview:
        """Have a node leased nothing more; it finishes what it holds."""
        return await self._post(f"/nodes/{segment(name)}/drain", None, NodeOverview)

    async def resume_node(self, name: str) -> NodeOverview:
        """Have a drained node leased sessions again."""
        return await self._post(f"/nodes/{segment(name)}/resume", None, NodeOverview)

    async def tokens(self) -> tuple[TokenView, ...]:
        """All tokens that were ever made, without their secrets."""
        return (await self._get("/tokens", TokenPage)).tokens

    async def create_token(
        self, name: str, role: TokenRole, *, expires_seconds: float | None = None
    ) -> MadeToken:
        """Make a token; its secret is in the answer and nowhere else."""
        asked = NewToken(name=name, role=role, expires_seconds=expires_seconds)
        return await self._post("/tokens", asked, MadeToken)

    async def revoke_token(self, name_or_id: str) -> tuple[TokenView, ...]:
        """End one token by its id, or all of a name."""
        return (await self._post(f"/tokens/{segment(name_or_id)}/revoke", None, TokenPage)).tokens

    async def webhooks(self) -> tuple[WebhookView, ...]:
        """The URLs that results are sent to, and how far each has got."""
        return (await self._get("/webhooks", WebhookList)).webhooks

    async def join(self, node: str, join: Join) -> Joined:
        return await self._post(f"/nodes/{segment(node)}/join", join, Joined)

    async def follow_policy(self, node: str, report: PolicyReport) -> PolicyOrder:
        waits = report.wait_seconds
        return await self._post(f"/nodes/{segment(node)}/policy", report, PolicyOrder, waits=waits)

    async def lease(self, node: str, request: LeaseRequest) -> Leases:
        return await self._post(f"/nodes/{segment(node)}/lease", request, Leases, waits=request.wait_seconds)

    async def heartbeat(self, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        return await self._post(f"/nodes/{segment(node)}/heartbeat", beat, HeartbeatAnswer)

    async def deliver(self, node: str, deliveries: Sequence[Delivery]) -> list[PolarError | None]:
        """Deliver sessions in one request; for each, what is wrong with it. See `ResultUploader`."""
        path = f"/nodes/{segment(node)}/deliveries"
        answer = await self._post(path, _body(deliveries), DeliveryAnswer)
        return [None if problem is None else error_of(problem) for problem in answer.problems]

    async def ship_captures(self, node: str, grown: Sequence[CaptureGrowth]) -> tuple[int | None, ...]:
        """Send what captures have grown by; for each, how much the server has. See `CaptureUploader`."""
        path = f"/nodes/{segment(node)}/captures"
        return (await self._post(path, _body(grown), CaptureLengths)).lengths

    async def capture(self, session_id: str, key: LeaseKey) -> bytes:
        """What earlier attempts at a session captured, for the node whose lease has this key."""
        return await self._send("POST", f"/sessions/{segment(session_id)}/capture", key)

    async def origin(self, session_id: str, key: LeaseKey) -> bytes:
        """The recording that a session begins with, for the node whose lease has this key."""
        return await self._send("POST", f"/sessions/{segment(session_id)}/origin", key)

    async def release(self, session_id: str, given_back: Release) -> None:
        await self._send("POST", f"/sessions/{segment(session_id)}/release", given_back)


@dataclass(frozen=True, slots=True)
class AsyncPaused:
    """A pause that this process holds."""

    holder: str
    _client: AsyncClient

    async def update(self, path: str | Path | None = None, *, version: int | None = None) -> PolicyView:
        """Replace the weights; see `AsyncClient.update_policy`."""
        return await self._client.update_policy(path, version=version, holder=self.holder)


async def _body(deliveries: Sequence[Delivery | CaptureGrowth]) -> AsyncIterator[bytes]:
    """What is sent as `SIZES` describes it, with many small parts in one piece."""
    piece = bytearray()
    for delivery in deliveries:
        text, parts = delivery.model_dump_json().encode(), delivery.parts
        piece += SIZES.pack(len(text), *map(size_of, parts)) + text
        for part in parts:
            async for data in _pieces(part):
                piece += data
                if len(piece) >= PIECE_BYTES:
                    yield bytes(piece)
                    piece.clear()
    yield bytes(piece)


async def _pieces(part: bytes | PurePath | None) -> AsyncIterator[bytes]:
    if isinstance(part, PurePath):
        with Path(part).open("rb") as file:
            while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield data
    elif part is not None:
        yield part


def size_of(part: bytes | PurePath | None) -> int:
    if part is None:
        return 0
    return Path(part).stat().st_size if isinstance(part, PurePath) else len(part)


def _batches(tasks: Iterable[Task]) -> Iterator[bytes]:
    """Bodies that are small enough for a request; all tasks are checked before the first is yielded."""
    batch: list[bytes] = []
    size = 0
    for spec in [_spec(task) for task in tasks]:
        text = spec.model_dump_json().encode()
        if batch and (len(batch) == MAX_BATCH or size + len(text) > MAX_BATCH_BYTES):
            yield b'{"tasks":[' + b",".join(batch) + b"]}"
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield b'{"tasks":[' + b",".join(batch) + b"]}"


def _spec(task: Task) -> TaskSpec:
    return task if isinstance(task, TaskSpec) else _checked(TaskSpec, task)


def _checked(kind: type[B], fields: Mapping[str, Any]) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None
