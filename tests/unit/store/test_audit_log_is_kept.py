"""The audit log in the store: in order, found by what is asked for, and let go only by its age."""

from __future__ import annotations

from typing import Any

from polar.models.access import Role
from polar.store.audit import LONGEST_DETAIL, AuditFilter, Noted
from polar.store.retention import Retention, sweep
from polar.store.store import Store
from tests.fakes.control_plane import Clock


async def test_entries_are_found_newest_first_and_in_pages(store: Store) -> None:
    await store.audit.append([Noted("submit_task", 201, object=str(number)) for number in range(5)])
    first = await store.audit.page(limit=3)
    rest = await store.audit.page(limit=3, before=first.next)
    assert [entry.object for entry in (*first.entries, *rest.entries)] == ["4", "3", "2", "1", "0"]
    assert rest.next is None


async def test_filters_find_what_is_asked_for(store: Store, clock: Clock) -> None:
    await store.audit.append([Noted("submit_task", 201, "alice", Role.TRAINER, "10.0.0.1", "t1")])
    clock.now += 10
    await store.audit.append(
        [
            Noted("submit_task", 403, "bob", Role.READ_ONLY, "10.0.0.2", "t1", "x" * 5_000),
            Noted("cancel_task", 200, "alice", Role.TRAINER, "10.0.0.1", "t2"),
        ]
    )

    async def found(**wanted: Any) -> list[tuple[str | None, str]]:
        page = await store.audit.page(AuditFilter(**wanted))
        return [(entry.actor, entry.action) for entry in page.entries]

    assert await found(actor="bob") == [("bob", "submit_task")]
    assert await found(object="t1") == [("bob", "submit_task"), ("alice", "submit_task")]
    assert await found(action="cancel_task") == [("alice", "cancel_task")]
    assert await found(refused=True) == [("bob", "submit_task")]
    assert await found(since=clock.now) == [("alice", "cancel_task"), ("bob", "submit_task")]
    (refused,) = (await store.audit.page(AuditFilter(refused=True))).entries
    assert (refused.role, refused.address, refused.status) == (Role.READ_ONLY, "10.0.0.2", 403)
    assert len(refused.detail or "") == LONGEST_DETAIL


async def test_old_entries_go_only_where_that_is_asked_for(store: Store, clock: Clock) -> None:
    await store.audit.append([Noted("old", 200)])
    clock.now += 100
    await store.audit.append([Noted("new", 200)])
    assert (await sweep(store, Retention())).audit == 0
    assert (await sweep(store, Retention(audit=50))).audit == 1
    assert [entry.action for entry in (await store.audit.page()).entries] == ["new"]
