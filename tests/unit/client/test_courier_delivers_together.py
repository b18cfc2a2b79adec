"""Parcels that become ready together travel together; each is told its own fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from polar.client import AsyncClient, Client
from polar.client import courier as courier_module
from polar.client.courier import Courier, Parcel
from polar.config.settings import ServerSettings
from polar.errors import Conflict, InvalidInput, NotFound
from polar.models.session import Lease, LeaseKey
from polar.models.views import Deliveries, Delivery, DeliveryOutcome, LeaseRequest
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

    async def deliver(
        self, node: str, deliveries: Deliveries, parts: Iterable[bytes] = ()
    ) -> tuple[DeliveryOutcome, ...]:
        self.sizes.append(len(deliveries.deliveries))
        await self.gate.wait()
        return await super().deliver(node, deliveries, parts)


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counting]:
    register_idle_extensions(monkeypatch)
    async with (
        Store.open(tmp_path) as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        Counting(server.url) as connected,
    ):
        yield connected


async def leased(client: AsyncClient, count: int) -> list[Lease]:
    await client.submit(idle_task(samples=count))
    return list((await client.lease("n", LeaseRequest(max_sessions=count, runtimes=("idle",)))).leases)


def parcel(lease: Lease, key: LeaseKey | None = None) -> Parcel:
    data = lease.session_id.encode()
    result = result_of(lease, has_recording=True, has_artifacts=True)
    return Parcel(key or lease.key, result, data, b"zip of " + data)


async def test_what_waits_for_a_request_goes_with_the_next(client: Counting) -> None:
    leases = await leased(client, 9)
    courier = Courier(client, "n")
    client.gate.clear()
    deliveries = [asyncio.create_task(courier.deliver(parcel(lease))) for lease in leases]
    await asyncio.sleep(0)
    client.gate.set()
    await asyncio.gather(*deliveries)
    assert client.sizes in ([1, 8], [9])
    for lease in leases:
        assert await client.recording(lease.session_id) == lease.session_id.encode()
        assert await client.artifacts(lease.session_id) == b"zip of " + lease.session_id.encode()


async def test_one_that_is_refused_harms_no_other(client: Counting) -> None:
    first, second, third = await leased(client, 3)
    courier = Courier(client, "n")
    outcomes = await asyncio.gather(
        courier.deliver(parcel(first)),
        courier.deliver(parcel(second, LeaseKey(fencing_token=77, secret=""))),
        courier.deliver(parcel(third)),
        return_exceptions=True,
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Conflict)
    assert outcomes[2] is None
    # The same again changes nothing.
    await courier.deliver(parcel(first))
    assert len([result async for result in client.results()]) == 2


async def test_a_caller_that_gives_up_takes_no_other_with_it(client: Counting) -> None:
    first, second = await leased(client, 2)
    courier = Courier(client, "n")
    client.gate.clear()
    given_up = asyncio.create_task(courier.deliver(parcel(first)))
    other = asyncio.create_task(courier.deliver(parcel(second)))
    while not client.sizes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    client.gate.set()
    await other
    assert [result.session_id async for result in client.results()] == [second.session_id]


async def test_large_parcels_go_alone(client: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "MOST_BYTES", 5)
    (lease,) = await leased(client, 1)
    await Courier(client, "n").deliver(parcel(lease))
    assert client.sizes == []
    assert await client.recording(lease.session_id) == lease.session_id.encode()


async def test_body_that_is_not_what_its_first_line_says_is_refused(client: Counting) -> None:
    (lease,) = await leased(client, 1)
    delivery = Delivery(
        session_id=lease.session_id,
        key=lease.key,
        result=result_of(lease, has_recording=True),
        recording_bytes=7,
    )
    with pytest.raises(InvalidInput, match="and its first line speaks of"):
        await client.deliver("n", Deliveries(deliveries=(delivery,)), [b"short"])
    missing = delivery.model_copy(update={"recording_bytes": None})
    (outcome,) = await client.deliver("n", Deliveries(deliveries=(missing,)), [])
    assert outcome.problem is not None
    assert outcome.problem.code == "not_found"
    assert [result async for result in client.results()] == []


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
