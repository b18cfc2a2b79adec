"""Whatever order things happen in: no session is lost, each ends once, old leases are refused, and the next
one goes on from all that was captured."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polar.errors import Conflict
from polar.models.delivery import CaptureGrowth
from polar.models.session import FailureReason, Lease, Origin, SessionResult, SessionStatus, TrajectoryStats
from polar.models.task import TaskStatus
from polar.models.views import SessionBeat, SessionView
from polar.store.delivery import Retries
from polar.store.store import Store
from tests.databases import fresh_postgres
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

T = TypeVar("T")

LEASE_SECONDS = 10.0
MAX_ATTEMPTS = 2
MOST_CAPTURED = 8
RETRIES = Retries(MAX_ATTEMPTS, 0.0)
DEPTH = 2
"""Of the branches of the task with two samples."""
PLACES = st.integers(0, 5)
NODES = st.sampled_from(["north", "south"])
STAGES = [SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN]
ENDS = [SessionStatus.COMPLETED, SessionStatus.FAILED, SessionStatus.CANCELLED]


@dataclass
class Expected:
    """What the test knows of a session without asking the store."""

    holder: int | None = None
    """The fencing token of the lease that is its own."""
    node: str = ""
    expires_at: float = 0.0
    attempts: int = 0
    result: SessionResult | None = None
    stored_under: int | None = None
    """The fencing token of the lease that delivered the result."""
    cancel_requested: bool = False
    origin: Origin | None = None
    captured: bytes = b""
    """Under all its leases, for the next one."""
    sent: int = 0
    """How much of it under the lease that is its own."""
    seen: list[SessionStatus] = field(default_factory=lambda: [SessionStatus.QUEUED])


_S = SessionStatus
TRANSITIONS: dict[SessionStatus, frozenset[SessionStatus]] = {
    _S.QUEUED: frozenset({_S.INIT, _S.CANCELLED, _S.FAILED}),
    _S.INIT: frozenset({_S.READY, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.READY: frozenset({_S.RUNNING, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.POSTRUN, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.POSTRUN: frozenset({_S.COMPLETED, _S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""Back to QUEUED is the way of a session whose node died (its attempt is counted)."""


def test_nothing_leaves_an_ended_status_and_everything_else_can_be_cancelled() -> None:
    for status in SessionStatus:
        if status.ended:
            assert not TRANSITIONS[status]
        else:
            assert SessionStatus.CANCELLED in TRANSITIONS[status]


@cache
def empty_data_dir() -> Path:
    """Migrated once; every example begins with a copy."""
    directory = Path(tempfile.mkdtemp(prefix="polar-store-"))

    async def make() -> None:
        async with Store.open(directory):
            pass

    asyncio.run(make())
    return directory


def reachable(start: SessionStatus) -> set[SessionStatus]:
    found = {start}
    frontier = {start}
    while frontier:
        frontier = {after for status in frontier for after in TRANSITIONS[status]} - found
        found |= frontier
    return found


