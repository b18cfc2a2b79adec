"""Weights that a trainer sends to engines on other GPUs over NCCL, in a group of its own with each engine.

The trainer listens. An engine's client that finds the manifest connects, and both sides take each step
together: they meet (once), the engine is told to receive, the trainer sends. Who dies ends the connection,
which the other side notices at once: NCCL itself would wait indefinitely.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from polar.engines.base import EngineError
from polar.engines.transfer import publish, tensor_manifest, withdraw
from polar.errors import NotInstalled

if TYPE_CHECKING:
    from torch import Tensor, device

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
MEET_SECONDS = 60.0
"""Timeout for forming a group."""
SEND_SECONDS = 600.0
"""Timeout for sending the weights, and for each step of either side."""

Given = TypeVar("Given")


class PeerGone(EngineError):
    """The other side has left."""


def require() -> None:
    """Raise if the trainer cannot take part."""
    if find_spec("vllm") is None:
        raise NotInstalled(
            "rollouts.transfer: nccl needs vLLM beside the trainer, whose NCCL groups it joins",
            hint="pip install vllm into the trainer's environment, or set rollouts.transfer to files",
        )


class NcclGroup:
    """The trainer and the workers of one engine, as vLLM makes such groups."""

    def __init__(self, store: socket.socket, members: int, device: device) -> None:
        """Return when all members have joined at the socket; this is rank 0."""
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        torch.cuda.set_device(device)
        host, port = store.getsockname()
        # Torch's store owns it from here on, and ends the process if anyone else closes it.
        own = store.dup()
        try:
            met = StatelessProcessGroup.create(
                host, port, 0, members, store_timeout=int(MEET_SECONDS), listen_socket=own
            )
        finally:
            own.detach()
        self._device = device
        self._members = PyNcclCommunicator(met, device=device)
        if self._members.disabled:
            raise EngineError("vLLM finds no NCCL here", hint="VLLM_NCCL_SO_PATH names its library")

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Return when all members have them."""
        import torch

        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        for tensor in tensors:
            self._members.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def leave(self) -> None:
        """Leave the group, aborting any transfer."""
        self._members.destroy()


class Peer:
    """One end of the connection between a trainer and an engine's client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, **words: object) -> None:
        self._writer.write(orjson.dumps(words) + b"\n")

    async def receive(self, seconds: float = SEND_SECONDS) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                received: dict[str, Any] = orjson.loads(await self._reader.readline())
        except TimeoutError:
            raise PeerGone(f"the other side has not answered within {seconds:g} s") from None
        except (OSError, ValueError):
            raise PeerGone("the other side has broken off; its log says why, unless it has ended") from None
        return received

    async def receive_during(self, work: Awaitable[Given], seconds: float = SEND_SECONDS) -> Given:
        """Run the work while listening to the other side; the first error ends both."""
        ours, theirs = asyncio.ensure_future(work), asyncio.ensure_future(self.receive(seconds))
        try:
            await asyncio.gather(ours, theirs)
            return ours.result()
        finally:
            ours.cancel()
            theirs.cancel()


@asynccontextmanager
async def trainer_at(told: Mapping[str, Any]) -> AsyncIterator[Peer]:
    """A connection to the trainer that a manifest names."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(told["address"], told["port"])
    except (OSError, TimeoutError) as error:
        raise PeerGone(
            f"the trainer at {told['address']} cannot be reached: {str(error) or type(error).__name__}",
            hint="rollouts.address is the trainer's as nodes and engines reach it",
        ) from error
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


