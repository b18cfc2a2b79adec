"""How long-running commands end: in order by Ctrl-C and SIGTERM, or with the process that started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import typer
import uvloop


def until_interrupted(
    work: Coroutine[Any, Any, None], *, drain: Callable[[], bool] | None = None, has_parent: bool = False
) -> None:
    """Run `work`; a signal cancels it, waits until all it started has ended, and exits with 128 + signal.

    A second signal does not wait: every process that Polar starts ends by itself with its parent. Where
    `drain` says that the work ends by itself from now on, the first signal does not cancel it. With
    `has_parent` it comes from the process that started this one, and nobody needs to be told.
    """
    received: list[signal.Signals] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    async def main() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def interrupt(number: signal.Signals) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            if drain is None or not drain():
                task.cancel()
            if has_parent:
                return
            # Whoever read this may have gone: `polar serve 2>&1 | head`.
            with contextlib.suppress(OSError):
                typer.echo("\nstopping; once more to stop at once", err=True)

        for number in handlers:
            loop.add_signal_handler(number, interrupt, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise

    try:
        uvloop.run(main())
    finally:
        # uvloop leaves its own, which do nothing once the loop is closed: what follows would not end.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise typer.Exit(128 + received[0])


def exit_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
