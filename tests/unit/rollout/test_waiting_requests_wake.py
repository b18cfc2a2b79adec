"""Requests that wait are answered when there is something, also when another process brought it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from polar.config.settings import ServerSettings
from polar.models.delivery import Delivery
from polar.models.session import SessionStatus, TrajectoryStats
from polar.models.task import Branching
from polar.models.views import Leases
from polar.rollout import long_poll
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import body_of, idle_task, result_of
from tests.waiting import still_waits

LEASE = {"max_sessions": 4, "runtimes": ["idle"], "wait_seconds": 60}


@pytest.fixture
def _only_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the slow look, only a notification can answer a long-poll in time."""
    monkeypatch.setattr(long_poll, "POLL_SECONDS", 120.0)


async def begin(request: Coroutine[Any, Any, httpx.Response]) -> asyncio.Task[httpx.Response]:
    """Start a request and let it reach its wait."""
    task = asyncio.create_task(request)
    assert await still_waits(task)
    return task


@pytest.mark.usefixtures("_only_notifications")
async def test_lease_wakes_when_a_task_is_submitted(http: httpx.AsyncClient) -> None:
    waiting = await begin(http.post("/nodes/north/lease", json=LEASE, timeout=90))
    await http.post("/tasks", json=idle_task().model_dump(mode="json"))
    async with asyncio.timeout(10):
        assert len((await waiting).json()["leases"]) == 1


@pytest.mark.usefixtures("_only_notifications")
@pytest.mark.parametrize("by_strategy", [True, False])
async def test_lease_wakes_when_a_session_branches(http: httpx.AsyncClient, by_strategy: bool) -> None:
    branching = Branching.model_validate({"at": "idle"}) if by_strategy else None
    await http.post("/tasks", json=idle_task(branching=branching).model_dump(mode="json"))
    answer = await http.post("/nodes/south/lease", json=LEASE)
    (lease,) = Leases.model_validate_json(answer.content).leases
    waiting = await begin(http.post("/nodes/north/lease", json=LEASE, timeout=90))
    result = result_of(lease, stats=TrajectoryStats(completions=2), has_recording=True, branch_at=(1,))
    delivery = Delivery(key=lease.key, result=result, recording=b"recorded")
    await http.post("/nodes/south/deliveries", content=body_of(delivery))
    if not by_strategy:
        await http.post("/sessions/task.0/branches", json={"calls": 1})
    async with asyncio.timeout(10):
        (branch,) = (await waiting).json()["leases"]
    assert branch["origin"]["session_id"] == "task.0"


@pytest.mark.usefixtures("_only_notifications")
async def test_lease_wakes_when_a_session_is_released(http: httpx.AsyncClient) -> None:
    await http.post("/tasks", json=idle_task().model_dump(mode="json"))
    (lease,) = (await http.post("/nodes/south/lease", json=LEASE)).json()["leases"]
    waiting = await begin(http.post("/nodes/north/lease", json=LEASE, timeout=90))
    await http.post("/sessions/task.0/release", json={"key": lease["key"]})
    async with asyncio.timeout(10):
        assert len((await waiting).json()["leases"]) == 1


@pytest.mark.usefixtures("_only_notifications")
@pytest.mark.parametrize("path", ["/tasks/task/cancel", "/sessions/task.0/cancel"])
async def test_feed_wakes_when_something_ends(http: httpx.AsyncClient, path: str) -> None:
    await http.post("/tasks", json=idle_task().model_dump(mode="json"))
    waiting = await begin(http.get("/results", params={"wait_seconds": 60}, timeout=90))
    await http.post(path)
    async with asyncio.timeout(10):
        assert len((await waiting).json()["results"]) == 1


@pytest.mark.usefixtures("_only_notifications")
async def test_feed_of_one_task_sleeps_through_the_end_of_another(http: httpx.AsyncClient) -> None:
    for id in "ab":
        await http.post("/tasks", json=idle_task(id).model_dump(mode="json"))
    waiting = await begin(http.get("/results", params={"wait_seconds": 60, "task_id": "b"}, timeout=90))
    await http.post("/tasks/a/cancel")
    assert await still_waits(waiting)
    await http.post("/tasks/b/cancel")
    async with asyncio.timeout(10):
        assert [result["task_id"] for result in (await waiting).json()["results"]] == ["b"]


async def test_what_another_process_stored_is_seen(http: httpx.AsyncClient, store: Store) -> None:
    waiting = await begin(http.get("/results", params={"wait_seconds": 60}, timeout=90))
    await store.tasks.submit(idle_task())
    await store.tasks.cancel("task")
    async with asyncio.timeout(10):
        assert len((await waiting).json()["results"]) == 1


async def test_waiting_ends_empty_at_its_time(http: httpx.AsyncClient) -> None:
    response = await http.get("/results", params={"wait_seconds": 0.1, "cursor": 7})
    assert response.json() == {"results": [], "cursor": 7, "end": 0, "policy_version": 0, "stale": []}


async def test_closing_the_server_answers_who_waits(store: Store) -> None:
    server = RolloutServer(store, "token", ServerSettings(port=0))
    await server.start()
    async with httpx.AsyncClient(headers={"Authorization": "Bearer token"}, trust_env=False) as http:
        url = f"{server.url}/api/v1/results?wait_seconds=60"
        waiting = await begin(http.get(url, timeout=90))
        begun = time.monotonic()
        await server.close()
        assert (await waiting).json()["results"] == []
        assert time.monotonic() - begun < 30


@pytest.mark.usefixtures("_only_notifications")
async def test_node_that_hung_up_gets_no_lease(http: httpx.AsyncClient, store: Store) -> None:
    gone = await begin(http.post("/nodes/gone/lease", json=LEASE, timeout=90))
    gone.cancel()
    await asyncio.wait({gone})
    await http.post("/tasks", json=idle_task().model_dump(mode="json"))
    leases = (await http.post("/nodes/here/lease", json=LEASE)).json()["leases"]
    assert [lease["session_id"] for lease in leases] == ["task.0"]


async def test_session_of_a_silent_node_goes_to_another(store: Store) -> None:
    settings = ServerSettings(port=0, lease_seconds=0.2)
    async with (
        RolloutServer(store, "token", settings) as server,
        httpx.AsyncClient(
            base_url=f"{server.url}/api/v1", headers={"Authorization": "Bearer token"}, trust_env=False
        ) as http,
    ):
        await http.post("/tasks", json=idle_task().model_dump(mode="json"))
        (lost,) = await store.leases.claim("silent", limit=1, runtimes=["idle"], seconds=0.2)
        answer = await http.post("/nodes/awake/lease", json=LEASE, timeout=90)
        (lease,) = answer.json()["leases"]
        assert (lease["session_id"], lease["attempt"]) == (lost.session_id, 2)
        late = body_of(Delivery(key=lost.key, result=result_of(lost)))
        answer = await http.post("/nodes/silent/deliveries", content=late)
        assert answer.json()["problems"][0]["code"] == "conflict"
        assert (await store.sessions.get(lost.session_id)).status is not SessionStatus.COMPLETED
