"""An admin drains a node and lets it work again; it is written down, and nobody else may."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from tests.fakes.control_plane import idle_task

LEASE = {"max_sessions": 4, "runtimes": ["idle"], "wait_seconds": 60}
JOIN = {"version": "0", "places": {"init": 2, "ready": 2, "running": 2, "postrun": 1}}


async def test_a_drained_node_waits_for_work_until_it_is_resumed(http: httpx.AsyncClient) -> None:
    assert (await http.post("/nodes/north/join", json=JOIN)).json()["is_draining"] is False
    drained = (await http.post("/nodes/north/drain")).json()
    assert (drained["name"], drained["is_draining"], drained["places"]) == ("north", True, JOIN["places"])
    assert (await http.post("/nodes/north/join", json=JOIN)).json()["is_draining"] is True
    await http.post("/tasks", json=idle_task().model_dump(mode="json"))
    assert (await http.post("/nodes/north/lease", json=LEASE | {"wait_seconds": 0})).json() == {"leases": []}
    waiting = asyncio.create_task(http.post("/nodes/north/lease", json=LEASE, timeout=90))
    assert (await http.post("/nodes/north/resume")).json()["is_draining"] is False
    assert len((await waiting).json()["leases"]) == 1


async def test_draining_is_logged_and_for_admins_alone(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "polar.audit")
    await http.post("/nodes/north/join", json=JOIN)
    made = await http.post("/tokens", json={"name": "t", "role": "trainer"})
    trainer = {"Authorization": f"Bearer {made.json()['token']}"}
    assert (await http.post("/nodes/north/drain", headers=trainer)).status_code == 403
    assert (await http.post("/nodes/north/drain")).status_code == 200
    assert (await http.post("/nodes/south/drain")).status_code == 404
    lines = [record.getMessage() for record in caplog.records if "drain_node" in record.getMessage()]
    assert [line.split(" from ")[0] for line in lines] == [
        "drain_node north by t (trainer)",
        "drain_node north by owner (admin)",
        "drain_node south by owner (admin)",
    ]


async def test_the_overview_shows_places_and_what_is_drained(http: httpx.AsyncClient) -> None:
    await http.post("/nodes/north/join", json=JOIN)
    await http.post("/nodes/north/policy", json={"step": -1})
    await http.post("/nodes/north/drain")
    (north,) = (await http.get("/dashboard/overview")).json()["nodes"]
    assert (north["is_draining"], north["places"], north["sessions"]) == (True, JOIN["places"], {})
