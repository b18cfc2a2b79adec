"""Engines read a trainer's GPU memory while it is there, or files once all are: never half of either."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar.engines import transfer
from polar.engines.base import EngineError, WeightUpdate
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.files import lock
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.vllm_wire import vllm_wire
from tests.waiting import still_waits

TOLD = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]], "ipc_handles_pickled": "gAS="}
MANIFEST = {"update_info": TOLD}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory whose weights are in memory that is held, and half of them in files."""
    with transfer.publish(MANIFEST, tmp_path):
        (tmp_path / "model-00001-of-00002.safetensors").touch()
        yield tmp_path


async def test_memory_is_held_until_an_engine_that_joined_late_has_read_it(shared: Path) -> None:
    async with vllm_wire(takes_orders=True) as wire:
        wire.received = asyncio.Event()
        engine = VllmEngine(wire.url)
        loading = asyncio.create_task(engine.update_weights(WeightUpdate(1, str(shared))))
        await asyncio.wait_for(wire.arrived.wait(), 30)
        # The files are there by now.
        withdrawing = asyncio.create_task(asyncio.to_thread(transfer.withdraw, shared))
        assert await still_waits(withdrawing)
        wire.received.set()
        await asyncio.wait_for(loading, 30)
        await asyncio.wait_for(withdrawing, 30)
        assert (wire.transfers, wire.weight_version) == ([TOLD], "1")
        await engine.close()


async def test_an_engine_that_finds_the_manifest_going_reads_the_files(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_late(file: Any, *, is_shared: bool = False) -> None:
        if is_shared:
            transfer.withdraw(shared)
        lock(file, is_shared=is_shared)

    monkeypatch.setattr(transfer, "lock", lock_late)
    async with vllm_wire(takes_orders=True) as wire:
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(shared)))
        assert "/collective_rpc" in wire.orders
        assert wire.transfers == []
        await engine.close()


def test_one_that_breaks_off_lets_the_memory_go(shared: Path) -> None:
    reader = transfer.reading(shared)
    assert reader.__enter__() == MANIFEST
    reader.__exit__(TimeoutError, TimeoutError(), None)
    transfer.withdraw(shared)
    with transfer.reading(shared) as told:
        assert told is None


def test_a_reader_that_was_killed_is_not_waited_for(shared: Path) -> None:
    dying = f"""
import os
from polar.engines import transfer
with transfer.reading({str(shared)!r}) as told:
    os._exit(len(told))
"""
    assert subprocess.run([sys.executable, "-c", dying], check=False).returncode == len(MANIFEST)
    transfer.withdraw(shared)


@pytest.fixture
def left_behind(tmp_path: Path) -> Path:
    """A directory whose weights were in the memory of a process that was killed."""
    dying = f"""
import os
from pathlib import Path
from polar.engines import transfer
held = transfer.publish({MANIFEST!r}, Path({str(tmp_path)!r}))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", dying], check=True)
    return tmp_path


async def test_no_engine_is_told_of_memory_that_is_gone(left_behind: Path) -> None:
    """vLLM would not outlive reading it."""
    async with vllm_wire(takes_orders=True) as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="a process that has ended"):
            await engine.update_weights(WeightUpdate(1, str(left_behind)))
        # It goes on with what it has.
        assert (wire.transfers, wire.weight_version) == ([], "default")
        assert (await engine.model_info()).policy_version == 0
        await engine.close()


async def test_sglang_loads_no_half_of_the_files(shared: Path) -> None:
    async with sglang_wire() as wire:
        engine = SglangEngine(wire.url)
        with pytest.raises(EngineError, match="not in files yet"):
            await engine.update_weights(WeightUpdate(1, str(shared)))
        assert wire.orders == []
        transfer.withdraw(shared)
        await engine.update_weights(WeightUpdate(1, str(shared)))
        assert wire.weight_version == "1"
        await engine.close()


SHARED = {"a": torch.zeros(1)}


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a torch's counters of readers, of which the second is that of every tensor."""
    with NamedTemporaryFile(prefix="torch_", dir="/dev/shm") as file:
        handle = (*range(11), f"/{Path(file.name).name}".encode(), 1)
        monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (None, handle))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
        yield Path(file.name)


def counted(*values: int) -> bytes:
    return bytes(64) + b"".join(value.to_bytes(8, "little", signed=True) for value in values)


@pytest.mark.parametrize("left", [1, 0, -1], ids=["read by none", "by one", "by two"])
def test_torch_frees_what_was_shared_however_many_have_read_it(
    left: int, tmp_path: Path, counters: Path
) -> None:
    counters.write_bytes(counted(7, 1, 7))
    shared = transfer.SharedTensors(SHARED, tmp_path)
    counters.write_bytes(counted(7, left, 7))
    shared.withdraw()
    assert counters.read_bytes() == counted(7, 0, 7)


@pytest.mark.parametrize("content", [bytes(range(128)), b""], ids=["others", "none"])
def test_counters_of_a_torch_that_counts_otherwise_are_left_alone(
    content: bytes, tmp_path: Path, counters: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters.write_bytes(content)
    transfer.SharedTensors(SHARED, tmp_path).withdraw()
    assert counters.read_bytes() == content
    assert "counts readers in another way" in caplog.text


def test_memory_that_nobody_could_be_told_of_is_freed(tmp_path: Path, counters: Path) -> None:
    """As on a full disk: torch would keep it until the trainer's end, a model's worth for each push."""
    counters.write_bytes(counted(7, 1))
    with pytest.raises(FileNotFoundError):
        transfer.SharedTensors(SHARED, tmp_path / "gone")
    assert counters.read_bytes() == counted(7, 0)
