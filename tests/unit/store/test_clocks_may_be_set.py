"""A clock that is set while sessions run ends no lease early, and keeps none and no retry for ever."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from polar.models.session import FailureReason, Lease, SessionStatus
from polar.models.views import SessionBeat
from polar.store import database
from polar.store.delivery import Retries
from polar.store.leases import CLOCK_SECONDS, Expired
from polar.store.store import Store
from tests.databases import fresh_postgres
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

LEASE_SECONDS = 30.0
RETRY_SECONDS = 10.0
HOUR = 3600.0


async def claim(store: Store) -> tuple[Lease, ...]:
    return await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=LEASE_SECONDS)


async def lease_one(store: Store) -> SessionBeat:
    await store.tasks.submit(idle_task("t"))
    (lease,) = await claim(store)
    return SessionBeat(session_id=lease.session_id, key=lease.key, status=SessionStatus.INIT)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_machine_s_clock_may_be_set_while_the_server_runs(
    tmp_path: Path, database_url: str | None, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    off_by = 0.0
    monkeypatch.setattr(time, "time", lambda: true_time() + off_by)
    async with Store.open(tmp_path, time.time, database_url=database_url) as store:
        await lease_one(store)
        before = store.database.now()
        off_by = jump
        await store.database.set_clock()
        assert abs(store.database.now() - before) < LEASE_SECONDS / 2
        expired = await store.leases.expire(max_attempts=3, longest=LEASE_SECONDS)
        assert expired == Expired()


async def test_a_lease_given_before_the_clock_was_set_back_ends_like_one_given_now(
    store: Store, clock: Clock
) -> None:
    await lease_one(store)
    clock.now -= HOUR
    assert await store.leases.expire(max_attempts=3, longest=LEASE_SECONDS) == Expired()
    clock.now += LEASE_SECONDS + 1
    assert await store.leases.expire(max_attempts=3, longest=LEASE_SECONDS) == Expired(requeued=1)


async def fail_one(store: Store) -> None:
    """Leave a session in the queue that waits for its second attempt."""
    await store.tasks.submit(idle_task("t"))
    (lease,) = await claim(store)
    failed = result_of(lease, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE)
    await complete(store, lease.key, failed, retries=Retries(3, RETRY_SECONDS))
    assert not await claim(store)


async def test_a_retry_put_off_before_the_clock_was_set_back_is_not_put_off_by_as_much(
    store: Store, clock: Clock
) -> None:
    await fail_one(store)
    clock.now -= HOUR
    assert await claim(store)


async def test_clocks_of_servers_that_differ_a_little_shorten_no_retry(store: Store, clock: Clock) -> None:
    await fail_one(store)
    clock.now -= CLOCK_SECONDS
    assert not await claim(store)
    clock.now += CLOCK_SECONDS + RETRY_SECONDS
    assert await claim(store)


async def test_servers_agree_again_after_the_database_s_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from a server whose own clock is the one that is off."""
    url = fresh_postgres()
    off_by = 0.0
    async with Store.open(tmp_path / "two", database_url=url) as two:
        clocks = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + off_by)
        monkeypatch.setattr(database, "time", clocks)
        async with Store.open(tmp_path / "one", database_url=url) as one:
            off_by = HOUR
            assert one.database.now() - two.database.now() > HOUR / 2
            assert await one.database.set_clock() == pytest.approx(-HOUR, abs=5)
            assert one.database.now() == pytest.approx(two.database.now(), abs=5)
