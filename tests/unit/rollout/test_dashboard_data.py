"""What the dashboard's routes answer: recordings as pages, artifacts as text, and a stream that ends."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from typing import Any

import httpx
import pytest

from polar.models.delivery import Delivery
from polar.models.views import Leases
from polar.rollout.server import RolloutServer
from tests.fakes.control_plane import body_of, idle_task, result_of
from tests.fakes.recordings import encoded, recording


async def end_with_recording(http: httpx.AsyncClient, **changes: Any) -> str:
    """One session with a recording and artifacts."""
    await http.post("/tasks", json=idle_task("seen", samples=2, **changes).model_dump(mode="json"))
    answer = await http.post("/nodes/north/lease", json={"max_sessions": 1, "runtimes": ["idle"]})
    (lease,) = Leases.model_validate_json(answer.content).leases
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("logs/agent.stderr", "it went well")
        made.writestr("picture.bin", b"\0\1\2")
    stats = recording().result.stats
    delivery = Delivery(
        key=lease.key,
        result=result_of(lease, has_recording=True, has_artifacts=True, stats=stats),
        recording=encoded(recording()),
        artifacts=archive.getvalue(),
    )
    await http.post("/nodes/north/deliveries", content=body_of(delivery))
    return lease.session_id


async def test_session_is_outlined_and_its_tokens_come_in_pages(http: httpx.AsyncClient) -> None:
    id = await end_with_recording(http)
    detail = (await http.get(f"/dashboard/sessions/{id}")).json()
    outline = detail["outline"]
    assert [line["id"] for line in outline["completions"]] == ["c0", "c1", "c2"]
    assert [row["id"] for row in detail["group"]] == ["seen.0", "seen.1"]
    segment = next(at for at, one in enumerate(outline["segments"]) if one["completion"] == 0)
    whole = recording().completions[0]
    ids: list[int] = []
    logprobs: list[float] = []
    start: int | None = 0
    while start is not None:
        query = {"segment": segment, "start": start, "count": 3}
        page = (await http.get(f"/dashboard/sessions/{id}/tokens", params=query)).json()
        ids += page["ids"]
        logprobs += page["logprobs"]
        start = page["next"]
    assert ids == whole.sampled_ids.tolist()
    assert logprobs == whole.logprobs.tolist()
    missing = await http.get(f"/dashboard/sessions/{id}/tokens", params={"segment": 99})
    assert missing.status_code == 404
    assert (await http.get(f"/dashboard/sessions/{id}/completions/7")).status_code == 404


async def test_branches_are_shown_with_the_session_that_they_left(http: httpx.AsyncClient) -> None:
    id = await end_with_recording(http, branching={"at": "idle"})
    added = await http.post(f"/sessions/{id}/branches", json={"calls": 2, "samples": 2})
    assert added.status_code == 201, added.text
    group = (await http.get("/dashboard/tasks/seen")).json()
    assert group["branching"] == "idle"
    origins = [sample["session"]["origin"] for sample in group["samples"]]
    assert origins[:2] == [None, None]
    assert [(origin["session_id"], origin["calls"]) for origin in origins[2:]] == [(id, 2)] * 2
    detail = (await http.get("/dashboard/sessions/seen.2")).json()
    assert detail["session"]["origin"] == origins[2]
    assert [row["origin"] for row in detail["group"]] == origins


async def test_artifacts_are_listed_and_read_as_text(http: httpx.AsyncClient) -> None:
    url = f"/dashboard/sessions/{await end_with_recording(http)}"
    files = (await http.get(f"{url}/artifacts")).json()["files"]
    assert [file["name"] for file in files] == ["logs/agent.stderr", "picture.bin"]
    text = (await http.get(f"{url}/artifact", params={"name": "logs/agent.stderr"})).json()
    assert text == {"name": "logs/agent.stderr", "text": "it went well", "is_cut": False}
    assert (await http.get(f"{url}/artifact", params={"name": "picture.bin"})).json()["text"] is None
    assert (await http.get(f"{url}/artifact", params={"name": "../token"})).status_code == 404


async def test_an_archive_on_the_disk_is_not_read_whole(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"/dashboard/sessions/{await end_with_recording(http)}"

    def refuse(*_: object) -> None:
        raise AssertionError("it may have a GiB")

    monkeypatch.setattr("polar.store.blobs.FileBlobs.read", refuse)
    assert (await http.get(f"{url}/artifacts")).status_code == 200
    assert (await http.get(f"{url}/artifact", params={"name": "logs/agent.stderr"})).status_code == 200


async def test_damaged_recording_leaves_a_page_that_says_so(http: httpx.AsyncClient) -> None:
    await http.post("/tasks", json=idle_task("hurt").model_dump(mode="json"))
    answer = await http.post("/nodes/north/lease", json={"max_sessions": 1, "runtimes": ["idle"]})
    (lease,) = Leases.model_validate_json(answer.content).leases
    delivery = Delivery(key=lease.key, result=result_of(lease, has_recording=True), recording=b"nonsense")
    await http.post("/nodes/north/deliveries", content=body_of(delivery))
    detail = (await http.get("/dashboard/sessions/hurt.0")).json()
    assert (detail["outline"], detail["unreadable"]) == (None, "not a Polar recording")


async def test_stream_tells_changes_and_ends_with_the_server(
    http: httpx.AsyncClient, server: RolloutServer
) -> None:
    kinds: list[str] = []
    async with http.stream("GET", "/dashboard/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        async with asyncio.timeout(20):
            await end_with_recording(http)
            async for line in lines:
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                if line.startswith("data: ") and kinds[-1] == "changes":
                    events = json.loads(line.removeprefix("data: "))["events"]
                    if events[-1]["status"] == "completed":
                        break
            closing = asyncio.create_task(server.close())
            async for _ in lines:
                pass
            await closing
    assert kinds[0] == "overview"
