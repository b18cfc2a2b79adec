"""Sessions are leased in order, to one node at a time, and their results taken exactly once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, text

from polar.errors import Conflict, InvalidInput, NotFound
from polar.models.delivery import Delivery
from polar.models.session import FailureReason, Lease, LeaseKey, Progress, SessionStatus
from polar.models.views import SessionBeat
from polar.store.database import Database
from polar.store.leases import waiting
from polar.store.store import Store
from polar.store.tables import sessions
from tests.databases import fresh_postgres
from tests.fakes.control_plane import Clock, complete, idle_task, result_of


async def claim(store: Store, node: str = "node", limit: int = 1) -> tuple[Lease, ...]:
    return await store.leases.claim(node, limit=limit, runtimes=["idle"], seconds=10)


async def test_highest_priority_first_then_oldest(store: Store) -> None:
    for id, priority in (("low", 10), ("old", 50), ("new", 50), ("high", 90)):
        await store.tasks.submit(idle_task(id, priority=priority))
    assert [lease.task.id for lease in await claim(store, limit=4)] == ["high", "old", "new", "low"]


async def test_only_allowed_runtimes_are_leased_and_order_spans_them(store: Store) -> None:
    for id, runtime in (("a", "idle"), ("b", "other"), ("c", "third"), ("d", "idle")):
        await store.tasks.submit(idle_task(id, runtime=runtime))
    leases = await store.leases.claim("node", limit=9, runtimes=["other", "idle"], seconds=10)
    assert [lease.task.id for lease in leases] == ["a", "b", "d"]


async def test_many_callers_never_get_the_same_session(tmp_path: Path, database_url: str | None) -> None:
    async with (
        Store.open(tmp_path, database_url=database_url) as one,
        Store.open(tmp_path, database_url=database_url) as two,
    ):
        for number in range(10):
            await one.tasks.submit(idle_task(f"t{number}", samples=10))
        stores = [one, two] * 10
        answers = await asyncio.gather(
            *(claim(store, f"n{number}", limit=7) for number, store in enumerate(stores))
        )
        # What one transaction has locked another skips, and finds again when it is left over.
        rest = await claim(one, limit=100)
    leased = [lease.session_id for leases in (*answers, rest) for lease in leases]
    assert len(leased) == len(set(leased)) == 100


async def test_claim_reads_the_queue_index_in_order(tmp_path: Path) -> None:
    def plan(connection: Connection) -> list[str]:
        compiled = (
            waiting("idle", 0.0)
            .limit(4)
            .compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        )
        return [row.detail for row in connection.execute(text(f"EXPLAIN QUERY PLAN {compiled}"))]

    async with Database.open(tmp_path / "db") as database:
        assert await database.read(plan) == ["SEARCH sessions USING INDEX ix_sessions_queue (runtime=?)"]


async def test_claim_on_postgres_reads_the_queue_index_and_skips_what_others_lock() -> None:
    def plan(connection: Connection) -> str:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        compiled = (
            waiting("idle", 0.0)
            .limit(4)
            .with_for_update(skip_locked=True, key_share=True)
            .compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        )
        assert "SKIP LOCKED" in str(compiled)
        return "\n".join(row[0] for row in connection.execute(text(f"EXPLAIN {compiled}")))

    async with Database.open(fresh_postgres()) as database:
        found = await database.write(plan)
    assert "Index Scan using ix_sessions_queue" in found
    assert "Sort" not in found


async def test_heartbeats_may_skip_stages_and_never_go_back(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store)

    async def beat(status: SessionStatus) -> SessionStatus:
        told = SessionBeat(
            session_id=lease.session_id,
            key=lease.key,
            status=status,
            progress=Progress(completions=2, sampled_tokens=30),
        )
        assert not (await store.leases.heartbeat("node", [told], seconds=10)).lost
        view = await store.sessions.get(lease.session_id)
        assert view.progress == Progress(completions=2, sampled_tokens=30)
        return view.status

    assert await beat(SessionStatus.RUNNING) is SessionStatus.RUNNING
    assert await beat(SessionStatus.INIT) is SessionStatus.RUNNING
    assert await beat(SessionStatus.COMPLETED) is SessionStatus.RUNNING
    assert await beat(SessionStatus.QUEUED) is SessionStatus.RUNNING
    assert await beat(SessionStatus.POSTRUN) is SessionStatus.POSTRUN


async def test_silent_node_loses_its_session_to_another(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    (old,) = await claim(store, "silent")
    clock.now += 11
    assert (await store.leases.expire(max_attempts=3)).requeued == 1
    with pytest.raises(Conflict, match="not leased under this key"):
        await complete(store, old.key, result_of(old))
    (new,) = await claim(store, "awake")
    assert (new.attempt, new.fencing_token) == (2, 2)
    with pytest.raises(Conflict, match="not leased under this key"):
        await complete(store, old.key, result_of(old))
    assert await complete(store, new.key, result_of(new))


async def test_session_that_is_never_finished_fails_and_says_why(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    for _ in range(2):
        await claim(store, "silent")
        clock.now += 11
        await store.leases.expire(max_attempts=2)
    (result,) = (await store.results.after(0)).results
    assert result.status is SessionStatus.FAILED
    assert result.error == "given up after 2 attempts: node 'silent' fell silent during the last"


async def test_released_session_keeps_its_attempts(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store)
    await store.leases.release(lease.session_id, lease.key)
    await store.leases.release(lease.session_id, lease.key)
    (again,) = await claim(store)
    assert (again.attempt, again.fencing_token) == (1, 2)
    with pytest.raises(Conflict):
        await store.leases.release(lease.session_id, lease.key)


async def test_same_result_under_an_older_lease_is_refused(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (old,) = await claim(store)
    await store.leases.release(old.session_id, old.key)
    (new,) = await claim(store)
    assert result_of(old) == result_of(new)
    await complete(store, new.key, result_of(new))
    with pytest.raises(Conflict, match="not leased under this key"):
        await complete(store, old.key, result_of(old))


async def test_second_result_that_differs_is_refused(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store)
    await complete(store, lease.key, result_of(lease, 1.0))
    with pytest.raises(Conflict, match="already has another result"):
        await complete(store, lease.key, result_of(lease, 0.0))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"task_id": "other"}, "result: must name task 'task' and sample 0"),
        ({"sample": 1}, "result: must name task 'task' and sample 0"),
        ({"status": SessionStatus.RUNNING}, "result.status"),
        ({"verdict": None}, "result.verdict"),
    ],
)
async def test_result_that_contradicts_its_session_is_refused(
    store: Store, changes: dict[str, object], field: str
) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store)
    with pytest.raises(InvalidInput, match=field):
        await complete(store, lease.key, result_of(lease).model_copy(update=changes))
    assert (await store.results.after(0)).results == ()


async def test_what_a_program_said_may_hold_any_character(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=3))
    odd, plain, again = await claim(store, limit=3)
    error = "exit code 1: \0ELF"
    failed = result_of(odd, status=SessionStatus.FAILED, error=error)
    deliveries = [
        Delivery(key=lease.key, result=result) for lease, result in ((odd, failed), (plain, result_of(plain)))
    ]
    assert await store.deliver(deliveries) == [True, True]
    assert await store.deliver(deliveries) == [False, False]
    passing = result_of(again, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE, error=error)
    await complete(store, again.key, passing)
    assert (await store.sessions.get(odd.session_id)).result == failed
    told = [(await store.events.of(lease.session_id))[-1].detail for lease in (odd, again)]
    assert told == ["exit code 1: \N{REPLACEMENT CHARACTER}ELF"] * 2


async def test_an_id_with_any_character_is_one_that_is_not_there(store: Store) -> None:
    with pytest.raises((NotFound, InvalidInput)):
        await store.sessions.get("\0")


async def test_a_node_cannot_speak_for_a_session_that_another_was_given(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2))
    (mine,) = await claim(store)
    (theirs,) = await store.leases.claim("other", limit=1, runtimes=["idle"], seconds=10)
    # Fencing tokens count from 1, so that anybody knows them; a secret of one's own opens nothing else.
    guessed = theirs.key.model_copy(update={"secret": mine.key.secret})
    beat = SessionBeat(session_id=theirs.session_id, key=guessed, status=SessionStatus.RUNNING)
    assert (await store.leases.heartbeat("other", [beat], seconds=10)).lost == (theirs.session_id,)
    with pytest.raises(Conflict):
        await complete(store, guessed, result_of(theirs))
    with pytest.raises(Conflict):
        await store.leases.release(theirs.session_id, guessed)
    assert await store.leases.find_leased([(theirs.session_id, guessed)]) == [False]
    assert await complete(store, theirs.key, result_of(theirs))
    with pytest.raises(Conflict):
        await complete(store, guessed, result_of(theirs))


async def test_no_secret_of_a_lease_is_stored(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store)
    rows = await store.database.read(lambda connection: list(connection.execute(select(sessions))))
    assert lease.key.secret not in repr(rows)
    assert lease.key.secret not in repr(lease)


async def test_unknown_session_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound, match="no session 'x'"):
        await store.leases.release("x", LeaseKey(fencing_token=1, secret=""))


async def test_feed_goes_on_from_its_cursor_and_filters_by_task(store: Store) -> None:
    for id in ("a", "b"):
        await store.tasks.submit(idle_task(id, samples=2))
    for lease in await claim(store, limit=4):
        await complete(store, lease.key, result_of(lease))
    first = await store.results.after(0, limit=3)
    assert [result.session_id for result in first.results] == ["a.0", "a.1", "b.0"]
    rest = await store.results.after(first.cursor)
    assert [result.session_id for result in rest.results] == ["b.1"]
    assert (await store.results.after(rest.cursor)).cursor == rest.cursor
    of_b = await store.results.after(0, task_ids=["b"])
    assert [result.session_id for result in of_b.results] == ["b.0", "b.1"]
    assert (await store.results.after(0, task_ids=[])).results == ()
