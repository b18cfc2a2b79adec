"""Results that become ready together travel together; each is stored or refused by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from polar.client import AsyncClient, Client
from polar.client import uploader as uploader_module
from polar.client.uploader import ResultUploader
from polar.config.settings import ServerSettings
from polar.errors import Conflict, InvalidInput, NotFound, PolarError
from polar.models.delivery import SIZES, Delivery
from polar.models.session import Lease, LeaseKey, TrajectoryStats
from polar.models.views import LeaseRequest
from polar.rollout import uploads
from polar.rollout.access import STREAMED
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import idle_task, result_of
from tests.fakes.extensions import register_idle_extensions
from tests.unit.client.conftest import Plane

TOKEN = "a token for tests only"


class Counting(AsyncClient):
    """Counts what it delivers, and can hold a request back."""

    def __init__(self, server: str) -> None:
        super().__init__(server, TOKEN)
        self.sizes: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def deliver(self, node: str, deliveries: Sequence[Delivery]) -> list[PolarError | None]:
        self.sizes.append(len(deliveries))
        await self.gate.wait()
        return await super().deliver(node, deliveries)


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counting]:
    register_idle_extensions(monkeypatch)
    async with (
        Store.open(tmp_path) as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        Counting(server.url) as connected,
    ):
        yield connected


async def upload(client: AsyncClient, body: bytes) -> httpx.Response:
    """What the server answers to a body that no client would send."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
        return await http.post(f"{client.server}/api/v1/nodes/n/deliveries", content=body)


async def leased(client: AsyncClient, count: int) -> list[Lease]:
    await client.submit(idle_task(samples=count))
    return list((await client.lease("n", LeaseRequest(max_sessions=count, runtimes=("idle",)))).leases)


def delivery(lease: Lease, key: LeaseKey | None = None) -> Delivery:
    data = lease.session_id.encode()
    result = result_of(lease, has_recording=True, has_artifacts=True)
    return Delivery(key=key or lease.key, result=result, recording=data, artifacts=b"zip of " + data)


async def test_what_waits_for_a_request_goes_with_the_next(client: Counting) -> None:
    leases = await leased(client, 9)
    uploader = ResultUploader(client, "n")
    client.gate.clear()
    deliveries = [asyncio.create_task(uploader.deliver(delivery(lease))) for lease in leases]
    await asyncio.sleep(0)
    client.gate.set()
    await asyncio.gather(*deliveries)
    assert client.sizes in ([1, 8], [9])
    for lease in leases:
        assert await client.recording(lease.session_id) == lease.session_id.encode()
        assert await client.artifacts(lease.session_id) == b"zip of " + lease.session_id.encode()


async def test_one_that_is_refused_harms_no_other(client: Counting) -> None:
    first, second, third = await leased(client, 3)
    uploader = ResultUploader(client, "n")
    outcomes = await asyncio.gather(
        uploader.deliver(delivery(first)),
        uploader.deliver(delivery(second, LeaseKey(fencing_token=77, secret=""))),
        uploader.deliver(delivery(third)),
        return_exceptions=True,
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Conflict)
    assert outcomes[2] is None
    # The same again changes nothing.
    await uploader.deliver(delivery(first))
    assert len([result async for result in client.results()]) == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"error": "half a character: \udc80"},
        {"session_id": "no id"},
        {"stats": TrajectoryStats(sampled_tokens=2**70)},
    ],
    ids=["cannot be sent", "cannot be read", "cannot be stored"],
)
async def test_one_that_breaks_its_request_harms_no_other(
    client: Counting, broken: dict[str, object]
) -> None:
    first, second, third = await leased(client, 3)
    uploader = ResultUploader(client, "n")
    bad = delivery(second)
    bad = bad.model_copy(update={"result": bad.result.model_copy(update=broken)})
    outcomes = await asyncio.gather(
        *(uploader.deliver(one) for one in (delivery(first), bad, delivery(third))), return_exceptions=True
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Exception)
    assert outcomes[2] is None
    stored = {result.session_id async for result in client.results()}
    assert stored == {first.session_id, third.session_id}


async def test_recording_that_is_gone_harms_no_other(client: Counting, tmp_path: Path) -> None:
    first, second = await leased(client, 2)
    path = tmp_path / "recording"
    path.write_bytes(b"a recording")
    uploader = ResultUploader(client, "n")
    result = result_of(second, has_recording=True)
    client.gate.clear()
    deliveries = [
        asyncio.create_task(uploader.deliver(one))
        for one in (delivery(first), Delivery(key=second.key, result=result, recording=path))
    ]
    while not client.sizes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    path.unlink()
    client.gate.set()
    outcomes = await asyncio.gather(*deliveries, return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], FileNotFoundError)


async def test_a_caller_that_gives_up_takes_no_other_with_it(client: Counting) -> None:
    first, second = await leased(client, 2)
    uploader = ResultUploader(client, "n")
    client.gate.clear()
    given_up = asyncio.create_task(uploader.deliver(delivery(first)))
    other = asyncio.create_task(uploader.deliver(delivery(second)))
    while not client.sizes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    client.gate.set()
    await other
    assert second.session_id in [result.session_id async for result in client.results()]
    # What was given up may be delivered again.
    await uploader.deliver(delivery(first))
    assert len([result async for result in client.results()]) == 2


