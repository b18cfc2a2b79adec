"""Both clients, driven through the same story: submit, look, wait, iterate, cancel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import polar
from polar.client import AsyncClient, Client, async_client, connection
from polar.errors import Conflict, InvalidInput, NotFound, Unavailable
from polar.models.delivery import Delivery
from polar.models.session import LeaseKey, Origin, SessionStatus
from polar.models.task import BudgetScope, OnDivergence, TaskStatus
from polar.models.views import Heartbeat, LeaseRequest, Release, SessionBeat
from tests.fakes.blocking_client import Blocking
from tests.fakes.control_plane import idle_task, result_of


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, plane: Any) -> Iterator[Any]:
    """Both, by the methods of the synchronous one."""
    arguments = (plane.url, plane.token)
    with Client(*arguments) if request.param == "sync" else Blocking(AsyncClient(*arguments)) as connected:
        yield connected


def test_package_offers_both_clients() -> None:
    assert polar.Client is Client
    assert polar.AsyncClient is AsyncClient


NODES_OWN = {
    *(
        "capture",
        "deliver",
        "follow_policy",
        "heartbeat",
        "join",
        "lease",
        "origin",
        "release",
        "ship_captures",
    ),
}
"""What a node asks, which is asynchronous."""


def public(kind: type) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    """With the same parameters, and results that differ in how they are waited for alone."""
    expected = {
        name: signature.replace(return_annotation=str(signature.return_annotation).removeprefix("Async"))
        for name, signature in public(AsyncClient).items()
        if name not in NODES_OWN
    }
    assert {name: str(signature).replace("Async", "") for name, signature in public(Client).items()} == {
        name: str(signature).replace("Async", "") for name, signature in expected.items()
    }
    assert str(inspect.signature(Client)) == str(inspect.signature(AsyncClient))


def test_submit_and_look(client: Any) -> None:
    view = client.submit(idle_task("a", samples=2))
    assert client.submit(idle_task("a", samples=2).model_dump()) == view == client.task("a")
    assert [session.id for session in client.sessions(task_id="a")] == ["a.0", "a.1"]
    assert client.session("a.1").status is SessionStatus.QUEUED
    assert client.health().sessions == {SessionStatus.QUEUED: 2}


def test_lists_read_all_pages(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAGE", 2)
    for number in range(5):
        client.submit(idle_task(f"t{number}"))
    client.cancel("t3")
    assert [view.spec.id for view in client.tasks()] == ["t0", "t1", "t2", "t3", "t4"]
    assert [view.spec.id for view in client.tasks(status=TaskStatus.CANCELLED)] == ["t3"]
    assert [view.id for view in client.sessions(status=SessionStatus.QUEUED)] == [
        "t0.0",
        "t1.0",
        "t2.0",
        "t4.0",
    ]


def test_results_without_follow_end_at_the_present(
    client: Any, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAGE", 2)
    client.submit(idle_task("a", samples=5))
    assert list(client.results()) == []
    plane.finish(5)
    pages = list(client.result_pages())
    assert [result.session_id for page in pages for result in page.results] == [f"a.{n}" for n in range(5)]
    assert list(client.results(cursor=pages[-1].cursor)) == []
    assert [result.session_id for result in client.results(cursor=pages[0].cursor)] == ["a.2", "a.3", "a.4"]


def test_following_tasks_ends_with_them(client: Any, plane: Any) -> None:
    for id in ("a", "b"):
        client.submit(idle_task(id, samples=2))
    plane.finish(1)
    seen = []
    for result in client.results(["a"], follow=True):
        seen.append(result.session_id)
        if result.session_id == "a.0":
            plane.finish(1, reward=0.5)
    assert seen == ["a.0", "a.1"]
    assert list(client.results(["a"], cursor=10_000, follow=True)) == []
    assert list(client.results([], follow=True)) == []


def test_wait_gives_all_results_in_order(client: Any, plane: Any) -> None:
    for id in ("a", "b", "c"):
        client.submit(idle_task(id, samples=2))
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(plane.finish, 4)
        assert [result.session_id for result in client.wait(["b", "a"])] == ["a.0", "a.1", "b.0", "b.1"]
        finishing.result()
    assert client.task("b").mean_reward == 1.0


def test_wait_for_more_tasks_than_a_url_can_name(
    client: Any, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "MAX_FILTER_CHARACTERS", 10)
    for id in ("a", "b", "c"):
        client.submit(idle_task(id))
    plane.finish(3)
    assert [result.task_id for result in client.wait(["a", "c"])] == ["a", "c"]


def test_the_newest_result_is_where_only_what_is_to_come_is_found(client: Any, plane: Any) -> None:
    assert client.newest_result() == 0
    client.submit(idle_task("a", samples=2))
    plane.finish(1)
    newest = client.newest_result()
    assert list(client.results(cursor=newest)) == []
    plane.finish(1)
    assert [result.session_id for result in client.results(cursor=newest)] == ["a.1"]


def test_wait_gives_up_in_time(client: Any) -> None:
    client.submit(idle_task("a"))
    with pytest.raises(Unavailable, match="did not end in time"):
        client.wait(["a"], timeout=0.2)


def test_waiting_for_an_unknown_task_fails_at_once(client: Any) -> None:
    with pytest.raises(NotFound, match="no task 'a'"):
        client.wait(["a"])


def test_cancel(client: Any) -> None:
    client.submit(idle_task("a", samples=2))
    assert client.cancel_session("a.0").status is SessionStatus.CANCELLED
    assert client.cancel("a").status is TaskStatus.CANCELLED
    assert [result.status for result in client.wait("a")] == [SessionStatus.CANCELLED] * 2


def test_branches_are_waited_for_with_their_task(client: Any, plane: Any) -> None:
    client.submit(idle_task("a"))
    plane.finish(1, calls=5)
    first = client.branch("a.0", 3, 2, request_id="mine")
    assert client.branch("a.0", 3, 2, request_id="mine") == first
    origin = Origin(session_id="a.0", calls=3)
    assert [(view.id, view.origin) for view in first] == [("a.1", origin), ("a.2", origin)]
    ways: Any = {"on_divergence": OnDivergence.STOP, "budgets": BudgetScope.SESSION}
    (later,) = client.branch("a.0", 0, **ways)
    assert later.origin == Origin(session_id="a.0", calls=0, **ways)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(plane.finish, 3)
        assert [result.sample for result in client.wait("a")] == [0, 1, 2, 3]
        finishing.result()
    with pytest.raises(InvalidInput, match="has 5 model calls, not 6"):
        client.branch("a.0", 6)
    with pytest.raises(InvalidInput, match="samples: Input should be"):
        client.branch("a.0", 1, 0)


def test_a_replay_is_a_task_of_its_own(client: Any, plane: Any) -> None:
    client.submit(idle_task("a"))
    plane.finish(1, calls=5)
    replayed = client.replay("a.0", request_id="mine")
    assert client.replay("a.0", request_id="mine") == replayed
    stop = {"on_divergence": OnDivergence.STOP, "samples_on": False}
    assert replayed.origin == Origin(session_id="a.0", **stop)
    another = client.replay("a.0", 2, on_divergence=OnDivergence.LIVE, samples_on=True)
    assert another.origin == Origin(session_id="a.0", calls=2)
    assert len({"a", replayed.task_id, another.task_id}) == 3
    plane.finish(2)
    assert [result.session_id for result in client.wait(replayed.task_id)] == [replayed.id]
    with pytest.raises(Conflict, match="completed without a recording"):
        client.replay(replayed.id)


def test_errors_are_types(client: Any) -> None:
    client.submit(idle_task("a"))
    with pytest.raises(Conflict, match="other content"):
        client.submit(idle_task("a", priority=1))
    with pytest.raises(InvalidInput, match=r"harness\.name: unknown harness 'x' \(known: idle, other\)"):
        client.submit(idle_task("b", harness="x"))
    with pytest.raises(InvalidInput, match=r"^samples: Input should be greater"):
        client.submit({**idle_task("b").model_dump(), "samples": 0})
    with pytest.raises(NotFound, match=r"no session 'a\.7'"):
        client.session("a.7")
    for odd in ("a/../b", "..", "", "ä ?#"):
        with pytest.raises((NotFound, InvalidInput)):
            client.task(odd)
    with pytest.raises(NotFound, match="has not ended"):
        client.recording("a.0")


async def test_node_side(plane: Any) -> None:
    async with AsyncClient(plane.url, plane.token) as client:
        await client.submit(idle_task("a", samples=2))
        request = LeaseRequest(max_sessions=5, runtimes=("idle",), wait_seconds=1)
        first, second = (await client.lease("north", request)).leases
        beat = SessionBeat(session_id="a.0", key=first.key, status=SessionStatus.READY)
        assert (await client.heartbeat("north", Heartbeat(sessions=(beat,)))).lost == ()
        assert (await client.heartbeat("south", Heartbeat(sessions=(beat,)))).lost == ("a.0",)
        await client.release(second.session_id, Release(key=second.key))
        result = result_of(first, has_recording=True)
        delivery = Delivery(key=first.key, result=result, recording=bytes(range(256)) * 8192)
        assert await client.deliver("north", [delivery]) == [None]
        assert await client.recording("a.0") == delivery.recording
        other = LeaseKey(fencing_token=1, secret="another's")
        late = delivery.model_copy(update={"key": other, "recording": b"late"})
        assert [type(problem) for problem in await client.deliver("north", [delivery, late])] == [
            type(None),
            Conflict,
        ]
        assert await client.recording("a.0") == delivery.recording
