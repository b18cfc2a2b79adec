"""Waiting until something holds that nothing tells of: the one place where tests wait by sleeping.

What tells of itself (an event, a condition, a queue, a process that ends) is awaited instead.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

LOOK_SECONDS = 0.01
MOMENT_SECONDS = 0.2
PATIENCE_SECONDS = 60.0


@overload
async def eventually(
    look: Callable[[], Awaitable[T | None]], seconds: float = ..., *, every: float = ...
) -> T: ...
@overload
async def eventually(look: Callable[[], T | None], seconds: float = ..., *, every: float = ...) -> T: ...


async def eventually(
    look: Callable[[], Any], seconds: float = PATIENCE_SECONDS, *, every: float = LOOK_SECONDS
) -> Any:
    """The first true value that `look` gives; AssertionError with the last one if none comes in time."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if inspect.isawaitable(seen):
            seen = await seen
        if seen:
            return seen
        assert time.monotonic() < deadline, f"not so after {seconds:g} s: {seen!r}"
        await asyncio.sleep(every)


async def succeeds(
    attempt: Callable[[], Awaitable[T]],
    *passing: type[Exception],
    seconds: float = PATIENCE_SECONDS,
    every: float = LOOK_SECONDS,
) -> T:
    """What `attempt` gives once it raises none of the `passing` errors; the last one if time is up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except passing:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(every)


def eventually_sync(
    look: Callable[[], T | None], seconds: float = PATIENCE_SECONDS, *, every: float = LOOK_SECONDS
) -> T:
    """`eventually`, for those without an event loop."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not so after {seconds:g} s: {seen!r}"
        time.sleep(every)
    return seen


async def still_waits(*tasks: asyncio.Task[Any]) -> bool:
    """Whether none of them ends within a moment: that nothing happens is told by nothing."""
    done, _ = await asyncio.wait(tasks, timeout=MOMENT_SECONDS)
    return not done


def leap(seconds: float) -> None:
    """Set the clock of the running event loop forward: what is due within these seconds is due now."""
    loop = asyncio.get_running_loop()
    now = loop.time
    vars(loop)["time"] = lambda: now() + seconds


async def turns(count: int) -> None:
    """Let the event loop go round this many times."""
    for _ in range(count):
        await asyncio.sleep(0)
