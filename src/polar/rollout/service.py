"""What the control plane does with the store: schedules sessions, wakes who waits, expires leases."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext

from polar import __version__
from polar.config.plugins import check_components
from polar.config.settings import ServerSettings
from polar.errors import Conflict, InvalidInput, NotFound, PolarError, Unavailable, concerning
from polar.models.dashboard import NodeOverview
from polar.models.delivery import CaptureLengths, DeliveryAnswer
from polar.models.session import LeaseKey, Origin
from polar.models.task import MAX_ID, BudgetScope, TaskSpec
from polar.models.views import (
    NODE_PROTOCOL,
    BranchRequest,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    Problem,
    Release,
    ReplayRequest,
    ResultPage,
    SessionFilter,
    SessionPage,
    SessionView,
    TaskBatchView,
    TaskView,
)
from polar.rollout.access import Caller
from polar.rollout.dashboard.live import Live
from polar.rollout.dashboard.watch import Watches
from polar.rollout.long_poll import Gone, Notifier
from polar.rollout.metrics import ServerMetrics
from polar.rollout.policy import PolicyService, mark_stale
from polar.rollout.problems import problem_of
from polar.rollout.uploads import uploaded, uploaded_growth
from polar.rollout.webhooks import WebhookSender, check_webhook, tried_again
from polar.runtimes.allow_list import AllowList
from polar.store.delivery import Retries
from polar.store.leases import CLOCK_SECONDS, fenced_off
from polar.store.retention import Retention, Swept, sweep
from polar.store.store import Blob, Store
from polar.telemetry.page import MetricsPage

log = logging.getLogger(__name__)

ORDER_SECONDS = 10.0
"""How long a transaction may hold back the results that were stored after it began."""

MEASURE_SECONDS = 60.0
"""How often the server counts what it keeps of captures."""

SWEEP_SECONDS = 3600.0
"""How often the server looks for what was kept long enough."""


class RolloutService:
    """The control plane without its HTTP; keeps nothing of a session in memory."""

    def __init__(self, store: Store, settings: ServerSettings, webhook_secret: str | None = None) -> None:
        self.store = store
        self._settings = settings
        self._queued = Notifier()
        self._ended = Notifier()
        self.policy = PolicyService(store.policy)
        self._captured_bytes = 0
        """What was kept of captures when it was last counted, and since."""
        self.page = MetricsPage()
        self._metrics = ServerMetrics(store)
        self.page.add(self._metrics.families)
        self.live = Live(store)
        self.watches = Watches(store)
        self._webhook_secret = webhook_secret or settings.webhooks.secret
        self._webhook_hosts = AllowList.parse(settings.webhooks.allow)
        self._retries = Retries(settings.max_attempts, settings.retry_seconds)

    async def submit_all(self, tasks: Sequence[TaskSpec]) -> TaskBatchView:
        """Store several tasks, all or none."""
        for task in tasks:
            with concerning(f"task {task.id!r}") if len(tasks) > 1 else nullcontext():
                check_components(task, self._settings.tasks)
                check_webhook(task, self._webhook_hosts)
        allowed = await self.store.nodes.runtimes()
        for task in tasks:
            _check_runtime(task, allowed)
        submitted = await self.store.tasks.submit_all(tasks)
        if new := sum(is_new for _, is_new in submitted):
            self._metrics.submitted.inc(new)
            self._queued.notify()
        known = dict.fromkeys(view.spec.id for view, is_new in submitted if not is_new)
        return TaskBatchView(tasks=tuple(view for view, _ in submitted), known=tuple(known))

    async def cancel_task(self, id: str) -> TaskView:
        view = await self.store.tasks.cancel(id)
        self._ended.notify()
        return view

    async def cancel_session(self, id: str) -> SessionView:
        view = await self.store.sessions.cancel(id)
        self._ended.notify()
        self.watches.look([id])
        return view

    async def branch(self, session_id: str, asked: BranchRequest) -> SessionPage:
        """Add sessions to a task that begin with the recorded answers of one of its own."""
        session = await self.store.recorded(session_id, asked.calls)
        origin = _origin(session, asked, samples_on=True, budgets=asked.budgets)
        added, is_new = await self.store.branches.add(
            session.task_id, origin, asked.samples, asked.request_id
        )
        if is_new:
            self._queued.notify()
        return SessionPage(sessions=added)

    async def replay(self, session_id: str, asked: ReplayRequest) -> SessionView:
        """Submit a copy of a session's task whose one session follows the recording."""
        session = await self.store.recorded(session_id, asked.calls)
        original = await self.store.tasks.get(session.task_id)
        task = replay_of(original.spec, session, asked.request_id)
        check_components(task, self._settings.tasks)
        _check_runtime(task, await self.store.nodes.runtimes())
        origin = _origin(session, asked, samples_on=asked.samples_on)
        _, is_new = await self.store.tasks.submit(task, origin)
        if is_new:
            self._metrics.submitted.inc()
            self._queued.notify()
        (replayed,) = (await self.store.sessions.page(SessionFilter(task_id=task.id), limit=1)).sessions
        return replayed

    async def results(
        self, cursor: int, *, limit: int, task_ids: Collection[str] | None, wait_seconds: float, gone: Gone
    ) -> ResultPage:
        """What ended after `cursor`; waits for the first of it. An empty page says that there is nothing."""

        async def read() -> ResultPage:
            return await self.store.results.after(cursor, limit=limit, task_ids=task_ids)

        async def read_or_end() -> ResultPage | None:
            is_end = await self.store.results.is_end(cursor, task_ids=task_ids)
            page = await read()
            return page if is_end or page.results else None

        page = await self._ended.long_poll(read, lambda page: bool(page.results), wait_seconds, gone)
        if page.results:
            return page
        # What is stored may have to wait for what was begun before it: that is not the end of the feed.
        last = await self._ended.long_poll(read_or_end, lambda page: page is not None, ORDER_SECONDS, gone)
        if last is None:
            raise Unavailable("results are stored that cannot be shown yet", hint="ask again")
        return last

    async def join(self, node: str, join: Join) -> Joined:
        """Take a node; Conflict if it speaks another protocol."""
        if join.protocol != NODE_PROTOCOL:
            log.warning("node %s refused: it speaks protocol %d", node, join.protocol)
            raise Conflict(
                f"node {node} of version {join.version} speaks protocol {join.protocol},"
                f" this server of version {__version__} speaks {NODE_PROTOCOL}",
                hint="install the same version of Polar on both",
            )
        log.debug("node %s of version %s has joined", node, join.version)
        is_draining = await self.store.nodes.join(node, join.places, join.runtimes)
        return Joined(
            version=__version__,
            lease_seconds=self._settings.lease_seconds,
            resume_bytes=self._settings.resume_bytes,
            is_draining=is_draining,
        )

    async def resume_node(self, name: str) -> NodeOverview:
        view = await self.store.nodes.resume(name)
        self._queued.notify()
        return view

    async def mark_stale(self, page: ResultPage, max_staleness: int | None) -> ResultPage:
        """The page with the policy's version and the names of stale results."""
        if not page.results:
            return page
        limit = self._settings.max_staleness if max_staleness is None else max_staleness
        return mark_stale(page, (await self.store.policy.wanted()).version, limit)

    async def lease(self, node: str, request: LeaseRequest, gone: Gone) -> Leases:
        """Sessions for a node; waits for the first."""

        async def claim() -> Leases:
            if await gone():
                return Leases(leases=())
            return Leases(
                leases=await self.store.leases.claim(
                    node,
                    limit=request.max_sessions,
                    runtimes=request.runtimes,
                    seconds=self._settings.lease_seconds,
                    avoid=request.avoid,
                )
            )

        claimed = await self._queued.long_poll(
            claim, lambda claimed: bool(claimed.leases), request.wait_seconds, gone
        )
        self._metrics.leased.inc(len(claimed.leases))
        return claimed

    async def heartbeat(self, node: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        answer = await self.store.leases.heartbeat(
            node,
            heartbeat.sessions,
            seconds=self._settings.lease_seconds,
            trouble=heartbeat.trouble,
        )
        self.watches.look([beat.session_id for beat in heartbeat.sessions])
        return answer

    async def deliver(self, node: str, chunks: AsyncIterator[bytes], caller: Caller) -> DeliveryAnswer:
        """Store what a node delivers; what is wrong with one delivery harms no other."""
        async with uploaded(chunks, self.store) as deliveries:
            outcomes = await self.store.deliver(deliveries, self._retries)
        problems: list[Problem | None] = []
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            is_retried = self._retries.allows(delivery.result, delivery.result.attempt)
            self._metrics.delivered(delivery.result, outcome, is_retried=is_retried)
            if is_retried or delivery.result.branch_at:
                self._queued.notify()
            problem = None
            if isinstance(outcome, PolarError):
                status, problem = problem_of(outcome)
                caller.log(status, problem.error, about=delivery.session_id)
            problems.append(problem)
        self._ended.notify()
        self.watches.look([delivery.session_id for delivery in deliveries])
        if refused := len(problems) - problems.count(None):
            log.warning("node %s: %d of %d deliveries refused", node, refused, len(deliveries))
        return DeliveryAnswer(problems=tuple(problems))

    async def keep_captures(self, chunks: AsyncIterator[bytes]) -> CaptureLengths:
        """Keep what the captures of running sessions have grown by."""
        grown = await uploaded_growth(chunks)
        has_room = self._captured_bytes < self._settings.resume_total_bytes
        most_bytes = self._settings.resume_bytes if has_room else 0
        stored = await self.store.captures.append(grown, most_bytes=most_bytes)
        self._captured_bytes += sum(len(one.data) for one in grown) if has_room else 0
        self.watches.look([one.session_id for one in grown])
        return CaptureLengths(lengths=tuple(stored))

    async def capture(self, session_id: str, key: LeaseKey) -> AsyncIterator[bytes]:
        """What earlier attempts at a session captured, for the node that holds it; Conflict for others."""
        await self._check_lease(session_id, key)
        return self.store.captures.read(session_id)

    async def origin(self, session_id: str, key: LeaseKey) -> Blob:
        """The recording that a session begins with, for the node that holds it; Conflict for others."""
        await self._check_lease(session_id, key)
        origin = (await self.store.sessions.get(session_id)).origin
        if origin is None:
            raise NotFound(f"session {session_id!r} begins with no recording")
        return await self.store.recording(origin.session_id)

    async def _check_lease(self, session_id: str, key: LeaseKey) -> None:
        if not all(await self.store.leases.find_leased([(session_id, key)])):
            raise fenced_off(session_id)

    async def release(self, session_id: str, given_back: Release) -> None:
        self._metrics.given_back.inc()
        await self.store.leases.release(session_id, given_back.key)
        self._queued.notify()
        self._ended.notify()

    @asynccontextmanager
    async def housekeeping(self) -> AsyncIterator[None]:
        """While the body runs: expire leases of silent nodes, drop what is past its retention, and send
        webhooks."""
        sending = [self._webhook_sender().run()] if self._webhook_hosts else []
        chores = [self._expire_forever(), self._sweep_forever(), self._measure_forever()]
        running = set(map(asyncio.create_task, [*sending, *chores]))
        try:
            yield
        finally:
            for chore in running:
                chore.cancel()
            await asyncio.wait(running)

    def _webhook_sender(self) -> WebhookSender:
        if self._webhook_secret is None:
            raise InvalidInput(
                "server.webhooks.allow is set, and there is no secret to sign webhooks with",
                hint="set server.webhooks.secret or POLAR_WEBHOOK_SECRET",
            )
        return WebhookSender(
            self.store.webhooks,
            self._settings.webhooks,
            self._webhook_secret,
            self._ended,
            self._metrics.webhook_attempts,
        )

    def stop_waiting(self) -> None:
        """Answer every waiting request now, and hold none back from now on."""
        self.policy.stop_waiting()
        self.live.stop()
        self.watches.close()
        self._queued.close()
        self._ended.close()

    async def _sweep_forever(self) -> None:
        keep = Retention(
            recordings=_days(self._settings.keep_recordings_days),
            artifacts=_days(self._settings.keep_artifacts_days),
            events=_days(self._settings.keep_events_days),
            orphans=self._settings.keep_orphans_hours * 3600,
        )

        async def remove_expired() -> None:
            swept = await sweep(self.store, keep)
            if swept != Swept():
                log.info("removed expired data: %s", swept)

        await repeat("remove expired data", remove_expired, SWEEP_SECONDS)

    async def _measure_forever(self) -> None:
        await repeat("count what is captured", self._measure, MEASURE_SECONDS)

    async def _measure(self) -> None:
        """Count what is kept of captures."""
        self._captured_bytes = await self.store.captures.size()
        self._metrics.captured_bytes.set(self._captured_bytes)
        if self._captured_bytes >= self._settings.resume_total_bytes:
            log.warning("captures are no longer kept: server.resume_total_bytes is reached")

    async def _expire_forever(self) -> None:
        lease_seconds = self._settings.lease_seconds
        # While the server was down no node could renew: give those that live one lease to do it.
        await asyncio.sleep(lease_seconds)
        await repeat("check leases", self._expire, min(lease_seconds / 3, 5.0))

    async def _expire(self) -> None:
        lease_seconds = self._settings.lease_seconds
        behind = await self.store.database.set_clock()
        if abs(behind) > CLOCK_SECONDS:
            log.warning("the database's clock was set by %.0f s", behind)
            # By the new time all leases may be over: again one for the nodes that live.
            await asyncio.sleep(lease_seconds)
        expired = await self.store.leases.expire(
            max_attempts=self._settings.max_attempts, longest=lease_seconds
        )
        for outcome, count, news in (
            ("requeued", expired.requeued, self._queued),
            ("ended", expired.ended, self._ended),
        ):
            self._metrics.expired.labels(outcome).inc(count)
            if count:
                log.warning("%d sessions of silent nodes were %s", count, outcome)
                news.notify()


def _origin(
    session: SessionView,
    asked: BranchRequest | ReplayRequest,
    *,
    samples_on: bool,
    budgets: BudgetScope = BudgetScope.NEW,
) -> Origin:
    return Origin(
        session_id=session.id,
        calls=asked.calls,
        samples_on=samples_on,
        on_divergence=asked.on_divergence,
        budgets=budgets,
        depth=1 if session.origin is None else session.origin.depth + 1,
    )


def replay_of(task: TaskSpec, session: SessionView, request_id: str | None) -> TaskSpec:
    """The task of which a replay is the only session, with the seed that the session had; under an id that
    follows from the request's, if it has one."""
    mark = hashlib.sha256(request_id.encode()).hexdigest() if request_id else secrets.token_hex()
    ending = f"-replay-{mark[:12]}"
    sampling = task.sampling
    if sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": (sampling.seed + session.sample) % 2**63})
    changes = {
        "id": session.id[: MAX_ID - len(ending)] + ending,
        "samples": 1,
        "early_stop": None,
        "branching": None,
        "webhook": None,
        "sampling": sampling,
    }
    return task.model_copy(update=changes)


async def repeat(purpose: str, act: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Do something for ever, with pauses in between."""
    while True:
        with tried_again(purpose):
            await act()
        await asyncio.sleep(seconds)


def _days(days: float | None) -> float | None:
    return None if days is None else days * 86_400


def _check_runtime(task: TaskSpec, allowed: Collection[str]) -> None:
    """InvalidInput unless a node allows the task's runtime, or no node has joined yet."""
    name = task.runtime.name
    if allowed and name not in allowed:
        raise InvalidInput(
            f"task {task.id!r}: runtime.name: no node of this server allows {name!r}",
            hint=f"name {' or '.join(sorted(allowed))}, or have a node's owner add {name} to node.runtimes"
            " in its settings and start it again",
        )
