"""Whoever watches a session is told of its model calls as they are made, just as its recording has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from polar.config.settings import DEFAULT_MODEL
from polar.errors import NotFound
from polar.models.dashboard import WatchedCall, WatchedSession, WatchEvent, WatchRestart
from polar.models.session import SessionStatus
from polar.recordings import recording
from tests.fakes.scripted_engine import Answer, Script
from tests.systems import TOKEN, TURNS, System, shell_task, system


class Watcher:
    """Somebody who watches a session and keeps what they are told, as they are to."""

    def __init__(self, running: System, session_id: str) -> None:
        self.calls: list[WatchedCall] = []
        self.restarts = 0
        self.statuses: list[SessionStatus] = []
        self._told = asyncio.Condition()
        self.task = asyncio.create_task(self._watch(running.client.watch(session_id)))

    async def _watch(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            async with self._told:
                self._take(event)
                self._told.notify_all()

    def _take(self, event: WatchEvent) -> None:
        match event:
            case WatchedCall():
                assert event.index == len(self.calls)
                self.calls.append(event)
            case WatchRestart():
                self.restarts += 1
                self.calls.clear()
            case WatchedSession(session=session):
                if [session.status] != self.statuses[-1:]:
                    self.statuses.append(session.status)

    @property
    def answers(self) -> list[str]:
        return [call.response.content for call in self.calls]

    async def hears(self, *answers: str) -> None:
        async with asyncio.timeout(30), self._told:
            await self._told.wait_for(lambda: self.answers == list(answers))

    async def end(self) -> SessionStatus:
        async with asyncio.timeout(60):
            await self.task
        return self.statuses[-1]


async def finished(running: System, session_id: str) -> list[WatchedCall]:
    """What somebody is told who comes when the session has ended."""
    return [event async for event in running.client.watch(session_id) if isinstance(event, WatchedCall)]


async def assert_exact(running: System, session_id: str, watchers: Sequence[Watcher]) -> None:
    """Everyone was told the same, and it is what the recording holds."""
    told = await finished(running, session_id)
    for watcher in watchers:
        assert [call.model_copy(update={"texts": None}) for call in watcher.calls] == [
            call.model_copy(update={"texts": None}) for call in told
        ]
    recorded = recording.decode(await running.client.recording(session_id))
    assert [call.id for call in told] == [it.id for it in recorded.completions]
    for call, completion in zip(told, recorded.completions, strict=True):
        assert list(call.ids) == completion.sampled_ids.tolist()
        assert list(call.logprobs) == completion.logprobs.tolist()
        assert list(call.versions) == completion.policy_versions.tolist()
        assert call.response.content == completion.response.content
        new = completion.messages[len(completion.messages) - len(call.messages) :]
        assert [(it.role, it.content) for it in call.messages] == [(it.role, it.content) for it in new]


async def test_calls_are_told_as_they_are_made_also_to_who_comes_late(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script: list[Script] = ["One.", "Two.", Answer("Three.", gate=gate), "Four."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("seen", TURNS))
        early = Watcher(running, "seen.0")
        async with running.node():
            await early.hears("One.", "Two.")
            late = Watcher(running, "seen.0")
            await late.hears("One.", "Two.")
            assert late.statuses == [SessionStatus.RUNNING]
            gate.set()
            assert [await it.end() for it in (early, late)] == [SessionStatus.COMPLETED] * 2
        assert early.statuses[0] is SessionStatus.QUEUED
        assert [message.content for message in early.calls[1].messages] == ["And then, 0?"]
        assert early.answers == ["One.", "Two.", "Three.", "Four."]
        assert (early.restarts, late.restarts) == (0, 0)
        await assert_exact(running, "seen.0", [early, late])


async def test_who_was_told_of_calls_is_not_told_again_when_their_tokens_can_be_read(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script: list[Script] = ["One.", "Two.", Answer("Three.", gate=gate), "Four."]
    async with system(tmp_path / "data", script, model=DEFAULT_MODEL) as running, running.node():
        await running.client.submit(shell_task("read", TURNS))
        watcher = Watcher(running, "read.0")
        await watcher.hears("One.", "Two.")
        gate.set()
        assert await watcher.end() is SessionStatus.COMPLETED
        assert watcher.restarts == 0
        await assert_exact(running, "read.0", [watcher])
        assert all(call.texts for call in await finished(running, "read.0"))


async def test_a_connection_that_is_lost_is_taken_up_where_it_was(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script: list[Script] = ["One.", "Two.", Answer("Three.", gate=gate), "Four."]
    async with system(tmp_path / "data", script) as running, running.node():
        await running.client.submit(shell_task("cut", TURNS))
        await Watcher(running, "cut.0").hears("One.", "Two.")
        _, one, _ = await frames(running, "cut.0", None, 3)
        assert '"One."' in one["data"]
        _, two = await frames(running, "cut.0", one["id"], 2)
        assert '"Two."' in two["data"]
        _, restart, first = await frames(running, "cut.0", "2-00000000", 3)
        assert (restart["event"], first["data"]) == ("restart", one["data"])
        gate.set()


async def frames(
    running: System, session_id: str, after: str | None, count: int, token: str = TOKEN
) -> list[dict[str, str]]:
    """The fields of the first frames of a stream, whose connection is closed after them."""
    headers = {"Authorization": f"Bearer {token}"} | ({"Last-Event-ID": after} if after else {})
    url = f"{running.server.url}/api/v1/dashboard/sessions/{session_id}/watch"
    async with (
        asyncio.timeout(30),
        httpx.AsyncClient() as http,
        http.stream("GET", url, headers=headers) as got,
    ):
        text = ""
        async for piece in got.aiter_text():
            text += piece
            if text.count("\n\n") >= count:
                break
    whole = text.split("\n\n")[:count]
    return [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in whole]


async def test_a_session_whose_node_is_lost_goes_on_before_the_eyes_of_who_watches(tmp_path: Path) -> None:
    script: list[Script] = ["One.", "Two.", Answer("Never.", gate=asyncio.Event()), "Three.", "Four."]
    async with system(tmp_path / "data", script) as running, running.node():
        await running.client.submit(shell_task("moved", TURNS))
        watcher = Watcher(running, "moved.0")
        await running.engine.waiting.wait()
        await watcher.hears("One.", "Two.")
        await running.lose_leases()
        assert await watcher.end() is SessionStatus.COMPLETED
        assert watcher.answers == ["One.", "Two.", "Three.", "Four."]
        await assert_exact(running, "moved.0", [watcher])


async def test_a_session_that_is_cancelled_ends_for_who_watches(tmp_path: Path) -> None:
    script: list[Script] = ["One.", Answer("Never.", gate=asyncio.Event())]
    async with system(tmp_path / "data", script) as running, running.node():
        await running.client.submit(shell_task("called-off", TURNS))
        watcher = Watcher(running, "called-off.0")
        await running.engine.waiting.wait()
        await watcher.hears("One.")
        await running.client.cancel_session("called-off.0")
        assert await watcher.end() is SessionStatus.CANCELLED
        assert watcher.answers[0] == "One."
        await assert_exact(running, "called-off.0", [watcher])


async def test_a_session_that_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    async with system(tmp_path / "data", []) as running:
        with pytest.raises(NotFound, match="no session 'nothing'"):
            async for _ in running.client.watch("nothing"):
                pass
