"""The line between a node and one of its gateway processes: calls go one way, their results the other.

Its socket has no name that others could open, and both ends are the same program: values travel pickled.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import struct
from collections.abc import Callable
from typing import Any

from polar.errors import PolarError, Unavailable

_LENGTH = struct.Struct("<I")


class GatewayEnded(Unavailable):
    """A gateway process is gone, and with it the sessions that it served."""


class Line:
    """The node's end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, when_gone: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._when_gone = when_gone
        self._numbers = itertools.count()
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the gateway's method returns or raises; GatewayEnded if it will do neither."""
        if self._listening.done():
            raise ended()
        number = next(self._numbers)
        answer = self._awaited[number] = asyncio.get_running_loop().create_future()
        self._writer.write(_packed((number, name, arguments)))
        try:
            return await answer
        except asyncio.CancelledError:
            self._writer.write(_packed((number, None, ())))
            raise
        finally:
            del self._awaited[number]

    async def gone(self) -> None:
        """Return once there is nobody at the other end."""
        await asyncio.wait({self._listening})

    def close(self) -> None:
        self._writer.close()

    async def _listen(self) -> None:
        try:
            while True:
                number, value, error = await _received(self._reader)
                answer = self._awaited.get(number)
                if answer is None or answer.done():
                    continue
                if error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(value)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._when_gone()
            for answer in self._awaited.values():
                if not answer.done():
                    answer.set_exception(ended())


class Answering:
    """The gateway process's end: the calls that it is carrying out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def first(self) -> tuple[int, Any]:
        """Number and argument of the call that comes before there is anything to call."""
        number, _, (argument,) = await _received(self._reader)
        return number, argument

    def answer(self, number: int, value: Any = None, error: BaseException | None = None) -> None:
        self._writer.write(_packed((number, value, None if error is None else _portable(error))))

    async def sent(self) -> None:
        """Return once every answer has left."""
        self._writer.close()
        await self._writer.wait_closed()

    async def serve(self, target: object) -> None:
        """Carry out calls of the target's methods until the node is gone."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    number, name, arguments = await _received(self._reader)
                    if name is not None:
                        self._calls[number] = group.create_task(
                            self._carry_out(number, target, name, arguments)
                        )
                    elif number in self._calls:
                        self._calls[number].cancel()
            except (asyncio.IncompleteReadError, ConnectionError):
                for call in self._calls.values():
                    call.cancel()

    async def _carry_out(self, number: int, target: object, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = getattr(target, name)(*arguments)
            self.answer(number, await value if inspect.isawaitable(value) else value)
        except Exception as error:
            self.answer(number, error=error)
        finally:
            self._calls.pop(number, None)


async def _received(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _packed(message: Any) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def _portable(error: BaseException) -> BaseException:
    """The error as the other end can raise it: the nearest of its kinds that a message alone makes."""
    message = error.message if isinstance(error, PolarError) else f"internal error: {error!r}"
    hint = error.hint if isinstance(error, PolarError) else None
    for kind in type(error).__mro__:
        if issubclass(kind, PolarError):
            try:
                return kind(message, hint=hint)
            except TypeError:
                continue
    return PolarError(message)


def ended() -> GatewayEnded:
    return GatewayEnded(
        "the gateway process that served this session has ended", hint="the node's log says how"
    )