class LeaseProtocol(RuleBasedStateMachine):
    """On SQLite; see below for PostgreSQL."""

    def new_database(self) -> str | None:
        return None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.data_dir = Path(tempfile.mkdtemp(prefix="polar-lease-"))
        shutil.copytree(empty_data_dir(), self.data_dir, dirs_exist_ok=True)
        self.database_url = self.new_database()
        self.clock = Clock()
        self.parts = AsyncExitStack()
        self.store: Store
        self.sessions: dict[str, Expected] = {}
        self.tasks: set[str] = set()
        self.asked = 0
        self.ever_leased: list[Lease] = []
        self.open()

    def open(self) -> None:
        opened = Store.open(self.data_dir, self.clock, database_url=self.database_url)
        self.store = self.do(self.parts.enter_async_context(opened))

    def do(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    def teardown(self) -> None:
        self.do(self.parts.aclose())
        self.runner.close()
        shutil.rmtree(self.data_dir)

    def is_current(self, lease: Lease) -> bool:
        return self.sessions[lease.session_id].holder == lease.fencing_token

    def pick(self, place: int) -> Lease:
        """One of the leases given out last."""
        return self.ever_leased[-1 - place % min(len(self.ever_leased), 6)]

    @initialize(samples=st.integers(1, 3))
    def begin(self, samples: int) -> None:
        self.submit(samples)

    @rule(samples=st.integers(1, 3))
    def submit(self, samples: int) -> None:
        id = f"t{samples}"
        branching = {"at": "idle", "depth": DEPTH} if samples == 2 else None
        task = idle_task(id, samples=samples, priority=samples, branching=branching)
        view, is_new = self.do(self.store.tasks.submit(task))
        assert is_new == (id not in self.tasks)
        self.tasks.add(id)
        if is_new:
            assert view.status is TaskStatus.QUEUED
            self.sessions |= {f"{id}.{sample}": Expected() for sample in range(samples)}

    @rule(node=NODES, limit=st.integers(1, 4))
    def lease(self, node: str, limit: int) -> None:
        waiting = [id for id, known in self.sessions.items() if not known.holder and not known.result]
        claimed = self.do(
            self.store.leases.claim(node, limit=limit, runtimes=("idle",), seconds=LEASE_SECONDS)
        )
        assert len(claimed) == min(limit, len(waiting))
        for lease in claimed:
            known = self.sessions[lease.session_id]
            assert lease.session_id in waiting
            older = [it.fencing_token for it in self.ever_leased if it.session_id == lease.session_id]
            assert lease.fencing_token > max(older, default=0)
            known.attempts += 1
            assert lease.attempt == known.attempts
            assert (lease.origin, lease.continues) == (known.origin, bool(known.captured))
            known.sent = 0
            known.holder, known.node, known.expires_at = lease.fencing_token, node, lease.expires_at
        self.ever_leased += claimed

    @precondition(lambda self: self.ever_leased)
    @rule(place=PLACES, node=NODES, status=st.sampled_from(STAGES))
    def heartbeat(self, place: int, node: str, status: SessionStatus) -> None:
        lease = self.pick(place)
        known = self.sessions[lease.session_id]
        beat = SessionBeat(session_id=lease.session_id, key=lease.key, status=status)
        answer = self.do(self.store.leases.heartbeat(node, [beat], seconds=LEASE_SECONDS))
        is_held = self.is_current(lease) and known.node == node
        assert answer.lost == (() if is_held else (lease.session_id,))
        assert answer.cancel == ((lease.session_id,) if is_held and known.cancel_requested else ())
        if is_held:
            known.expires_at = self.clock.now + LEASE_SECONDS

    @precondition(lambda self: self.ever_leased)
    @rule(place=PLACES, data=st.binary(min_size=1, max_size=3), overlap=st.integers(0, 3))
    def capture_grows(self, place: int, data: bytes, overlap: int) -> None:
        lease = self.pick(place)
        known = self.sessions[lease.session_id]
        overlap = min(overlap, known.sent)
        repeated = known.captured[len(known.captured) - overlap :]
        growth = CaptureGrowth(
            session_id=lease.session_id, key=lease.key, offset=known.sent - overlap, data=repeated + data
        )
        (length,) = self.do(self.store.captures.append([growth], most_bytes=MOST_CAPTURED))
        is_taken = self.is_current(lease) and len(known.captured) + len(data) <= MOST_CAPTURED
        assert length == (known.sent + len(data) if is_taken else None)
        if is_taken:
            known.captured += data
            known.sent += len(data)

    @precondition(lambda self: self.ever_leased)
    @rule(place=PLACES)
    def infrastructure_fails(self, place: int) -> None:
        lease = self.pick(place)
        known = self.sessions[lease.session_id]
        failed = result_of(
            lease, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE, error="no engine"
        )

        def deliver() -> bool:
            return self.do(complete(self.store, lease.key, failed, retries=RETRIES))

        if not self.is_current(lease):
            return
        assert deliver() is True
        known.holder, known.captured = None, b""
        if known.attempts >= MAX_ATTEMPTS:
            known.result, known.stored_under = failed, lease.fencing_token
        elif known.cancel_requested:
            self.expect_end(lease.session_id, SessionStatus.CANCELLED)
        assert deliver() is False

    @precondition(lambda self: self.ever_leased)
    @rule(
        place=PLACES,
        status=st.sampled_from(ENDS),
        reward=st.sampled_from([0.0, 1.0]),
        branch_at=st.sampled_from([(), (1,)]),
    )
    def complete(self, place: int, status: SessionStatus, reward: float, branch_at: tuple[int, ...]) -> None:
        lease = self.pick(place)
        known = self.sessions[lease.session_id]
        stats = TrajectoryStats(completions=2)
        result = result_of(lease, reward, status, stats=stats, has_recording=True, branch_at=branch_at)

        def deliver() -> bool:
            return self.do(complete(self.store, lease.key, result, recording=b"recorded"))

        forged = lease.key.model_copy(update={"secret": "guessed"})
        with pytest.raises(Conflict):
            self.do(complete(self.store, forged, result))
        if self.is_current(lease):
            assert deliver() is True
            known.result, known.stored_under, known.holder = result, lease.fencing_token, None
            depth = known.origin.depth + 1 if known.origin else 1
            has_branches = lease.task.branching and depth <= DEPTH and not known.cancel_requested
            if has_branches and status is SessionStatus.COMPLETED and branch_at:
                origin = Origin(session_id=lease.session_id, calls=1, depth=depth)
                self.sessions[self.next_id(lease.task.id)] = Expected(origin=origin)
            assert deliver() is False
        elif known.result == result and known.stored_under == lease.fencing_token:
            assert deliver() is False
        else:
            with pytest.raises(Conflict):
                deliver()

    @precondition(lambda self: self.ever_leased)
    @rule(place=PLACES)
    def release(self, place: int) -> None:
        lease = self.pick(place)
        known = self.sessions[lease.session_id]
        is_current = self.is_current(lease)
        newest = max(it.fencing_token for it in self.ever_leased if it.session_id == lease.session_id)
        is_back = not known.holder and not known.result and lease.fencing_token == newest
        if not is_current and not is_back:
            with pytest.raises(Conflict):
                self.do(self.store.leases.release(lease.session_id, lease.key))
            return
        self.do(self.store.leases.release(lease.session_id, lease.key))
        if is_current:
            known.holder = None
            known.attempts -= 1
            if known.cancel_requested:
                self.expect_end(lease.session_id, SessionStatus.CANCELLED)

    @rule(place=PLACES, again=st.booleans())
    def branch(self, place: int, again: bool) -> None:
        id = sorted(self.sessions)[place % len(self.sessions)]
        task = id.rpartition(".")[0]
        self.asked += 1
        origin = Origin(session_id=id, calls=1)
        for _ in range(1 + again):
            added, _ = self.do(self.store.branches.add(task, origin, 1, f"request-{self.asked}"))
        assert [view.id for view in added] == [self.next_id(task)]
        self.sessions[added[0].id] = Expected(origin=origin)

    def next_id(self, task: str) -> str:
        return f"{task}.{sum(id.rpartition('.')[0] == task for id in self.sessions)}"

    @rule(seconds=st.sampled_from([LEASE_SECONDS, LEASE_SECONDS / 2]))
    def expire(self, seconds: float) -> None:
        self.clock.now += seconds
        self.do(self.store.leases.expire(max_attempts=MAX_ATTEMPTS))
        for id, known in self.sessions.items():
            if known.holder is None or known.expires_at > self.clock.now:
                continue
            known.holder = None
            if known.cancel_requested:
                self.expect_end(id, SessionStatus.CANCELLED)
            elif known.sent:
                known.attempts -= 1
            elif known.attempts >= MAX_ATTEMPTS:
                self.expect_end(id, SessionStatus.FAILED)

    @rule(node=NODES)
    def node_dies_and_another_takes_over(self, node: str) -> None:
        self.lease(node, limit=4)
        self.expire(LEASE_SECONDS)
        self.lease(node, limit=4)

    @rule(place=PLACES, whole_task=st.booleans())
    def cancel(self, place: int, whole_task: bool) -> None:
        id = sorted(self.sessions)[place % len(self.sessions)]
        if not whole_task:
            self.do(self.store.sessions.cancel(id))
            self.expect_cancelled(id)
            return
        task = id.rpartition(".")[0]
        self.do(self.store.tasks.cancel(task))
        for other in self.sessions:
            if other.rpartition(".")[0] == task:
                self.expect_cancelled(other)

    @rule()
    def restart(self) -> None:
        self.do(self.parts.aclose())
        self.open()

    def expect_cancelled(self, id: str) -> None:
        known = self.sessions[id]
        if known.holder is not None:
            known.cancel_requested = True
        elif known.result is None:
            self.expect_end(id, SessionStatus.CANCELLED)

    def expect_end(self, id: str, status: SessionStatus) -> None:
        """The server itself has ended the session and says why."""
        result = self.do(self.store.sessions.get(id)).result
        assert result is not None
        assert result.status is status
        assert result.error
        self.sessions[id].result = result

    @invariant()
    def store_agrees(self) -> None:
        page = self.do(self.store.sessions.page(limit=1000))
        views: dict[str, SessionView] = {view.id: view for view in page.sessions}
        assert views.keys() == self.sessions.keys()
        for id, known in self.sessions.items():
            view = views[id]
            assert view.result == known.result
            assert view.attempt == known.attempts
            assert view.origin == known.origin
            assert view.status in reachable(known.seen[-1])
            known.seen.append(view.status)
            if known.result:
                assert view.status is known.result.status
            elif known.holder:
                assert view.status in STAGES
                assert view.node == known.node
            else:
                assert view.status is SessionStatus.QUEUED
        assert self.do(self.store.sessions.counts()) == Counter(view.status for view in views.values())

    @invariant()
    def captures_are_kept_until_the_end(self) -> None:
        async def kept(id: str) -> bytes:
            return b"".join([data async for data in self.store.captures.read(id)])

        for id, known in self.sessions.items():
            assert self.do(kept(id)) == (b"" if known.result else known.captured)

    @invariant()
    def feed_has_every_result_once(self) -> None:
        feed = self.do(self.store.results.after(0, limit=1000)).results
        ended = [known.result for known in self.sessions.values() if known.result]
        assert len(feed) == len(ended)
        assert {result.session_id: result for result in feed} == {it.session_id: it for it in ended}


class LeaseProtocolOnPostgres(LeaseProtocol):
    def new_database(self) -> str | None:
        return fresh_postgres()


TestLeaseProtocol = LeaseProtocol.TestCase
TestLeaseProtocol.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestLeaseProtocolOnPostgres = LeaseProtocolOnPostgres.TestCase
TestLeaseProtocolOnPostgres.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
