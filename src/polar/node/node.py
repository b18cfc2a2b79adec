"""A node: leases sessions, runs them through its pools, delivers their results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.metrics_core import Metric

from polar import __version__
from polar.client import AsyncClient
from polar.client.uploader import CaptureUploader, ResultUploader
from polar.config import plugins
from polar.config.settings import NodeSettings
from polar.engines.base import ModelInfo
from polar.errors import Conflict, InvalidInput, NotFound, PolarError, Unavailable, retry_forever
from polar.gateway.server import Gateway
from polar.models.session import Lease, SessionResult, SessionStatus
from polar.models.views import (
    MOST_LEASES,
    Heartbeat,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    Release,
    SessionBeat,
)
from polar.node.admission import Admission
from polar.node.policy import PolicyFollower, weight_roots
from polar.node.pools import Seat, places
from polar.node.services import NodeServices, remove_expired
from polar.node.session_run import SessionRun
from polar.telemetry import logs

log = logging.getLogger(__name__)

LEASE_WAIT_SECONDS = 20.0
"""How long the server may hold a request for work back: short enough for proxies, long enough to be rare."""
PROMPT_SECONDS = 0.5
"""Within which the server answers if it has work; a longer silence means that there is none."""
ENDINGS_AT_ONCE = 16
LAST_DELIVERY_SECONDS = 5.0
"""How long a node that is asked to stop still tries to deliver a finished session, or to send what was
captured of one that it gives back."""
SWEEP_SECONDS = 3600.0
"""How often the node looks for what leases left here long ago."""
LONGEST_TROUBLE = 2_000
"""Characters of what is told of a node's trouble."""
BEAT_SECONDS = 2.0
"""How old the progress that users see may be; leases alone would need fewer heartbeats."""


