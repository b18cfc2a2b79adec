"""How long-running commands stop: in order on Ctrl-C and SIGTERM, or with their parent process."""

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
    """Run `work`; a signal cancels it, waits for everything it started, and exits with 128 + signal.

    A second signal does not wait: every process that Polar starts ends with its parent. If `drain` returns
    True, the work will end by itself and the first signal does not cancel it. With `has_parent`, signals come
    from the parent process and no message is printed.
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
            # The reader may be gone: `polar serve 2>&1 | head`.
            with contextlib.suppress(OSError):
                typer.echo("\nstopping; press Ctrl-C again to stop at once", err=True)

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
        # uvloop's own handlers do nothing once the loop is closed, and the process would not end.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise typer.Exit(128 + received[0])


def exit_with_parent() -> None:
    """Exit when the parent process is gone, however it ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
