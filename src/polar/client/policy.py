"""A trainer's side of policy updates: pauses that hold while a block runs, and end with its process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from polar.config.settings import explain
from polar.errors import Conflict, InvalidInput, PolarError, Unavailable
from polar.models.policy import Pause, PauseMode, PolicyView, Resume, Update

if TYPE_CHECKING:
    from polar.client.clients import AsyncClient, Client

log = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)


def pause(holder: str, mode: PauseMode, timeout_seconds: float, wait_seconds: float) -> Pause:
    return _body(Pause, holder=holder, mode=mode, timeout_seconds=timeout_seconds, wait_seconds=wait_seconds)


def update(path: str | Path | None, version: int | None, holder: str | None, wait_seconds: float) -> Update:
    absolute = None if path is None else str(Path(path).absolute())
    return _body(Update, path=absolute, version=version, holder=holder, wait_seconds=wait_seconds)


def resume(holder: str | None, wait_seconds: float) -> Resume:
    return _body(Resume, holder=holder, wait_seconds=wait_seconds)


@dataclass(frozen=True, slots=True)
class Paused:
    """A pause that this process holds."""

    holder: str
    _client: Client

    def update(self, path: str | Path | None = None, *, version: int | None = None) -> PolicyView:
        """Replace the weights; see `Client.update_policy`."""
        return self._client.update_policy(path, version=version, holder=self.holder)


@dataclass(frozen=True, slots=True)
class AsyncPaused:
    """A pause that this process holds."""

    holder: str
    _client: AsyncClient

    async def update(self, path: str | Path | None = None, *, version: int | None = None) -> PolicyView:
        """Replace the weights; see `AsyncClient.update_policy`."""
        return await self._client.update_policy(path, version=version, holder=self.holder)


@contextmanager
def kept(client: Client, holder: str | None, mode: PauseMode, timeout_seconds: float) -> Iterator[Paused]:
    """A pause, renewed while the block runs and resumed after it."""
    name = holder or _own_name()
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(timeout_seconds / 3):
            try:
                client.pause_policy(name, mode, timeout_seconds=timeout_seconds, wait_seconds=0)
            except PolarError as error:
                log.warning("the pause could not be renewed: %s", error)

    renewal = threading.Thread(target=renew, name="polar-pause", daemon=True)
    try:
        _refuse_unsettled(client.pause_policy(name, mode, timeout_seconds=timeout_seconds))
        renewal.start()
        yield Paused(name, client)
    finally:
        ended.set()
        if renewal.ident is not None:
            renewal.join()
        try:
            client.resume_policy(name)
        except Conflict as error:
            log.warning("the pause was not this process's any more: %s", error)


@asynccontextmanager
async def kept_async(
    client: AsyncClient, holder: str | None, mode: PauseMode, timeout_seconds: float
) -> AsyncIterator[AsyncPaused]:
    """As `kept`, for asyncio."""
    name = holder or _own_name()

    async def renew() -> None:
        while True:
            await asyncio.sleep(timeout_seconds / 3)
            try:
                await client.pause_policy(name, mode, timeout_seconds=timeout_seconds, wait_seconds=0)
            except PolarError as error:
                log.warning("the pause could not be renewed: %s", error)

    renewal: asyncio.Task[None] | None = None
    try:
        _refuse_unsettled(await client.pause_policy(name, mode, timeout_seconds=timeout_seconds))
        renewal = asyncio.create_task(renew())
        yield AsyncPaused(name, client)
    finally:
        if renewal is not None:
            renewal.cancel()
            await asyncio.wait({renewal})
        try:
            await client.resume_policy(name)
        except Conflict as error:
            log.warning("the pause was not this process's any more: %s", error)


def _refuse_unsettled(view: PolicyView) -> None:
    late = [node.node for node in view.nodes if not node.is_settled]
    if late:
        raise Unavailable(f"not every node has paused: {', '.join(late)}", hint="try again, or another mode")


def _own_name() -> str:
    """Tells people who pauses, and this pause from any other."""
    host = "".join(letter for letter in socket.gethostname() if letter.isalnum()) or "host"
    return f"{host[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


def _body(kind: type[B], **fields: Any) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None
