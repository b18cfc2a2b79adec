"""A trainer sends weights to engines on other GPUs; whoever dies meanwhile, nobody waits for ever."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

import orjson
import pytest
import torch

from polar.engines import nccl, transfer
from polar.engines.base import EngineDown, EngineError, WeightUpdate
from polar.engines.nccl import Offer, Sender
from polar.engines.replicas import Replicas
from polar.engines.vllm import VllmEngine
from polar.errors import NotInstalled
from tests.fakes.socket_group import SocketGroup
from tests.fakes.vllm_wire import ANSWER, VllmWire, vllm_wire
from tests.waiting import eventually

# The second is no plain piece of memory.
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0).reshape(2, 2).T}
ARRIVED = {"a": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "b": [0.0, 2.0, 1.0, 3.0]}
TOLD = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2, 3], [2, 2]]}
INIT = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[SocketGroup]:
    monkeypatch.setattr(nccl, "NcclGroup", SocketGroup)
    SocketGroup.made = []
    return SocketGroup.made


@pytest.fixture
def sender(groups: list[SocketGroup]) -> Iterator[Sender]:
    with Sender("127.0.0.1") as sender:
        yield sender


@asynccontextmanager
async def a_vllm(**settings: Any) -> AsyncIterator[VllmWire]:
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        wire.backend, wire.started_at = "nccl", 1794827457.67
        for name, value in settings.items():
            setattr(wire, name, value)
        yield wire


@asynccontextmanager
async def a_client(*wires: VllmWire) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(wires[0].url)
    yield engine
    await engine.close()


def offered(sender: Sender, directory: Path, number: int = 1) -> tuple[Offer, WeightUpdate]:
    (path := directory / str(number)).mkdir()
    return sender.offer(WEIGHTS, path), WeightUpdate(number, str(path))


async def write_files(offer: Offer, update: WeightUpdate) -> None:
    """As the trainer does while it sends."""
    assert update.path is not None
    Path(update.path, "model.safetensors").touch()
    await asyncio.to_thread(offer.withdraw)


async def test_vllm_meets_the_trainer_once_and_is_sent_every_version(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with a_vllm(workers=2) as wire, a_client(wire) as engine:
        for number in (1, 2):
            offer, update = offered(sender, tmp_path, number)
            wire.received_weights.clear()
            wire.orders.clear()
            await engine.update_weights(update)
            assert wire.received_weights == ARRIVED
            assert wire.transfers == [TOLD] * number
            assert wire.weight_version == str(number)
            assert f"weights {number} reached {wire.url} over NCCL" in caplog.text
            await write_files(offer, update)
        assert wire.orders == [
            "/update_weight_version",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/update_weight_version",
        ]
    assert [group.sends for group in groups] == [2]


async def test_a_trainer_may_be_named_by_a_host_with_addresses_of_two_kinds(
    groups: list[SocketGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = socket.getaddrinfo
    other = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))

    def both(host: Any, port: Any, family: int = 0, *rest: Any, **more: Any) -> list[Any]:
        found: list[Any] = list(asked(host, port, family, *rest, **more))
        return found if family or host != "localhost" else [other, *found]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with Sender("localhost") as sender:
        _, update = offered(sender, tmp_path)
        async with a_vllm() as wire, a_client(wire) as engine:
            await asyncio.wait_for(engine.update_weights(update), 30)
            assert wire.received_weights == ARRIVED


async def test_it_meets_the_trainer_before_anything_is_begun(sender: Sender, tmp_path: Path) -> None:
    _, update = offered(sender, tmp_path)
    async with a_vllm() as wire, a_client(wire) as engine:
        await engine.update_weights(update)
        assert wire.orders[1:4] == [
            "/shutdown_weight_transfer_engine",
            "/init_weight_transfer_engine",
            "/start_weight_update",
        ]


async def test_all_replicas_are_sent_them_at_once(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path
) -> None:
    _, update = offered(sender, tmp_path)
    async with a_vllm() as one, a_vllm(workers=2, started_at=1.0) as other:
        one.received = other.received = asyncio.Event()
        replicas = Replicas({"a": VllmEngine(one.url), "b": VllmEngine(other.url)})
        changing = asyncio.create_task(replicas.update_weights(update))
        for wire in (one, other):
            # Both are being sent them before either has them.
            await asyncio.wait_for(_told(wire, "/update_weights"), 30)
        one.received.set()
        await asyncio.wait_for(changing, 30)
        assert one.received_weights == other.received_weights == ARRIVED
        assert len(groups) == 2
        await replicas.close()


async def _told(wire: VllmWire, order: str) -> None:
    while order not in wire.orders:
        wire.arrived.clear()
        await wire.arrived.wait()


@pytest.mark.parametrize("change", ["started anew", "another client"])
async def test_an_engine_that_may_be_in_another_group_meets_the_trainer_again(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path, change: str
) -> None:
    async with a_vllm() as wire, a_client(wire) as engine, a_client(wire) as another:
        for number in (1, 2, 3):
            _, update = offered(sender, tmp_path, number)
            await (another if change == "another client" and number == 2 else engine).update_weights(update)
            assert wire.weight_version == str(number)
            if change == "started anew" and number < 3:
                await wire.start_anew()
                with suppress(EngineDown):
                    await engine.model_info()
    assert [group.sends for group in groups] == [1, 1, 1]
    assert [group.has_left.is_set() for group in groups] == [True, True, False]


@pytest.mark.parametrize("missing", [{"backend": None}, {"workers": 0}], ids=["not configured", "too old"])
async def test_an_engine_that_cannot_take_part_says_what_it_needs_and_reads_files(
    sender: Sender, tmp_path: Path, missing: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    offer, update = offered(sender, tmp_path)
    async with a_vllm(**missing) as wire, a_client(wire) as engine:
        changing = asyncio.create_task(engine.update_weights(update))
        await _logged("waits for files", caplog)
        await write_files(offer, update)
        await asyncio.wait_for(changing, 30)
        assert """--weight-transfer-config '{"backend": "nccl"}'""" in caplog.text
        assert "/collective_rpc" in wire.orders
        assert wire.weight_version == "1"


async def _logged(words: str, caplog: pytest.LogCaptureFixture) -> None:
    await eventually(lambda: words in caplog.text)


async def test_one_that_joins_late_reads_files(sender: Sender, tmp_path: Path) -> None:
    offer, update = offered(sender, tmp_path)
    await write_files(offer, update)
    async with a_vllm() as wire, a_client(wire) as engine:
        await engine.update_weights(update)
        assert "/collective_rpc" in wire.orders
        assert wire.transfers == []


async def test_one_that_is_late_for_its_turn_reads_files(sender: Sender, tmp_path: Path) -> None:
    """Where no lock tells the trainer of whoever has read the manifest."""
    offer, update = offered(sender, tmp_path)
    offer.tensors.clear()
    async with a_vllm() as wire, a_client(wire) as engine:
        changing = asyncio.create_task(engine.update_weights(update))
        await write_files(offer, update)
        await asyncio.wait_for(changing, 30)
        assert "/collective_rpc" in wire.orders


Script = Callable[[asyncio.StreamReader, Callable[..., None]], Awaitable[None]]


@asynccontextmanager
async def a_trainer(directory: Path, script: Script) -> AsyncIterator[IO[str]]:
    """One that says what it is told to, and then is gone."""

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await script(reader, lambda **words: writer.write(orjson.dumps(words) + b"\n"))
        writer.close()

    async with await asyncio.start_server(attend, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        told = {"address": host, "port": port, "secret": "s", "offer": 0}
        with transfer.publish({"nccl": told, "update_info": TOLD}, directory) as held:
            yield held


async def _dies_at_once(reader: asyncio.StreamReader, say: Callable[..., None]) -> None:
    pass


async def _dies_at_the_meeting(reader: asyncio.StreamReader, say: Callable[..., None]) -> None:
    say(init_info=INIT)


@pytest.mark.parametrize("script", [_dies_at_once, _dies_at_the_meeting])
async def test_a_trainer_that_dies_before_it_sends_leaves_the_engine_with_files_or_an_error(
    tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_vllm() as wire, a_client(wire) as engine, a_trainer(tmp_path, script) as held:
        changing = asyncio.create_task(engine.update_weights(WeightUpdate(1, str(tmp_path))))
        await _logged("waits for files", caplog)
        held.close()
        with pytest.raises(EngineError, match="a process that has ended"):
            await asyncio.wait_for(changing, 30)
        assert "/update_weights" not in wire.orders


async def test_a_trainer_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    told = {"address": "127.0.0.1", "port": 9, "secret": "s", "offer": 0}
    with transfer.publish({"nccl": told, "update_info": TOLD}, tmp_path):
        pass
    async with a_vllm() as wire, a_client(wire) as engine:
        with pytest.raises(EngineError, match="a process that has ended"):
            await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        assert wire.orders == []


async def test_a_trainer_that_dies_while_it_sends_leaves_an_engine_that_must_be_started_anew(
    tmp_path: Path,
) -> None:
    """vLLM itself waits in NCCL for ever: nobody waits for it."""

    async def dies_while_it_sends(reader: asyncio.StreamReader, say: Callable[..., None]) -> None:
        say(init_info=None)
        await reader.readline()
        await wire.arrived.wait()

    async with a_vllm() as wire, a_client(wire) as engine, a_trainer(tmp_path, dies_while_it_sends):
        wire.received = asyncio.Event()
        with pytest.raises(EngineDown, match="broken off") as raised:
            await asyncio.wait_for(engine.update_weights(WeightUpdate(1, str(tmp_path))), 30)
        assert "restart it" in str(raised.value.hint)


async def test_a_trainer_that_says_nothing_more_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def is_silent(reader: asyncio.StreamReader, say: Callable[..., None]) -> None:
        await reader.read()

    monkeypatch.setattr(nccl, "ANSWER_SECONDS", 0.1)
    async with a_vllm() as wire, a_client(wire) as engine, a_trainer(tmp_path, is_silent) as held:
        changing = asyncio.create_task(engine.update_weights(WeightUpdate(1, str(tmp_path))))
        await _logged("has not answered within", caplog)
        held.close()
        with pytest.raises(EngineError, match="a process that has ended"):
            await asyncio.wait_for(changing, 30)


@pytest.mark.parametrize("step", ["joining", "received"])
async def test_an_engine_that_dies_holds_neither_the_trainer_nor_other_engines(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    offer, update = offered(sender, tmp_path)
    async with a_vllm() as wire, a_vllm(started_at=1.0) as other, a_client(wire) as engine:
        setattr(wire, step, asyncio.Event())
        changing = asyncio.create_task(engine.update_weights(update))
        order = "/init_weight_transfer_engine" if step == "joining" else "/update_weights"
        await asyncio.wait_for(_told(wire, order), 30)
        await wire.start_anew()
        with pytest.raises(EngineDown):
            await asyncio.wait_for(changing, 30)
        async with a_client(other) as another:
            await asyncio.wait_for(another.update_weights(update), 30)
        assert other.received_weights == ARRIVED
        await _logged("was not given weights", caplog)
        # Started again, it is sent them as any other.
        setattr(wire, step, None)
        await asyncio.wait_for(engine.update_weights(update), 30)
        assert wire.received_weights == ARRIVED
        await asyncio.wait_for(write_files(offer, update), 30)


@pytest.mark.parametrize("order", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_weights_that_vllm_refuses_are_read_from_files(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    offer, update = offered(sender, tmp_path)
    async with a_vllm(refused=order) as wire, a_client(wire) as engine:
        changing = asyncio.create_task(engine.update_weights(update))
        await _logged("waits for files", caplog)
        await write_files(offer, update)
        await asyncio.wait_for(changing, 30)
        assert wire.weight_version == "1"
    # What the trainer was sending to nobody is broken off.
    assert await asyncio.to_thread(groups[0].has_left.wait, 30)


async def test_a_trainer_that_cannot_take_part_lets_the_engine_know(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(nccl, "NcclGroup", refuse)
    offer, update = offered(sender, tmp_path)
    async with a_vllm() as wire, a_client(wire) as engine:
        wire.joining = asyncio.Event()
        changing = asyncio.create_task(engine.update_weights(update))
        await _logged("the other side has broken off", caplog)
        assert "Duplicate GPU detected" in caplog.text
        await write_files(offer, update)
        await asyncio.wait_for(changing, 30)
        assert "/collective_rpc" in wire.orders


async def test_nobody_without_the_manifest_is_given_weights(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path
) -> None:
    _, update = offered(sender, tmp_path)
    with transfer.reading(update.path) as shared:
        assert shared is not None
    async with nccl.trainer_at(shared["nccl"]) as trainer:
        trainer.send(secret="guessed", offer=0, client="c", started=None, workers=1, is_joined=False)
        with pytest.raises(nccl.PeerGone):
            await trainer.receive(30)
    assert groups == []


async def test_a_group_that_nobody_waits_for_any_more_is_left(
    sender: Sender, groups: list[SocketGroup], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, update = offered(sender, tmp_path)
    with transfer.reading(update.path) as shared:
        assert shared is not None
    told = shared["nccl"]
    async with nccl.trainer_at(told) as trainer:
        trainer.send(secret=told["secret"], offer=0, client="c", started=None, workers=1, is_joined=False)
        at = (await trainer.receive(30))["init_info"]
        await eventually(lambda: groups)
    await _logged("was not given weights", caplog)
    # The engine's client is gone, and its worker comes all the same.
    _, writer = await asyncio.open_connection(at["master_address"], at["master_port"])
    assert await asyncio.to_thread(groups[0].has_left.wait, 30)
    writer.close()


AS_IN_VLLM = """
import socket, sys, threading, types
from datetime import timedelta

