"""The line to a gateway process: results, errors of their kind, cancellation, the end of the other side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polar.config.settings import GatewaySettings
from polar.engines.base import EngineDown, RequestUnfit
from polar.engines.http import NotAccepted
from polar.errors import PolarError, Unavailable
from polar.gateway.line import Answering, GatewayEnded, Line


class Target:
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    def plain(self, *values: Any) -> Any:
        return values

    async def wait(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def fail(self, error: int) -> None:
        raise ERRORS[error]


ERRORS = [
    EngineDown("gone", hint="start it"),
    NotAccepted("the engine says no", reason="no"),
    ValueError("odd"),
]


class Ends:
    """Both ends, in one process."""

    def __init__(self, target: Target, answering: Answering) -> None:
        self.line: Line
        self.target = target
        self.answering = answering
        self.is_gone = False

    def notice_end(self) -> None:
        self.is_gone = True


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    target = Target()
    answering = Answering(*await asyncio.open_connection(sock=theirs))
    serving = asyncio.create_task(answering.serve(target))
    reader, writer = await asyncio.open_connection(sock=ours)
    both = Ends(target, answering)
    both.line = Line(reader, writer, both.notice_end)
    yield both
    both.line.close()
    serving.cancel()
    await asyncio.wait({serving})


async def test_calls_overtake_one_that_waits_and_values_keep_their_types(ends: Ends) -> None:
    waiting = asyncio.create_task(ends.line.call("wait"))
    await ends.target.begun.wait()
    assert await ends.line.call("plain", GatewaySettings(workers=3), {1: b"x"}) == (
        GatewaySettings(workers=3),
        {1: b"x"},
    )
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_call_that_is_given_up_is_cancelled_at_the_other_end(ends: Ends) -> None:
    waiting = asyncio.create_task(ends.line.call("wait"))
    await ends.target.begun.wait()
    waiting.cancel()
    await asyncio.wait_for(ends.target.cancelled.wait(), 30)
    assert await ends.line.call("plain") == ()


async def test_an_error_arrives_as_the_nearest_kind_that_a_message_makes(ends: Ends) -> None:
    with pytest.raises(EngineDown, match=r"gone \(start it\)") as down:
        await ends.line.call("fail", 0)
    assert isinstance(down.value, Unavailable)
    with pytest.raises(RequestUnfit, match="the engine says no") as refused:
        await ends.line.call("fail", 1)
    assert type(refused.value) is RequestUnfit
    with pytest.raises(PolarError, match="internal error: ValueError"):
        await ends.line.call("fail", 2)


async def test_whoever_waits_learns_that_the_other_end_is_gone(ends: Ends) -> None:
    waiting = asyncio.create_task(ends.line.call("wait"))
    await ends.target.begun.wait()
    await ends.answering.sent()
    with pytest.raises(GatewayEnded):
        await waiting
    assert ends.is_gone
    await ends.line.gone()
    with pytest.raises(GatewayEnded):
        await ends.line.call("plain")


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (15, 1), (16, 2), (64, 8), (256, 8)])
def test_there_is_one_gateway_process_for_eight_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: range(cores))
    assert GatewaySettings().worker_count == workers
    assert GatewaySettings(workers=5).worker_count == 5
