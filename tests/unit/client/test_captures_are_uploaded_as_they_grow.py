"""What sessions capture is on the server soon after, each answer once; nobody waits for it or fails by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.client import AsyncClient
from polar.client import uploader as uploader_module
from polar.client.uploader import CaptureUploader, GrowingCapture
from polar.config.settings import ServerSettings
from polar.errors import Backoff, Conflict, Unavailable
from polar.models.completion import REPLAYED, RESUMED, Completion
from polar.models.delivery import CaptureGrowth
from polar.models.session import Lease, LeaseKey
from polar.models.views import LeaseRequest, Release
from polar.recordings.capture import CaptureWriter, parse_capture
from polar.recordings.tree import TokenTree
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import idle_task
from tests.fakes.extensions import register_idle_extensions
from tests.fakes.sessions import completion, sessions
from tests.waiting import eventually

TOKEN = "a token for tests only"


class Shipping(AsyncClient):
    """Counts what it ships, and can hold a request back or lose it."""

    def __init__(self, server: str) -> None:
        super().__init__(server, TOKEN)
        self.requests: list[Sequence[CaptureGrowth]] = []
        self.is_down = False
        self.loses_answers = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def ship_captures(self, node: str, grown: Sequence[CaptureGrowth]) -> tuple[int | None, ...]:
        self.requests.append(grown)
        await self.gate.wait()
        if self.is_down:
            raise Unavailable("the server cannot be reached")
        answer = await super().ship_captures(node, grown)
        if self.loses_answers:
            raise Unavailable("the connection was lost")
        return answer


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shipping]:
    register_idle_extensions(monkeypatch)
    monkeypatch.setattr(uploader_module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(uploader_module, "TROUBLE", Backoff(0.0, 0.0))
    async with (
        Store.open(tmp_path / "data") as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        Shipping(server.url) as connected,
    ):
        yield connected


@asynccontextmanager
async def at_work(client: AsyncClient) -> AsyncIterator[CaptureUploader]:
    """An uploader that sends while the block runs."""
    uploader = CaptureUploader(client, "n")
    sending = asyncio.create_task(uploader.run())
    try:
        yield uploader
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()


class Recorder:
    """A session on its node: what it records is told to the uploader, as the gateway does."""

    def __init__(self, uploader: CaptureUploader, lease: Lease, directory: Path) -> None:
        path = directory / f"{lease.session_id}@{lease.fencing_token}.log"
        self.growth = uploader.follow(lease, path)
        self.writer = CaptureWriter(path)
        self._count = 0

    def record(self, *completions: Completion) -> None:
        for one in completions:
            self.writer.append(one)
            self.growth.add(one, self.writer.length)

    def answer(self, **extra: str) -> None:
        """Record one more completion that extends the one before."""
        number = self._count
        self._count += 1
        self.record(replace(completion(number, [*range(number * 2 + 1)], [number * 2 + 1]), extra=extra))


def lease_of(token: int) -> Lease:
    key = LeaseKey(fencing_token=token, secret="")
    return Lease(session_id="s.0", task=idle_task("s"), sample=0, attempt=token, key=key, expires_at=0.0)


async def leased(client: AsyncClient, count: int = 1) -> list[Lease]:
    await client.submit(idle_task(samples=count))
    return await again(client, count)


async def again(client: AsyncClient, count: int = 1) -> list[Lease]:
    return list((await client.lease("n", LeaseRequest(max_sessions=count, runtimes=("idle",)))).leases)


async def kept(client: AsyncClient, lease: Lease) -> TokenTree:
    return parse_capture(await client.capture(lease.session_id, lease.key))


async def test_what_grows_is_on_the_server_without_anybody_asking(client: Shipping, tmp_path: Path) -> None:
    (lease,) = await leased(client)
    async with at_work(client) as uploader:
        session = Recorder(uploader, lease, tmp_path)
        for count in (1, 2, 3):
            session.answer()
            await eventually(lambda: not session.growth.is_behind)
            tree = await kept(client, lease)
            assert (len(tree.completions), tree.faults) == (count, ())
    assert session.growth.sent == session.writer.length == len(await client.capture("task.0", lease.key))


async def test_what_grew_during_a_request_goes_with_the_next(client: Shipping, tmp_path: Path) -> None:
    leases = await leased(client, 9)
    async with at_work(client) as uploader:
        recorders = [Recorder(uploader, lease, tmp_path) for lease in leases]
        client.gate.clear()
        recorders[0].answer()
        await eventually(lambda: bool(client.requests))
        for recorder in recorders:
            for _ in range(5):
                recorder.answer()
        assert len(client.requests) == 1
        client.gate.set()
        await eventually(lambda: not any(recorder.growth.is_behind for recorder in recorders))
    assert [len(request) for request in client.requests] == [1, 9]
    counts = [len((await kept(client, lease)).completions) for lease in leases]
    assert counts == [6, *[5] * 8]


async def test_requests_are_bounded_and_no_session_is_passed_over(
    client: Shipping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader_module, "MOST_GROWTH", 100)
    monkeypatch.setattr(uploader_module, "MOST_TOGETHER", 2)
    leases = await leased(client, 3)
    async with at_work(client) as uploader:
        recorders = [Recorder(uploader, lease, tmp_path) for lease in leases]
        for recorder in recorders:
            for _ in range(4):
                recorder.answer()
        await eventually(lambda: not any(recorder.growth.is_behind for recorder in recorders))
    assert max(sum(len(one.data) for one in request) for request in client.requests) <= 100
    assert max(map(len, client.requests)) <= 2
    assert {one.session_id for request in client.requests[:3] for one in request} == {
        "task.0",
        "task.1",
        "task.2",
    }
    for lease in leases:
        assert len((await kept(client, lease)).completions) == 4


async def test_trouble_is_told_once_and_what_is_missing_is_sent_later(
    client: Shipping, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (lease,) = await leased(client)
    client.is_down = True
    with caplog.at_level(logging.INFO, logger="polar.client.uploader"):
        async with at_work(client) as uploader:
            session = Recorder(uploader, lease, tmp_path)
            for _ in range(3):
                session.answer()
                client.requests.clear()
                await eventually(lambda: bool(client.requests))
            client.is_down = False
            await eventually(lambda: not session.growth.is_behind)
    first, last = caplog.messages
    assert first.endswith("the server cannot be reached")
    assert last == "captures are sent to the server again"
    assert len((await kept(client, lease)).completions) == 3


async def test_an_answer_that_was_lost_stores_nothing_twice(client: Shipping, tmp_path: Path) -> None:
    (lease,) = await leased(client)
    client.loses_answers = True
    async with at_work(client) as uploader:
        session = Recorder(uploader, lease, tmp_path)
        session.answer()
        await eventually(lambda: len(client.requests) >= 2)
        session.answer()
        client.loses_answers = False
        await eventually(lambda: not session.growth.is_behind)
    assert await client.capture("task.0", lease.key) == session.growth.path.read_bytes()


async def test_a_lease_that_has_passed_on_is_not_tried_again(client: Shipping, tmp_path: Path) -> None:
    first, second = await leased(client, 2)
    stranger = first.model_copy(update={"key": LeaseKey(fencing_token=1, secret="another")})
    async with at_work(client) as uploader:
        lost, held = Recorder(uploader, stranger, tmp_path), Recorder(uploader, second, tmp_path)
        lost.answer()
        held.answer()
        await eventually(lambda: lost.growth.is_over and not held.growth.is_behind)
        sent = len(client.requests)
        lost.answer()
        held.answer()
        await eventually(lambda: not held.growth.is_behind)
    assert [one.session_id for request in client.requests[sent:] for one in request] == [second.session_id]


async def test_a_capture_that_cannot_be_read_harms_no_other(
    client: Shipping, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await leased(client, 2)
    async with at_work(client) as uploader:
        gone, sound = Recorder(uploader, first, tmp_path), Recorder(uploader, second, tmp_path)
        gone.answer()
        gone.growth.path.unlink()
        gone.growth.path.mkdir()
        sound.answer()
        await eventually(lambda: not sound.growth.is_behind)
    assert gone.growth.is_over
    assert "session task.0: its capture cannot be sent" in caplog.text
    assert len((await kept(client, second)).completions) == 1


async def test_the_rest_is_sent_before_a_session_is_given_back(client: Shipping, tmp_path: Path) -> None:
    (lease,) = await leased(client)
    uploader = CaptureUploader(client, "n")
    session = Recorder(uploader, lease, tmp_path)
    await uploader.finish(session.growth)
    assert not client.requests
    session.answer()
    session.answer()
    await uploader.finish(session.growth)
    assert len((await kept(client, lease)).completions) == 2
    client.is_down = True
    session.answer()
    with pytest.raises(Unavailable):
        await uploader.finish(session.growth)


async def test_a_dropped_capture_is_sent_no_further(client: Shipping, tmp_path: Path) -> None:
    (lease,) = await leased(client)
    uploader = CaptureUploader(client, "n")
    session = Recorder(uploader, lease, tmp_path)
    session.answer()
    uploader.drop(session.growth)
    session.answer()
    await uploader.finish(session.growth)
    assert not client.requests


async def test_nothing_is_sent_where_it_is_switched_off(client: Shipping, tmp_path: Path) -> None:
    (lease,) = await leased(client)
    uploader = CaptureUploader(client, "n", is_on=False)
    session = Recorder(uploader, lease, tmp_path)
    session.answer()
    await uploader.finish(session.growth)
    assert not client.requests


async def test_each_attempt_sends_what_is_new_and_the_next_gets_all(client: Shipping, tmp_path: Path) -> None:
    (first,) = await leased(client)
    uploader = CaptureUploader(client, "n")
    session = Recorder(uploader, first, tmp_path)
    session.answer()
    session.answer()
    await uploader.finish(session.growth)
    await client.release(first.session_id, Release(key=first.key))
    (second,) = await again(client)
    assert second.continues
    session = Recorder(uploader, second, tmp_path)
    session.answer(**{RESUMED: "yes"})
    await uploader.finish(session.growth)
    assert len(client.requests) == 1, "the server has it"
    session.answer(**{RESUMED: "yes"})
    session.answer()
    await uploader.finish(session.growth)
    tree = await kept(client, second)
    assert ([it.id for it in tree.completions], tree.faults) == (["c0", "c1", "c2"], ())
    with pytest.raises(Conflict, match="not leased under this key"):
        await client.capture(first.session_id, first.key)


async def test_what_a_branch_replays_is_sent_with_its_first_own_answer(
    client: Shipping, tmp_path: Path
) -> None:
    (lease,) = await leased(client)
    uploader = CaptureUploader(client, "n")
    session = Recorder(uploader, lease, tmp_path)
    session.answer(**{REPLAYED: "other.0"})
    session.answer(**{REPLAYED: "other.0"})
    await uploader.finish(session.growth)
    assert not client.requests
    session.answer()
    await uploader.finish(session.growth)
    assert [it.id for it in (await kept(client, lease)).completions] == ["c0", "c1", "c2"]


@given(made=sessions(), attempts=st.lists(st.integers(0, 4), max_size=4), chunk=st.integers(1, 300))
def test_what_all_attempts_send_is_every_completion_once(
    made: list[Completion], attempts: list[int], chunk: int
) -> None:
    """However many attempts there are, and in whatever pieces their captures travel."""
    sent = b""
    known: list[Completion] = []
    with TemporaryDirectory() as directory:
        for token, count in enumerate([*attempts, len(made)], 1):
            growth = GrowingCapture(lease_of(token), Path(directory) / f"{token}.log", lambda _: None)
            writer = CaptureWriter(growth.path)
            replayed = [replace(one, extra={RESUMED: "yes"}) for one in known]
            new = made[len(known) : len(known) + count]
            for one in (*replayed, *new):
                writer.append(one)
                growth.add(one, writer.length)
            writer.close()
            known += new
            data = growth.path.read_bytes()
            while growth.is_behind:
                piece = b"".join(data[start:end] for start, end in growth.unsent(chunk))
                assert 0 < len(piece) <= chunk
                sent += piece
                growth.take_answer(growth.sent + len(piece))
    tree = parse_capture(sent)
    assert not tree.faults
    assert [it.id for it in tree.completions] == [it.id for it in made]
    for one, other in zip(tree.completions, made, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.sampled_ids, other.sampled_ids)
        assert one.extra == other.extra