class Sender:
    """The trainer's side: gives engines the weights that it holds ready."""

    def __init__(self, address: str) -> None:
        """`address`: this machine's, as engines reach it."""
        self._secret = secrets.token_hex(16)
        self._offers: list[Offer] = []
        self._groups: dict[tuple[str, str | None], NcclGroup] = {}
        """Groups by client and start time of its engine: a restarted engine is in none."""
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="nccl", daemon=True).start()
        # A name may have several addresses, each with a port of its own; engines are told of one.
        serving = asyncio.start_server(self._attend, address, 0, family=socket.AF_INET)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        for group in self._groups.values():
            group.leave()

    def offer(self, tensors: Mapping[str, Tensor], directory: Path) -> Offer:
        """Offer tensors to engines that read the manifest in the directory."""
        host, port = self._server.sockets[0].getsockname()
        address = {"address": host, "port": port, "secret": self._secret, "offer": len(self._offers)}
        self._offers.append(Offer(tensors, directory, address))
        return self._offers[-1]

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._give(Peer(reader, writer))
        except Exception as error:
            # Whoever is not given them here waits for files.
            log.warning("an engine was not given weights over NCCL: %r", error)
        finally:
            writer.close()

    async def _give(self, peer: Peer) -> None:
        asked = await peer.receive()
        tensors = list(self._offers[asked["offer"]].tensors.values())
        if not secrets.compare_digest(asked["secret"], self._secret) or not tensors:
            return
        key = asked["client"], asked["started"]
        group = self._groups.pop(key, None) if asked["is_joined"] else None
        if is_new := group is None:
            self._forget(*key)
            group = await self._join_group(peer, asked["workers"] + 1, tensors[0].device)
        try:
            if not is_new:
                peer.send(init_info=None)
                await peer.receive()
            await peer.receive_during(_send(peer, group, tensors))
        except BaseException:
            _in_thread(group.leave)
            raise
        self._groups[key] = group
        peer.send(kept=True)

    def _forget(self, client: str, started: str | None) -> None:
        """Leave groups whose engine joins another or was restarted."""
        for key in [key for key in self._groups if key[0] == client or key[1] == started]:
            _in_thread(self._groups.pop(key).leave)

    async def _join_group(self, peer: Peer, members: int, device: device) -> NcclGroup:
        """Form a new group with the engine."""
        with socket.create_server((self._server.sockets[0].getsockname()[0], 0)) as store:
            host, port = store.getsockname()
            at = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": members}
            peer.send(init_info=at)
            meeting = asyncio.ensure_future(_meet(peer, partial(NcclGroup, store, members, device)))
            try:
                return await peer.receive_during(meeting)
            except PeerGone:
                if meeting.done() and not meeting.cancelled():
                    _in_thread(meeting.result().leave)
                raise


async def _meet(peer: Peer, make: Callable[[], NcclGroup]) -> NcclGroup:
    making = _in_thread(make)
    try:
        group = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_leave_late)
        raise
    peer.send(met=True)
    return group


def _leave_late(making: asyncio.Future[NcclGroup]) -> None:
    """Leave a group that formed after its deadline."""
    if making.exception() is None:
        _in_thread(making.result().leave)


async def _send(peer: Peer, group: NcclGroup, tensors: Sequence[Tensor]) -> None:
    await _in_thread(partial(group.send, tensors))
    peer.send(sent=True)


def _in_thread(work: Callable[[], Given]) -> asyncio.Future[Given]:
    """Run on a daemon thread, as NCCL may block it past the end of the process."""
    given: Future[Given] = Future()
    given.set_running_or_notify_cancel()

    def run() -> None:
        try:
            given.set_result(work())
        except BaseException as error:
            given.set_exception(error)

    Thread(target=run, name="nccl", daemon=True).start()
    return asyncio.wrap_future(given)


class Offer:
    """Tensors that engines are sent until withdrawn."""

    files_at_once = True

    def __init__(self, tensors: Mapping[str, Tensor], directory: Path, address: Mapping[str, Any]) -> None:
        import torch

        # NCCL sends what lies in memory from a tensor's beginning on.
        self.tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._directory = directory
        if (place := next(iter(self.tensors.values())).device).type == "cuda":
            # It is sent from another stream than it is computed in.
            torch.cuda.synchronize(place)
        self._held = publish({"nccl": address, "update_info": tensor_manifest(self.tensors)}, directory)

    def withdraw(self) -> None:
        withdraw(self._directory)
        self._held.close()
        self.tensors.clear()
