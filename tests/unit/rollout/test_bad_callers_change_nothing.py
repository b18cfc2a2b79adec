"""Wrong tokens, forged results, unknown nodes: refused with a reason, written down, and nothing changed."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from sqlalchemy import select

from polar.errors import Unavailable
from polar.models.access import AuditEntry, AuditPage
from polar.models.session import Lease
from polar.models.views import Deliveries, Delivery, Leases
from polar.rollout import gate
from polar.store.store import Store
from polar.store.tables import metadata
from tests.fakes.control_plane import idle_task, result_of, upload_of

SECRETS = ("a token for tests only", "polar_0123456789ab_" + "f" * 64, "hunter2hunter2hunter2")


async def everything(store: Store) -> dict[str, list[str]]:
    """All rows of all tables but the audit log."""
    tables = [table for name, table in metadata.tables.items() if name != "audit"]
    return await store.database.read(
        lambda connection: {table.name: list(map(str, connection.execute(select(table)))) for table in tables}
    )


async def refusals(http: httpx.AsyncClient) -> list[AuditEntry]:
    answer = await http.get("/audit", params={"refused": True, "limit": 1000})
    return list(AuditPage.model_validate_json(answer.content).entries)


async def leased(http: httpx.AsyncClient, store: Store) -> Lease:
    """A session that was leased twice: the first lease is old."""
    await http.post("/tasks", json=idle_task("t").model_dump(mode="json"))
    request = {"max_sessions": 1, "runtimes": ["idle"]}
    answer = await http.post("/nodes/north/lease", json=request)
    (old,) = Leases.model_validate_json(answer.content).leases
    await http.post(f"/sessions/{old.session_id}/release", json={"key": old.key.model_dump()})
    await http.post("/nodes/south/lease", json=request)
    return old


async def test_wrong_tokens_are_refused_and_written_down(http: httpx.AsyncClient, store: Store) -> None:
    body = idle_task("t").model_dump(mode="json")
    before = await everything(store)
    for secret in SECRETS[1:]:
        answer = await http.post("/tasks", json=body, headers={"Authorization": f"Bearer {secret}"})
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert secret not in answer.text
    assert await everything(store) == before
    entries = await refusals(http)
    assert [(entry.actor, entry.action, entry.status) for entry in entries] == [
        (None, "submit_task", 401)
    ] * 2
    assert entries[0].address == "127.0.0.1"
    assert not any(secret in repr(entries) for secret in SECRETS)


async def test_forged_results_are_refused_and_written_down(
    http: httpx.AsyncClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    old = await leased(http, store)
    path, token = f"/sessions/{old.session_id}", {"key": old.key.model_dump()}
    result = result_of(old)
    delivery = Delivery(session_id=old.session_id, key=old.key, result=result)
    head = Deliveries(deliveries=(delivery,)).model_dump_json().encode() + b"\n"
    before = await everything(store)
    answers = [
        await http.post(f"{path}/result", json={**token, "result": result.model_dump(mode="json")}),
        await http.put(f"{path}/recording", **upload_of(old), content=b"forged"),
        await http.put(f"{path}/artifacts", **upload_of(old), content=b"forged"),
        await http.post(f"{path}/release", json=token),
        await http.post("/sessions/none/result", json={**token, "result": result.model_dump(mode="json")}),
    ]
    assert [answer.status_code for answer in answers] == [409, 409, 409, 409, 404]
    with caplog.at_level(logging.WARNING):
        delivered = await http.post("/nodes/north/deliveries", content=head)
    assert delivered.json()["outcomes"][0]["problem"]["code"] == "conflict"
    assert "1 of 1 deliveries refused" in caplog.text
    assert await everything(store) == before
    entries = await refusals(http)
    assert [(entry.action, entry.object, entry.status) for entry in reversed(entries)] == [
        ("post_result", "t.0", 409),
        ("put_recording", "t.0", 409),
        ("put_artifacts", "t.0", 409),
        ("release_session", "t.0", 409),
        ("post_result", "none", 404),
        ("deliver", "t.0", 409),
    ]
    assert all("is not leased under this key" in (entry.detail or "") for entry in entries[:1])


async def test_a_node_of_another_version_is_refused_and_written_down(
    http: httpx.AsyncClient, store: Store
) -> None:
    before = await everything(store)
    words = {"protocol": 999, "version": "9.9", "antennae": 2}
    answer = await http.post("/nodes/alien/join", json=words)
    assert answer.status_code == 409
    assert "speaks protocol 999" in answer.json()["error"]
    assert await everything(store) == before
    (entry,) = await refusals(http)
    assert (entry.action, entry.object, entry.actor) == ("join_node", "alien", "owner")
    assert "speaks protocol 999" in (entry.detail or "")


async def test_what_changes_something_is_written_down_with_who_and_what(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
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
    entries = AuditPage.model_validate_json((await http.get("/audit")).content).entries
    assert [(entry.actor, entry.action, entry.object, entry.status) for entry in reversed(entries)] == [
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
    assert made["token"] not in repr(entries)


async def test_a_flood_of_refusals_does_not_fill_the_log(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MOST_REFUSALS", 3)
    monkeypatch.setattr(gate, "REFUSALS_SECONDS", 3600.0)
    wrong = {"Authorization": "Bearer wrong"}
    for _ in range(10):
        await http.get("/tasks", headers=wrong)
    monkeypatch.setattr(gate, "REFUSALS_SECONDS", -1.0)
    await http.get("/tasks", headers=wrong)
    entries = await refusals(http)
    assert len(entries) == 4
    assert (entries[0].detail or "").endswith("(and 7 more like it before)")


async def test_a_body_that_is_too_large_is_written_down(http: httpx.AsyncClient) -> None:
    answer = await http.post("/nodes/north/heartbeat", content=b"x" * (5 << 20))
    assert answer.status_code == 413
    (entry,) = await refusals(http)
    assert (entry.action, entry.status) == ("heartbeat", 413)


@pytest.mark.parametrize("since", ["nan", "-1", "x"])
async def test_odd_filters_of_the_log_are_no_failure(http: httpx.AsyncClient, since: str) -> None:
    answer = await http.get("/audit", params={"since": since, "before": "x" if since == "x" else "1"})
    assert answer.status_code in (200, 400)
    assert json.loads(answer.content)
