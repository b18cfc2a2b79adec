"""What attempts at a session have captured is kept for the next one, and goes when the session ends."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, func, select

from polar.models.delivery import CaptureGrowth
from polar.models.session import FailureReason, Lease, Origin, Progress, SessionStatus, TrajectoryStats
from polar.models.task import OnDivergence
from polar.models.views import SessionBeat
from polar.store.delivery import Retries
from polar.store.store import Store
from polar.store.tables import captures
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

MOST = 1_000


async def claim(store: Store, limit: int = 1) -> tuple[Lease, ...]:
    return await store.leases.claim("node", limit=limit, runtimes=["idle"], seconds=10)


async def begun(store: Store, id: str = "task") -> Lease:
    await store.tasks.submit(idle_task(id))
    (lease,) = await claim(store)
    return lease


def grown(lease: Lease, offset: int, data: bytes) -> CaptureGrowth:
    return CaptureGrowth(session_id=lease.session_id, key=lease.key, offset=offset, data=data)


async def append(store: Store, *growth: CaptureGrowth, most: int = MOST) -> list[int | None]:
    return await store.captures.append(growth, most_bytes=most)


async def kept(store: Store, session_id: str = "task.0") -> bytes:
    return b"".join([data async for data in store.captures.read(session_id)])


async def rows(store: Store) -> int:
    def count(connection: Connection) -> int:
        return connection.execute(select(func.count()).select_from(captures)).scalar_one()

    return await store.database.read(count)


async def test_what_is_sent_piece_by_piece_is_read_as_one(store: Store) -> None:
    lease = await begun(store)
    pieces = [bytes([number]) * (number + 1) for number in range(150)]
    offset = 0
    for piece in pieces:
        assert await append(store, grown(lease, offset, piece), most=1 << 20) == [offset + len(piece)]
        offset += len(piece)
    assert await kept(store) == b"".join(pieces)


async def test_what_is_there_already_changes_nothing_and_nothing_stands_behind_a_gap(store: Store) -> None:
    lease = await begun(store)
    assert await append(store, grown(lease, 0, b"abc")) == [3]
    assert await append(store, grown(lease, 0, b"abc")) == [3]
    assert await append(store, grown(lease, 1, b"bcde")) == [5]
    assert await append(store, grown(lease, 9, b"xyz")) == [5]
    assert await kept(store) == b"abcde"


async def test_a_key_that_is_not_the_sessions_own_stores_nothing_and_harms_no_other(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2))
    first, second = await claim(store, limit=2)
    forged = second.key.model_copy(update={"secret": "guessed"})
    unknown = first.model_copy(update={"session_id": "none.0"})
    answers = await append(
        store,
        grown(second.model_copy(update={"key": forged}), 0, b"forged"),
        grown(first, 0, b"mine"),
        grown(unknown, 0, b"nobody's"),
    )
    assert answers == [None, 4, None]
    assert (await kept(store, first.session_id), await kept(store, second.session_id)) == (b"mine", b"")


async def test_a_node_that_lost_its_lease_adds_nothing(store: Store, clock: Clock) -> None:
    old = await begun(store)
    await append(store, grown(old, 0, b"early"))
    clock.now += 11
    await store.leases.expire(max_attempts=3)
    assert await append(store, grown(old, 5, b" late")) == [None]
    (new,) = await claim(store)
    assert await append(store, grown(old, 5, b" late"), grown(new, 0, b", next")) == [None, 6]
    assert await kept(store) == b"early, next"


async def test_the_lease_after_a_lost_or_a_returned_one_goes_on_from_the_capture(
    store: Store, clock: Clock
) -> None:
    first = await begun(store)
    assert not first.continues
    await append(store, grown(first, 0, b"one"))
    clock.now += 11
    await store.leases.expire(max_attempts=3)
    (second,) = await claim(store)
    assert (second.origin, second.continues, second.attempt) == (None, True, 1)
    await store.leases.release(second.session_id, second.key)
    (third,) = await claim(store)
    assert (third.origin, third.continues, third.attempt) == (None, True, 1)
    told = [event.detail for event in await store.events.of("task.0") if event.status is SessionStatus.INIT]
    assert told == [None, *["continues from what earlier attempts captured"] * 2]


async def test_a_branch_continues_from_its_own_capture_and_keeps_its_origin(store: Store) -> None:
    ended = await begun(store)
    await complete(store, ended.key, result_of(ended))
    stop = OnDivergence.STOP
    origin = Origin(session_id=ended.session_id, calls=1, samples_on=False, on_divergence=stop, depth=2)
    await store.branches.add("task", origin, 1)
    (first,) = await claim(store)
    await store.leases.release(first.session_id, first.key)
    (second,) = await claim(store)
    assert first.origin == second.origin == origin
    assert not second.continues
    await append(store, grown(second, 0, b"with what it began with"))
    await store.leases.release(second.session_id, second.key)
    (third,) = await claim(store)
    assert (third.origin, third.continues) == (origin, True)
    assert (await store.sessions.get("task.1")).origin == origin


async def test_a_second_death_loses_nothing_that_the_first_attempt_had(store: Store, clock: Clock) -> None:
    for attempt, data in enumerate((b"first ", b"second ", b""), 1):
        lease = await begun(store) if attempt == 1 else (await claim(store))[0]
        await append(store, grown(lease, 0, data))
        clock.now += 11
        await store.leases.expire(max_attempts=9)
    assert await kept(store) == b"first second "


async def test_a_session_that_captured_nothing_begins_anew(store: Store) -> None:
    first = await begun(store)
    assert await append(store, grown(first, 0, b"")) == [0]
    await store.leases.release(first.session_id, first.key)
    (second,) = await claim(store)
    assert not second.continues


async def test_of_a_long_capture_the_beginning_is_kept_over_all_attempts(store: Store) -> None:
    first = await begun(store)
    assert await append(store, grown(first, 0, b"x" * 6), most=10) == [6]
    await store.leases.release(first.session_id, first.key)
    (second,) = await claim(store)
    assert await append(store, grown(second, 0, b"y" * 5), most=10) == [None]
    assert await append(store, grown(second, 0, b"y" * 4), most=10) == [4]
    assert await append(store, grown(second, 4, b"y"), most=10) == [None]
    assert await kept(store) == b"x" * 6 + b"y" * 4
    assert await append(store, grown(second, 4, b"y"), most=0) == [None]


async def test_a_session_whose_infrastructure_failed_begins_anew(store: Store) -> None:
    lease = await begun(store)
    await append(store, grown(lease, 0, b"captured"))
    failed = result_of(lease, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE, error="disk")
    await complete(store, lease.key, failed, retries=Retries(3, 0.0))
    assert await rows(store) == 0
    (again,) = await claim(store)
    assert (again.attempt, again.continues) == (2, False)


@pytest.mark.parametrize("status", [SessionStatus.COMPLETED, SessionStatus.FAILED, SessionStatus.CANCELLED])
async def test_what_was_captured_goes_with_the_result(store: Store, status: SessionStatus) -> None:
    lease, other = await begun(store), await begun(store, "other")
    await append(store, grown(lease, 0, b"captured"), grown(other, 0, b"too"))
    await complete(store, lease.key, result_of(lease, status=status))
    assert await kept(store) == b""
    assert await kept(store, other.session_id) == b"too"
    assert await append(store, grown(lease, 8, b" late")) == [None]
    assert await rows(store) == 1


async def test_what_was_captured_goes_with_a_session_that_is_given_up_and_its_tokens_are_counted(
    store: Store, clock: Clock
) -> None:
    lease = await begun(store)
    await append(store, grown(lease, 0, b"captured"))
    beat = SessionBeat(
        session_id=lease.session_id,
        key=lease.key,
        status=SessionStatus.RUNNING,
        progress=Progress(completions=2, sampled_tokens=30, replayed_tokens=12),
    )
    await store.leases.heartbeat("node", [beat], seconds=10)
    clock.now += 11
    await store.leases.expire(max_attempts=1)
    (lease,) = await claim(store)
    behind = beat.model_copy(update={"key": lease.key, "progress": Progress(completions=1, sampled_tokens=9)})
    await store.leases.heartbeat("node", [behind], seconds=10)
    clock.now += 11
    await store.leases.expire(max_attempts=1)
    assert await rows(store) == 0
    result = (await store.sessions.get("task.0")).result
    assert result is not None
    stats = result.stats
    assert (result.status, result.has_recording) == (SessionStatus.FAILED, False)
    assert (stats.completions, stats.sampled_tokens) == (2, 30)
    assert stats.excluded == {"unrecorded": 18, "replayed": 12}


async def test_an_attempt_that_captured_something_is_no_failed_one(store: Store, clock: Clock) -> None:
    """However often nodes die: only those that die before anything new is stored are counted."""
    await store.tasks.submit(idle_task("task"))
    for attempt in range(5):
        (lease,) = await claim(store)
        assert lease.attempt == 1
        assert await append(store, grown(lease, 0, b"answers %d, " % attempt)) == [11]
        clock.now += 11
        assert (await store.leases.expire(max_attempts=3)).requeued == 1
    for attempt in range(1, 4):
        (lease,) = await claim(store)
        assert lease.attempt == attempt
        clock.now += 11
        assert (await store.leases.expire(max_attempts=3)).ended == (attempt == 3)
    result = (await store.sessions.get("task.0")).result
    assert result is not None
    assert (result.status, result.attempt) == (SessionStatus.FAILED, 3)


@pytest.mark.parametrize("is_whole_task", [False, True])
async def test_what_was_captured_goes_with_a_session_that_is_cancelled_while_it_waits(
    store: Store, is_whole_task: bool
) -> None:
    lease = await begun(store)
    await append(store, grown(lease, 0, b"captured"))
    await store.leases.release(lease.session_id, lease.key)
    await (store.tasks.cancel("task") if is_whole_task else store.sessions.cancel("task.0"))
    assert await rows(store) == 0


async def test_what_was_captured_goes_with_a_session_that_is_no_longer_needed(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2, early_stop=1))
    first, second = await claim(store, limit=2)
    await append(store, grown(second, 0, b"captured"))
    await store.leases.release(second.session_id, second.key)
    usable = TrajectoryStats(sampled_tokens=1, trainable_tokens=1)
    await complete(store, first.key, result_of(first, stats=usable))
    assert await rows(store) == 0
