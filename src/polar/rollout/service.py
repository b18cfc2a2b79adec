"""What the control plane does with the store: schedules sessions, wakes who waits, expires leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

from polar.config.settings import ServerSettings
from polar.errors import PolarError
from polar.models.session import SessionStatus
from polar.models.task import TaskSpec
from polar.models.views import (
    Heartbeat,
    HeartbeatAnswer,
    LeaseRequest,
    Leases,
    ResultPage,
    ResultPost,
    SessionView,
    TaskView,
)
from polar.rollout.bell import Bell
from polar.rollout.checks import check_components
from polar.store.store import Store

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0
"""How often a waiting request looks for what another server process wrote; our own writes wake it."""

Gone = Callable[[], Awaitable[bool]]
"""Whether the caller of a waiting request has hung up."""


class RolloutService:
    """The control plane without its HTTP; keeps nothing of a session in memory."""

    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self.store = store
        self._settings = settings
        self._queued = Bell()
        self._ended = Bell()
        self._closing = False

    async def submit(self, task: TaskSpec) -> tuple[TaskView, bool]:
        """Store a task; False: the same one was there already."""
        check_components(task)
        view, is_new = await self.store.tasks.submit(task)
        if is_new:
            self._queued.ring()
        return view, is_new

    async def cancel_task(self, id: str) -> TaskView:
        view = await self.store.tasks.cancel(id)
        self._ended.ring()
        return view

    async def cancel_session(self, id: str) -> SessionView:
        view = await self.store.sessions.cancel(id)
        self._ended.ring()
        return view

    async def results(
        self, cursor: int, *, limit: int, task_ids: Collection[str] | None, wait_seconds: float, gone: Gone
    ) -> ResultPage:
        """What ended after `cursor`; waits for the first of it."""
        async for _ in self._looks(self._ended, wait_seconds, gone):
            page = await self.store.results.after(cursor, limit=limit, task_ids=task_ids)
            if page.results:
                return page
        return ResultPage(results=(), cursor=cursor)

    async def lease(self, node: str, request: LeaseRequest, gone: Gone) -> Leases:
        """Sessions for a node; waits for the first."""
        async for _ in self._looks(self._queued, request.wait_seconds, gone):
            leases = await self.store.leases.claim(
                node,
                limit=request.max_sessions,
                runtimes=request.runtimes,
                seconds=self._settings.lease_seconds,
            )
            if leases:
                return Leases(leases=leases)
        return Leases(leases=())

    async def heartbeat(self, node: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        return await self.store.leases.heartbeat(
            node, heartbeat.sessions, seconds=self._settings.lease_seconds
        )

    async def put_recording(self, session_id: str, fencing_token: int, chunks: AsyncIterator[bytes]) -> None:
        await self.store.leases.check(session_id, fencing_token)
        await self.store.recordings.put(session_id, fencing_token, chunks)

    async def post_result(self, session_id: str, post: ResultPost) -> None:
        await self.store.complete(session_id, post.fencing_token, post.result)
        self._ended.ring()

    async def release(self, session_id: str, fencing_token: int) -> None:
        await self.store.leases.release(session_id, fencing_token)
        self._queued.ring()
        self._ended.ring()

    async def counts(self) -> dict[SessionStatus, int]:
        return await self.store.sessions.counts()

    @asynccontextmanager
    async def expiring_leases(self) -> AsyncIterator[None]:
        """Take sessions back from silent nodes while the body runs."""
        expiry = asyncio.create_task(self._expire_forever(), name="lease expiry")
        try:
            yield
        finally:
            expiry.cancel()
            await asyncio.wait({expiry})

    def stop_waiting(self) -> None:
        """Answer every waiting request now, and hold none back from now on."""
        self._closing = True
        self._queued.ring()
        self._ended.ring()

    async def _looks(self, bell: Bell, wait_seconds: float, gone: Gone) -> AsyncIterator[None]:
        """Yield when it is time to look: at once, whenever the bell rings, and slowly besides."""
        deadline = time.monotonic() + wait_seconds
        while not await gone():
            rung = bell.listen()
            yield
            left = deadline - time.monotonic()
            if left <= 0 or self._closing:
                return
            try:
                async with asyncio.timeout(min(left, LOOK_AGAIN_SECONDS)):
                    await rung.wait()
            except TimeoutError:
                continue

    async def _expire_forever(self) -> None:
        # While the server was down no node could renew: give those that live one lease to do it.
        await asyncio.sleep(self._settings.lease_seconds)
        while True:
            try:
                expired = await self.store.leases.expire(max_attempts=self._settings.max_attempts)
            except PolarError as error:
                log.error("leases could not be checked, will try again: %s", error)
            except Exception:
                log.exception("leases could not be checked, will try again")
            else:
                if expired.requeued:
                    log.warning("%d sessions of silent nodes are queued again", expired.requeued)
                    self._queued.ring()
                if expired.ended:
                    log.warning("%d sessions of silent nodes were ended", expired.ended)
                    self._ended.ring()
            await asyncio.sleep(min(self._settings.lease_seconds / 3, 5.0))