import torch
from torch.distributed import TCPStore


def store(host, port, members, **more):
    return TCPStore(host, port, members, timeout=timedelta(seconds=30), use_libuv=False, **more)


class StatelessProcessGroup:
    met = []

    @staticmethod
    def create(host, port, rank, members, store_timeout, listen_socket):
        made = StatelessProcessGroup()
        StatelessProcessGroup.met.append(made)
        made.store = store(host, port, members, is_master=True, master_listen_fd=listen_socket.fileno())
        made.socket = listen_socket
        return made


class PyNcclCommunicator:
    disabled = False

    def __init__(self, group, device):
        self.group = group


names = ("vllm", "vllm.distributed", "vllm.distributed.device_communicators")
sys.modules |= {name: types.ModuleType(name) for name in names}
for name, known in (("utils", StatelessProcessGroup), ("device_communicators.pynccl", PyNcclCommunicator)):
    sys.modules[f"vllm.distributed.{name}"] = module = types.ModuleType(name)
    setattr(module, known.__name__, known)
torch.cuda.set_device = lambda device: None

from polar.engines.nccl import NcclGroup

joined = []
with socket.create_server(("127.0.0.1", 0)) as listening:
    host, port = listening.getsockname()
    joining = threading.Thread(target=lambda: joined.append(store(host, port, 2, is_master=False)))
    joining.start()
    group = NcclGroup(listening, 2, None)
    joining.join()
# The engine ends.
joined.clear()
(met,) = StatelessProcessGroup.met
met.store.set("still", "here")
print(met.store.get("still"), flush=True)
del group
"""


async def test_a_trainer_outlives_the_store_where_it_met_an_engine() -> None:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AS_IN_VLLM, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, complaint = await asyncio.wait_for(running.communicate(), 60)
    assert (running.returncode, said) == (0, b"b'here'\n"), complaint.decode()


def test_a_trainer_without_vllm_is_told_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match="needs vLLM beside the trainer"):
        nccl.require()
