"""A task is stored with all its sessions or not at all, once, and shows how far it is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import Conflict, InvalidInput, NotFound
from polar.models.session import Lease, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import SessionFilter
from polar.store.sessions import session_id
from polar.store.store import Store
from polar.store.tasks import digest
from tests.fakes.control_plane import complete, idle_task, result_of

# Few letters and many lengths: ids that begin alike, and ids too long for the plain form.
IDS = st.builds(
    lambda length, tail: ("x" * length + tail)[:128],
    st.integers(1, 128),
    st.text("x.01-", max_size=40),
)


async def claim(store: Store, limit: int = 1) -> list[Lease]:
    return list(await store.leases.claim("node", limit=limit, runtimes=["idle"], seconds=10))


async def test_same_task_again_is_stored_once(store: Store) -> None:
    first, is_new = await store.tasks.submit(idle_task(samples=3))
    again, is_new_again = await store.tasks.submit(idle_task(samples=3))
    assert (is_new, is_new_again) == (True, False)
    assert first == again
    assert len((await store.sessions.page()).sessions) == 3


async def test_other_task_under_the_same_id_is_refused_and_changes_nothing(store: Store) -> None:
    stored, _ = await store.tasks.submit(idle_task(samples=2))
    with pytest.raises(Conflict, match="'task' exists with other content"):
        await store.tasks.submit(idle_task(samples=3))
    assert await store.tasks.get("task") == stored


async def test_task_that_cannot_be_stored_whole_is_not_stored_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.store.tasks.session_id", lambda task_id, sample: "the same for all")
    with pytest.raises(Exception, match=r"(?i)unique"):
        await store.tasks.submit(idle_task(samples=2))
    with pytest.raises(NotFound):
        await store.tasks.get("task")
    assert (await store.sessions.page()).sessions == ()


def test_digest_does_not_depend_on_how_a_task_is_written() -> None:
    short = idle_task()
    long = TaskSpec.model_validate(dict(reversed(list(short.model_dump().items()))))
    assert digest(short) == digest(long)
    assert digest(short) != digest(idle_task(priority=51))


@given(a=IDS, b=IDS, samples=st.tuples(st.integers(0, 1023), st.integers(0, 1023)))
def test_session_ids_are_valid_and_unique(a: str, b: str, samples: tuple[int, int]) -> None:
    ids = {session_id(a, samples[0]), session_id(b, samples[1])}
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", id) for id in ids)
    assert (len(ids) == 1) == ((a, samples[0]) == (b, samples[1]))


async def test_status_follows_the_sessions_and_filters_agree(store: Store) -> None:
    async def shown() -> TaskStatus:
        view = await store.tasks.get("task")
        for status in TaskStatus:
            listed = (await store.tasks.page(status=status)).tasks
            assert (view in listed) == (status is view.status)
        return view.status

    await store.tasks.submit(idle_task(samples=2))
    assert await shown() is TaskStatus.QUEUED
    first, second = await claim(store, 2)
    assert await shown() is TaskStatus.RUNNING
    await complete(store, first.key, result_of(first, 1.0))
    assert await shown() is TaskStatus.RUNNING
    await complete(store, second.key, result_of(second, 0.0))
    assert await shown() is TaskStatus.FINISHED
    assert (await store.tasks.get("task")).mean_reward == 0.5


async def test_mean_reward_is_of_completed_sessions_only(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2))
    first, second = await claim(store, 2)
    await complete(store, first.key, result_of(first, 0.25))
    failed = result_of(second, status=SessionStatus.FAILED, error="no verdict")
    await complete(store, second.key, failed)
    view = await store.tasks.get("task")
    assert view.mean_reward == 0.25
    assert view.sessions == {SessionStatus.COMPLETED: 1, SessionStatus.FAILED: 1}


async def test_cancelling_ends_what_waits_and_asks_what_runs(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2))
    (held,) = await claim(store)
    view = await store.tasks.cancel("task")
    assert view.status is TaskStatus.RUNNING
    assert view.sessions == {SessionStatus.INIT: 1, SessionStatus.CANCELLED: 1}
    await complete(store, held.key, result_of(held, status=SessionStatus.CANCELLED))
    assert (await store.tasks.get("task")).status is TaskStatus.CANCELLED


async def test_cancelling_a_finished_task_leaves_it_finished(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (held,) = await claim(store)
    await complete(store, held.key, result_of(held))
    assert (await store.tasks.cancel("task")).status is TaskStatus.FINISHED


async def test_pages_cover_everything_once(store: Store) -> None:
    for number in range(7):
        await store.tasks.submit(idle_task(f"t{number}", samples=2))
    seen, after = [], None
    while True:
        page = await store.tasks.page(limit=3, after=after)
        seen += [view.spec.id for view in page.tasks]
        if (after := page.next) is None:
            break
    assert seen == [f"t{number}" for number in range(7)]
    sessions = await store.sessions.page(SessionFilter(task_id="t3"), limit=1)
    rest = await store.sessions.page(SessionFilter(task_id="t3"), limit=1, after=sessions.next)
    assert [view.id for view in (*sessions.sessions, *rest.sessions)] == ["t3.0", "t3.1"]
    assert rest.next is None


async def test_page_from_nowhere_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInput, match="after"):
        await store.tasks.page(after="yesterday")
