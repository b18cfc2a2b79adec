"""Keeps what is asynchronous open beside the trainer, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def in_thread(name: str, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter the context in a thread, and leave it there after the block."""
    started: Future[T] = Future()
    ending: Future[None] = Future()

    async def serve() -> None:
        async with context as entered:
            started.set_result(entered)
            await asyncio.wrap_future(ending)

    def tell(ended: Future[None]) -> None:
        if started.done() and (error := ended.exception()):
            # The trainer sees something that does not answer, and gives up after a while.
            log.error("%s has ended: %s", name, error)

    with ThreadPoolExecutor(1, thread_name_prefix="polar-beside-trainer") as thread:
        serving = thread.submit(asyncio.run, serve())
        serving.add_done_callback(tell)
        try:
            first: list[Future[Any]] = [started, serving]
            wait(first, return_when=FIRST_COMPLETED)
            if not started.done():
                serving.result()
            yield started.result()
        finally:
            ending.set_result(None)