class Node:
    """Runs leased sessions until it is drained or cancelled, then gives the unfinished ones back."""

    def __init__(
        self,
        settings: NodeSettings,
        data_dir: Path,
        client: AsyncClient,
        gateway: Gateway,
        model: ModelInfo,
        *,
        lease_seconds: float,
        resume_bytes: int,
    ) -> None:
        """`resume_bytes`: how much of a running session's capture the server keeps."""
        self._settings = settings
        self._client = client
        self._uploader = ResultUploader(client, settings.name)
        self._captures = CaptureUploader(client, settings.name, is_on=resume_bytes > 0)
        self._gateway = gateway
        self._lease_seconds = lease_seconds
        self._services = NodeServices.below(data_dir, settings, gateway, client, model)
        roots = weight_roots(settings.weight_roots, data_dir)
        self._policy = PolicyFollower(settings.name, client, gateway, roots)
        self._runs: dict[str, SessionRun] = {}
        self._ending = asyncio.Semaphore(ENDINGS_AT_ONCE)
        self._beat_now = asyncio.Event()
        self._changed: set[str] = set()
        """Sessions that have entered a stage since the last heartbeat."""
        self._draining = asyncio.Event()
        self._admission = Admission(settings, self._services.directory, self._tell_of_trouble)
        self._services.metrics.watch(self._admission)
        self._unreported_trouble = False

    async def metric_families(self) -> Iterable[Metric]:
        return self._services.metrics.registry.collect()

    async def run(self) -> None:
        """Work until cancelled, or until drained, in a directory that the caller holds."""
        await self._reap()
        try:
            async with asyncio.TaskGroup() as group:
                chores = (
                    self._heartbeats(),
                    self._policy.run(),
                    self._captures.run(),
                    self._sweep_forever(),
                )
                running = [group.create_task(chore) for chore in chores]
                await self._work_until_drained()
                for chore in running:
                    chore.cancel()
        except ExceptionGroup as failures:
            raise _first(failures) from failures
        finally:
            await self._services.snapshots.close()
            await asyncio.to_thread(self._services.workers.close)

    def drain(self) -> None:
        """Take no more work; `run` returns when the agents at work have ended, or their grace has."""
        self._draining.set()

    async def _work_until_drained(self) -> None:
        grace = self._settings.drain_seconds
        try:
            async with asyncio.timeout(None) as patience, asyncio.TaskGroup() as sessions:
                leasing = sessions.create_task(self._lease_forever(sessions))
                try:
                    await self._draining.wait()
                finally:
                    # Before any session ends, or an open request for work would get what is given back.
                    leasing.cancel()
                    await asyncio.wait({leasing})
                if self._runs:
                    patience.reschedule(asyncio.get_running_loop().time() + grace)
                self._give_back_unbegun()
        except TimeoutError:
            log.warning("drained: sessions that had not ended after %g s are given back", grace)

    def _give_back_unbegun(self) -> None:
        """Sessions whose agent has not begun lose nothing on another node."""
        for run in self._runs.values():
            if run.task is not None and run.status in (SessionStatus.INIT, SessionStatus.READY):
                run.task.cancel()

    async def _reap(self) -> None:
        """End what a previous life of this node left behind; its sessions are leased anew."""
        for name in self._settings.runtimes:
            count = await plugins.load("runtimes", name).reap(self._services.host)
            if count:
                log.warning("ended %d sandboxes that an earlier run left behind (%s)", count, name)

    async def _sweep_forever(self) -> None:
        while True:
            at_work = {run.name for run in self._runs.values()}
            if count := await asyncio.to_thread(remove_expired, self._services, at_work):
                log.info("removed %d files and directories of leases that ended without a result", count)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _lease_forever(self, group: asyncio.TaskGroup) -> None:
        while True:
            seats = await self._services.pools.entrance.free_seats()
            try:
                # Only now: a place may have been long in coming.
                allowed = await self._admission.allowed()
                request = LeaseRequest(
                    max_sessions=min(len(seats), MOST_LEASES, allowed),
                    wait_seconds=LEASE_WAIT_SECONDS,
                    runtimes=self._settings.runtimes,
                    avoid=self._admission.breaker.suspects,
                )
                for lease in (await self._lease(request)).leases:
                    self._start(group, lease, seats.pop())
            finally:
                while seats:
                    seats.pop().leave()

    async def _lease(self, request: LeaseRequest) -> Leases:
        """Ask for work; what is answered while the node is being stopped is given back, not lost."""
        asked = time.monotonic()
        asking = asyncio.create_task(
            retry_forever("ask for work", self._client.lease, self._settings.name, request)
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            age = time.monotonic() - asked
            await asyncio.wait({asking}, timeout=max(0.0, PROMPT_SECONDS - age))
            if asking.done() and asking.exception() is None:
                for lease in asking.result().leases:
                    await self._give_back(lease)
            asking.cancel()
            raise

    def _start(self, group: asyncio.TaskGroup, lease: Lease, seat: Seat) -> None:
        session_id = lease.session_id
        former = self._runs.get(session_id)
        if former is not None and former.task is not None:
            log.warning("session %s: leased anew, ending what its lost lease began", session_id)
            former.is_lost = True
        run = SessionRun(
            lease=lease,
            services=self._services,
            captures=self._captures,
            changed=lambda: self._tell_soon(session_id),
        )
        self._runs[session_id] = run
        self._admission.breaker.began(run.name)
        with logs.about(session=session_id, task=lease.task.id):
            run.task = group.create_task(self._attend(run, seat, former), name=session_id)
        self._tell_soon(session_id)

    def _is_latest(self, run: SessionRun) -> bool:
        """Whether the session has not come back to this node under another lease."""
        return self._runs.get(run.lease.session_id) is run

    def _tell_of_trouble(self) -> None:
        self._unreported_trouble = True
        self._beat_now.set()

    def _tell_soon(self, session_id: str) -> None:
        self._changed.add(session_id)
        self._beat_now.set()

    async def _attend(self, run: SessionRun, seat: Seat, former: SessionRun | None) -> None:
        """Run one session and see to its end, however it comes."""
        result: SessionResult | None = None
        try:
            with seat:
                ended = await self._result_of(run, seat, former)
                run.task = None
                if ended is not None:
                    result = await self._deliver_even_if_cancelled(run, ended)
        except Exception:
            log.exception(
                "session %s: lost to an internal error; its lease will expire", run.lease.session_id
            )
        finally:
            run.close()
            self._captures.drop(run.growth)
            self._admission.ended(run.name, run.lease.task.id, result)
            if self._is_latest(run):
                del self._runs[run.lease.session_id]

    async def _result_of(
        self, run: SessionRun, seat: Seat, former: SessionRun | None
    ) -> SessionResult | None:
        """How the session ended; None if it is no longer this node's."""
        try:
            if former is not None:
                # The gateway knows a session by its id, and serves it once at a time.
                await self._end(former)
            return await run.run(seat)
        except asyncio.CancelledError:
            if run.is_lost:
                return None
            if run.is_called_off:
                return run.result(SessionStatus.CANCELLED)
            await self._send_rest(run)
            await self._give_back(run.lease)
            raise

    async def _send_rest(self, run: SessionRun) -> None:
        """Send the rest of the session's capture, from which another node continues it."""
        try:
            async with asyncio.timeout(LAST_DELIVERY_SECONDS):
                await self._captures.finish(run.growth)
        except (PolarError, TimeoutError) as error:
            told = str(error) or "no answer in time"
            log.warning("session %s: its capture was not sent completely: %s", run.lease.session_id, told)

    async def _deliver_even_if_cancelled(self, run: SessionRun, ended: SessionResult) -> SessionResult:
        """A finished session is not thrown away because the node is asked to stop just now."""
        delivery = asyncio.create_task(self._deliver(run, ended))
        try:
            return await asyncio.shield(delivery)
        except asyncio.CancelledError:
            await asyncio.wait({delivery}, timeout=LAST_DELIVERY_SECONDS)
            delivery.cancel()
            raise

    async def _deliver(self, run: SessionRun, ended: SessionResult) -> SessionResult:
        """Store the recording, the artifacts and the result; only then is the capture removed."""
        delivery = await run.pack(ended)
        session_id, result = delivery.session_id, delivery.result
        deliveries = self._services.metrics.deliveries
        try:
            await retry_forever("deliver a session", self._uploader.deliver, delivery)
        except PolarError as error:
            is_refused = isinstance(error, Conflict)
            deliveries.labels("refused" if is_refused else "failed").inc()
            level, what = (
                (logging.WARNING, "refused") if is_refused else (logging.ERROR, "could not be stored")
            )
            log.log(level, "session %s: result %s, its capture is kept: %s", session_id, what, error)
            return result
        deliveries.labels("stored").inc()
        await asyncio.to_thread(run.clear_away)
        log.info(
            "session %s %s: reward %s, %d model calls, %d tokens%s",
            session_id,
            result.status,
            result.reward,
            result.stats.completions,
            result.stats.sampled_tokens,
            f": {result.error}" if result.error else "",
        )
        return result

    async def _give_back(self, lease: Lease) -> None:
        try:
            await self._client.release(lease.session_id, Release(key=lease.key))
        except PolarError as error:
            log.info("session %s: not given back (%s); its lease will expire", lease.session_id, error)

    async def _heartbeats(self) -> None:
        """Renew all leases every so often; a session that changes its stage is told of at once, by itself."""
        loop = asyncio.get_running_loop()
        pause = min(self._lease_seconds / 3, BEAT_SECONDS)
        all_at = loop.time() + pause
        async with asyncio.TaskGroup() as endings:
            while True:
                try:
                    async with asyncio.timeout_at(all_at):
                        await self._beat_now.wait()
                except TimeoutError:
                    pass
                self._beat_now.clear()
                changed, self._changed = self._changed, set()
                runs = dict(self._runs)
                if loop.time() < all_at:
                    runs = {id: run for id, run in runs.items() if id in changed}
                else:
                    all_at = loop.time() + pause
                if not runs and not self._unreported_trouble:
                    continue
                try:
                    # A connection that is dead without a sign must not cost the leases.
                    async with asyncio.timeout(self._lease_seconds / 2):
                        await self._beat(runs, endings)
                except (Unavailable, TimeoutError) as error:
                    log.warning("heartbeat did not reach the server: %s", str(error) or "no answer in time")

    async def _beat(self, runs: Mapping[str, SessionRun], endings: asyncio.TaskGroup) -> None:
        beats = tuple(
            SessionBeat(
                session_id=session_id,
                key=run.lease.key,
                status=run.status,
                progress=self._gateway.progress(session_id),
                entered=run.unreported(),
            )
            for session_id, run in runs.items()
        )
        trouble = self._admission.trouble
        heartbeat = Heartbeat(sessions=beats, trouble=trouble and trouble[:LONGEST_TROUBLE])
        answer = await self._client.heartbeat(self._settings.name, heartbeat)
        self._unreported_trouble = self._admission.trouble != trouble
        for beat in beats:
            runs[beat.session_id].mark_reported(len(beat.entered))
        for session_id, run in runs.items():
            # A session that came back meanwhile under another lease is not the one that was told of.
            if not self._is_latest(run) or run.task is None:
                continue
            if session_id in answer.lost and not run.is_lost:
                log.warning("session %s: its lease is lost, ending it", session_id)
                run.is_lost = True
            elif session_id in answer.cancel and not run.is_called_off:
                run.is_called_off = True
            else:
                continue
            endings.create_task(self._end(run))

    async def _end(self, run: SessionRun) -> None:
        """End a session in its turn: were a thousand ended at once, heartbeats would wait for them."""
        async with self._ending:
            if (task := run.task) is None:
                return
            # Who is ending already is clearing away, and is not to be broken off in it.
            if not task.cancelling():
                task.cancel()
            await asyncio.wait({task})


def _first(failure: Exception) -> Exception:
    """The failure that ended the others; a server that refuses the node is such a one."""
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure


async def join(client: AsyncClient, settings: NodeSettings) -> Joined:
    """Introduce a node to its server, before anything is started for it. The server is waited for while it
    cannot be reached; PolarError if it refuses."""
    try:
        asked = Join(version=__version__, places=places(settings), runtimes=settings.runtimes)
        joined = await retry_forever("join", client.join, settings.name, asked)
    # A server of another version may not know all that a node says of itself.
    except (NotFound, InvalidInput):
        raise Conflict(
            f"the server at {client.server} is of a version that no node of version {__version__} can join",
            hint="install the same version of Polar on both",
        ) from None
    if joined.version != __version__:
        log.warning("the server is of version %s, this node of version %s", joined.version, __version__)
    if joined.is_draining:
        log.warning("this node was drained and gets no sessions until `polar nodes resume %s`", settings.name)
    return joined