async def test_large_deliveries_wait_for_no_others(client: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "MOST_BYTES", 50)
    small, large = await leased(client, 2)
    uploader = ResultUploader(client, "n")
    client.gate.clear()
    waiting = asyncio.create_task(uploader.deliver(delivery(small)))
    while not client.sizes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    client.gate.set()
    result = result_of(large, has_recording=True)
    await uploader.deliver(Delivery(key=large.key, result=result, recording=b"x" * 51))
    await waiting
    assert client.sizes == [1, 1]


async def test_files_travel_without_being_held_in_memory(client: Counting, tmp_path: Path) -> None:
    (lease,) = await leased(client, 1)
    path, data = tmp_path / "recording", bytes(range(256)) * 40_000
    path.write_bytes(data)
    result = result_of(lease, has_recording=True)
    await ResultUploader(client, "n").deliver(Delivery(key=lease.key, result=result, recording=path))
    assert await client.recording(lease.session_id) == data
    assert path.exists()
    assert not list(tmp_path.glob("recordings/.part-*"))


async def test_body_that_is_not_what_its_sizes_say_is_refused(client: Counting, tmp_path: Path) -> None:
    (lease,) = await leased(client, 1)
    result = result_of(lease, has_recording=True)
    text = Delivery(key=lease.key, result=result).model_dump_json().encode()

    for size in (7, 10_000_000):
        answer = await upload(client, SIZES.pack(len(text), size, 0) + text + b"short")
        assert (answer.status_code, "body: ends before a delivery does" in answer.text) == (400, True)
    answer = await upload(client, SIZES.pack(len(text), 5, 0) + text + b"rightmore")
    assert (answer.status_code, "body: ends before a delivery does" in answer.text) == (400, True)
    answer = await upload(client, SIZES.pack(1 << 60, 0, 0))
    assert (answer.status_code, "JSON of deliveries may have at most" in answer.text) == (400, True)
    (problem,) = await client.deliver("n", [Delivery(key=lease.key, result=result)])
    assert isinstance(problem, InvalidInput)
    assert [result async for result in client.results()] == []
    assert not list(tmp_path.glob("recordings/**/.part-*"))


async def test_all_json_of_a_body_is_bounded_together(
    client: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = await leased(client, 3)
    deliveries = [Delivery(key=lease.key, result=result_of(lease)) for lease in leases]
    most = max(len(one.model_dump_json()) for one in deliveries)
    monkeypatch.setattr(uploads, "MOST_JSON_BYTES", 2 * most)
    with pytest.raises(InvalidInput, match="JSON of deliveries may have at most"):
        await client.deliver("n", deliveries)
    # Those that fit one by one are stored nevertheless.
    uploader = ResultUploader(client, "n")
    await asyncio.gather(*map(uploader.deliver, deliveries))
    assert len([result async for result in client.results()]) == 3


def test_long_recording_and_long_artifacts_fit_one_body() -> None:
    gibibyte = 1 << 30
    assert SIZES.size + uploads.MOST_JSON_BYTES + 2 * gibibyte <= STREAMED


async def test_a_path_in_the_json_of_a_delivery_is_not_read(client: Counting, tmp_path: Path) -> None:
    (lease,) = await leased(client, 1)
    (tmp_path / "private").write_bytes(b"private")
    text = Delivery(key=lease.key, result=result_of(lease, has_recording=True)).model_dump_json()
    named = text[:-1] + f',"recording":"{tmp_path}/private"}}'
    answer = await upload(client, SIZES.pack(len(named), 0, 0) + named.encode())
    assert "were not delivered with its result" in answer.text
    assert (tmp_path / "private").exists()


async def test_many_tasks_are_submitted_together_or_not_at_all(client: Counting) -> None:
    tasks = [idle_task(f"t{n}") for n in range(1_200)]
    views = [view async for view in client.submit_all(tasks)]
    assert [view.spec.id for view in views] == [task.id for task in tasks]
    again = [view async for view in client.submit_all([idle_task("t0"), idle_task("new"), idle_task("new")])]
    assert [view.spec.id for view in again] == ["t0", "new", "new"]
    with pytest.raises(Conflict, match="'t5' exists with other content"):
        async for _ in client.submit_all([idle_task("fresh"), idle_task("t5", samples=2)]):
            pass
    with pytest.raises(NotFound):
        await client.task("fresh")
    with pytest.raises(InvalidInput, match=r"task 'bad': harness\.name: unknown harness"):
        async for _ in client.submit_all([idle_task("fresh"), idle_task("bad", harness="none")]):
            pass
    with pytest.raises(NotFound):
        await client.task("fresh")


def test_sync_client_submits_many_too(plane: Plane) -> None:
    with Client(plane.url, plane.token) as client:
        views = list(client.submit_all([idle_task(f"t{n}") for n in range(3)]))
    assert [view.spec.id for view in views] == ["t0", "t1", "t2"]
