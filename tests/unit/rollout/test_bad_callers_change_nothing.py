"""Wrong tokens, forged results, unknown nodes: refused with a reason, logged, and nothing changed."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from polar.errors import Unavailable
from polar.models.delivery import Delivery
from polar.models.session import Lease
from polar.models.views import Leases
from polar.store.store import Store
from polar.store.tables import metadata
from tests.fakes.control_plane import body_of, idle_task, result_of

SECRETS = ("a token for tests only", "polar_0123456789ab_" + "f" * 64, "hunter2hunter2hunter2")


async def everything(store: Store) -> dict[str, list[str]]:
    """All rows of all tables."""
    tables = metadata.tables.values()
    return await store.database.read(
        lambda connection: {table.name: list(map(str, connection.execute(select(table)))) for table in tables}
    )


@pytest.fixture(autouse=True)
def _audited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "polar.audit")


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the audit lines say, oldest first."""
    return [vars(record)["fields"] for record in caplog.records if record.name == "polar.audit"]


def refusals(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [line for line in audited(caplog) if line["status"] >= 400]


async def leased(http: httpx.AsyncClient, store: Store) -> Lease:
    """A session that was leased twice: the first lease is old."""
    await http.post("/tasks", json=idle_task("t").model_dump(mode="json"))
    request = {"max_sessions": 1, "runtimes": ["idle"]}
    answer = await http.post("/nodes/north/lease", json=request)
    (old,) = Leases.model_validate_json(answer.content).leases
    await http.post(f"/sessions/{old.session_id}/release", json={"key": old.key.model_dump()})
    await http.post("/nodes/south/lease", json=request)
    return old


async def test_wrong_tokens_are_refused_and_logged(
    http: httpx.AsyncClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    body = idle_task("t").model_dump(mode="json")
    before = await everything(store)
    for secret in SECRETS[1:]:
        answer = await http.post("/tasks", json=body, headers={"Authorization": f"Bearer {secret}"})
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert secret not in answer.text
    assert await everything(store) == before
    lines = refusals(caplog)
    assert [(line["actor"], line["action"], line["status"]) for line in lines] == [
        (None, "submit_task", 401)
    ] * 2
    assert lines[0]["address"] == "127.0.0.1"
    assert "submit_task by nobody known from 127.0.0.1: 401 submit_task needs a token" in caplog.text
    assert not any(secret in caplog.text + repr(lines) for secret in SECRETS)


async def test_forged_results_are_refused_and_logged(
    http: httpx.AsyncClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    old = await leased(http, store)
    result = result_of(old, has_recording=True)
    forged = Delivery(key=old.key, result=result, recording=b"forged" * 100_000)
    unknown = Delivery(key=old.key, result=result.model_copy(update={"session_id": "none"}))
    before = await everything(store)
    release = f"/sessions/{old.session_id}/release"
    assert (await http.post(release, json={"key": old.key.model_dump()})).status_code == 409
    with caplog.at_level(logging.WARNING):
        answer = await http.post("/nodes/north/deliveries", content=body_of(forged, unknown))
    assert [problem["code"] for problem in answer.json()["problems"]] == ["conflict", "not_found"]
    assert "2 of 2 deliveries refused" in caplog.text
    assert await everything(store) == before
    assert await store.recordings.found() == {}
    assert not list(store.recordings.uploads_dir.glob("*"))
    lines = refusals(caplog)
    assert [(line["action"], line["object"], line["status"]) for line in lines] == [
        ("release_session", "t.0", 409),
        ("deliver", "t.0", 409),
        ("deliver", "none", 404),
    ]
    assert "is not leased under this key" in lines[1]["reason"]


async def test_a_node_of_another_version_is_refused_and_logged(
    http: httpx.AsyncClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    before = await everything(store)
    words = {"protocol": 999, "version": "9.9", "antennae": 2}
    answer = await http.post("/nodes/alien/join", json=words)
    assert answer.status_code == 409
    assert "speaks protocol 999" in answer.json()["error"]
    assert await everything(store) == before
    (line,) = refusals(caplog)
    assert (line["action"], line["object"], line["actor"]) == ("join_node", "alien", "owner")
    assert "speaks protocol 999" in line["reason"]


async def test_what_changes_something_is_logged_with_who_and_what(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unavailable(*_: object) -> None:
        raise Unavailable("not now")

    async def broken(*_: object) -> None:
        raise RuntimeError("a mistake")

    made = (await http.post("/tokens", json={"name": "alice", "role": "trainer"})).json()
    alice = {"Authorization": f"Bearer {made['token']}"}
    tasks = [idle_task(id).model_dump(mode="json") for id in ("a", "b")]
    await http.post("/tasks", json=tasks[0], headers=alice)
    await http.post("/tasks/batch", json={"tasks": tasks}, headers=alice)
    await http.post("/tasks/a/cancel", headers=alice)
    await http.post("/sessions/b.0/cancel", headers=alice)
    await http.post("/policy/update", json={"wait_seconds": 0}, headers=alice)
    await http.post("/nodes/north/join", json={"version": "0"})
    monkeypatch.setattr("polar.store.policy.Policies.pause", unavailable)
    await http.post("/policy/pause", json={"holder": "alice"}, headers=alice)
    monkeypatch.setattr("polar.store.policy.Policies.resume", broken)
    await http.post("/policy/resume", json={}, headers=alice)
    await http.get("/tasks", headers=alice)
    await http.post("/tokens/alice/revoke")
    lines = audited(caplog)
    assert [(line["actor"], line["action"], line["object"], line["status"]) for line in lines] == [
        ("owner", "create_token", "alice (trainer)", 201),
        ("alice", "submit_task", "a", 201),
        ("alice", "submit_tasks", "2 from a to b", 201),
        ("alice", "cancel_task", "a", 200),
        ("alice", "cancel_session", "b.0", 200),
        ("alice", "update_policy", None, 200),
        ("owner", "join_node", "north", 200),
        ("alice", "pause_policy", None, 503),
        ("alice", "resume_policy", None, 500),
        ("owner", "revoke_token", "alice", 200),
    ]
    assert "submit_task a by alice (trainer) from 127.0.0.1: 201" in caplog.text
    assert made["token"] not in caplog.text + repr(lines)


async def test_a_body_that_is_too_large_is_logged(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await http.post("/nodes/north/heartbeat", content=b"x" * (5 << 20))
    assert answer.status_code == 413
    (line,) = refusals(caplog)
    assert (line["action"], line["status"]) == ("heartbeat", 413)


async def test_what_callers_name_cannot_pass_for_a_line_of_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await http.post("/tasks/a%0Acancel_task b by owner/cancel")).status_code == 404
    (line,) = refusals(caplog)
    assert "\n" not in line["object"] + line["reason"]
    assert all("\n" not in record.getMessage() for record in caplog.records if record.name == "polar.audit")


async def test_a_token_that_is_named_in_an_address_is_not_logged(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    made = (await http.post("/tokens", json={"name": "alice", "role": "trainer"})).json()
    secret = made["token"].rpartition("_")[2]
    mine = {"Authorization": f"Bearer {made['token']}"}
    for path in ("tokens/{}/revoke", "tasks/{}/cancel", "sessions/of-{}/cancel"):
        await http.post(f"/{path.format(made['token'])}", headers=mine)
    assert len(refusals(caplog)) == 3
    assert made["view"]["id"] in caplog.text
    assert secret not in caplog.text + repr(audited(caplog))


async def test_a_token_can_be_revoked_by_itself(http: httpx.AsyncClient) -> None:
    made = (await http.post("/tokens", json={"name": "alice", "role": "trainer"})).json()
    answer = await http.post(f"/tokens/{made['token']}/revoke")
    assert [token["state"] for token in answer.json()["tokens"]] == ["revoked"]


@pytest.mark.parametrize(
    "said", ["10.0.0.7: 200 by owner", "10.0.0.7\x85create_token by owner", "[fe80::1%: 200 by owner]:1"]
)
async def test_an_address_that_a_caller_writes_cannot_pass_for_more(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    headers = {"Authorization": "Bearer none", "X-Forwarded-For": said}
    encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    await http.get("/tasks", headers=encoded)
    (line,) = refusals(caplog)
    assert line["address"] in (None, "fe80::1")
    assert "owner" not in caplog.text


async def test_the_address_that_a_proxy_names_is_logged(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await http.get("/tasks", headers={"Authorization": "Bearer none", "X-Forwarded-For": "10.0.0.7"})
    (line,) = refusals(caplog)
    assert line["address"] == "10.0.0.7"
