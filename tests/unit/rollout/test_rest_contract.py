"""The REST API over a live server: statuses, bodies, who is let in, and how much they may send."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from polar.config.settings import ServerSettings
from polar.errors import PolarError
from polar.models.delivery import Delivery
from polar.models.session import LeaseKey, SessionStatus
from polar.models.views import Leases, ResultPage, TaskView
from polar.rollout import routes
from polar.rollout.access import SMALL, Authenticator
from polar.rollout.server import RolloutServer, create_app
from polar.rollout.service import RolloutService
from polar.store.store import Store
from tests.fakes.control_plane import body_of, idle_task, result_of


def body(id: str = "task", **changes: object) -> dict[str, object]:
    return idle_task(id, **changes).model_dump(mode="json")


def problem(response: httpx.Response) -> tuple[int, str]:
    assert set(response.json()) == {"error", "code"}
    assert "\n" not in response.json()["error"]
    return response.status_code, response.json()["code"]


async def test_submit_is_idempotent_by_id(http: httpx.AsyncClient) -> None:
    first = await http.post("/tasks", json=body(samples=2))
    again = await http.post("/tasks", json=body(samples=2))
    other = await http.post("/tasks", json=body(samples=3))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert problem(other) == (409, "conflict")


async def test_session_goes_from_submit_to_recording(http: httpx.AsyncClient) -> None:
    await http.post("/tasks", json=body())
    request = {"max_sessions": 3, "runtimes": ["idle"]}
    answer = await http.post("/nodes/north/lease", json=request)
    (lease,) = Leases.model_validate_json(answer.content).leases
    beat = {"session_id": lease.session_id, "key": lease.key.model_dump(), "status": "running"}
    answer = await http.post("/nodes/north/heartbeat", json={"sessions": [beat]})
    assert answer.json() == {"cancel": [], "lost": []}
    assert (await http.get(f"/sessions/{lease.session_id}")).json()["status"] == "running"

    recording = f"/sessions/{lease.session_id}/recording"
    delivery = Delivery(key=lease.key, result=result_of(lease, has_recording=True), recording=b"\0bytes")
    forged = delivery.model_copy(update={"key": LeaseKey(fencing_token=99, secret=lease.key.secret)})
    stale = await http.post("/nodes/north/deliveries", content=body_of(forged))
    assert stale.json()["problems"][0]["code"] == "conflict"
    assert problem(await http.get(recording)) == (404, "not_found")
    for _ in range(2):
        stored = await http.post("/nodes/north/deliveries", content=body_of(delivery))
        assert stored.json() == {"problems": [None]}
    page = ResultPage.model_validate_json((await http.get("/results")).content)
    assert [result.session_id for result in page.results] == [lease.session_id]
    answer = await http.get(recording)
    assert answer.content == b"\0bytes"
    assert answer.headers["content-type"] == "application/octet-stream"
    view = TaskView.model_validate_json((await http.get("/tasks/task")).content)
    assert view.sessions == {SessionStatus.COMPLETED: 1}


async def test_lists_page_and_filter(http: httpx.AsyncClient) -> None:
    for id in "abc":
        await http.post("/tasks", json=body(id, samples=2))
    await http.post("/tasks/b/cancel")
    first = (await http.get("/tasks", params={"limit": 2})).json()
    rest = (await http.get("/tasks", params={"limit": 2, "after": first["next"]})).json()
    assert [task["spec"]["id"] for task in first["tasks"] + rest["tasks"]] == ["a", "b", "c"]
    cancelled = (await http.get("/tasks", params={"status": "cancelled"})).json()
    assert [task["spec"]["id"] for task in cancelled["tasks"]] == ["b"]
    sessions = (await http.get("/sessions", params={"task_id": "c", "status": "queued"})).json()
    assert [session["id"] for session in sessions["sessions"]] == ["c.0", "c.1"]
    await http.post("/sessions/c.1/cancel")
    results = (await http.get("/results", params={"task_id": ["c", "a"]})).json()
    assert [result["session_id"] for result in results["results"]] == ["c.1"]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic a token for tests only"])
@pytest.mark.parametrize("path", ["/tasks", "/results?wait_seconds=60"])
async def test_without_the_token_nothing_is_shown(
    http: httpx.AsyncClient, header: str | None, path: str
) -> None:
    del http.headers["Authorization"]
    response = await http.get(path, headers={"Authorization": header} if header is not None else {})
    assert problem(response) == (401, "unauthorized")
    assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_health_and_schema_are_open_and_hold_no_secret(http: httpx.AsyncClient) -> None:
    await http.post("/tasks", json=body(samples=3))
    token = http.headers.pop("Authorization").removeprefix("Bearer ")
    health = await http.get("/health")
    assert health.json()["sessions"] == {"queued": 3}
    schema = await http.get("/openapi.json")
    assert token not in health.text + schema.text


async def test_unknown_things_are_problems_too(http: httpx.AsyncClient) -> None:
    assert problem(await http.get("/tasks/none")) == (404, "not_found")
    assert problem(await http.get("/sessions/none")) == (404, "not_found")
    assert problem(await http.get("/nothing")) == (404, "not_found")
    assert problem(await http.delete("/tasks/none")) == (405, "invalid_input")
    release = {"key": {"fencing_token": 1, "secret": ""}}
    assert problem(await http.post("/sessions/none/release", json=release)) == (404, "not_found")


async def test_body_over_the_limit_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LARGE", 100)
    monkeypatch.setattr(routes, "STREAMED", 2_000)
    service = RolloutService(store, ServerSettings())
    app = create_app(service, Authenticator("token", store.tokens))

    async def unsized() -> AsyncIterator[bytes]:
        # As the sizes of a delivery: 16 MB of JSON.
        yield b"\0\0\0\0\1\0\0\0" + bytes(16)
        for _ in range(2_000):
            yield b"1234567890"

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://polar", headers={"Authorization": "Bearer token"}
    ) as http:
        await store.tasks.submit(idle_task())
        (lease,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=60)
        for attempt in (
            http.post("/api/v1/tasks", content=b"x" * 101),
            http.post("/api/v1/nodes/north/heartbeat", content=b"x" * (SMALL + 1)),
            http.post("/api/v1/tasks", content=unsized(), headers={"Content-Type": "application/json"}),
            http.post("/api/v1/nodes/north/deliveries", content=b"0" * 2_001),
            http.post("/api/v1/nodes/north/deliveries", content=unsized()),
        ):
            assert problem(await attempt) == (413, "too_large")
        delivery = Delivery(key=lease.key, result=result_of(lease))
        answer = await http.post("/api/v1/nodes/north/deliveries", content=body_of(delivery))
        assert answer.json() == {"problems": [None]}


async def test_large_body_over_the_wire_is_refused_in_words(http: httpx.AsyncClient) -> None:
    response = await http.post("/tasks", content=b"x" * (65 * 1024 * 1024))
    assert problem(response) == (413, "too_large")


async def test_port_in_use_is_one_clear_line(store: Store, server: RolloutServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(PolarError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        async with RolloutServer(store, "token", ServerSettings(port=port)):
            pass


async def test_internal_failure_is_a_problem_without_details(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("polar.store.tasks.Tasks.get", fail)
    response = await http.get("/tasks/x")
    assert problem(response) == (500, "internal")
    assert "secret" not in response.text
