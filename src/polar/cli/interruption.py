"""Runs a coroutine so that Ctrl-C and SIGTERM end it in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import typer


def until_interrupted(work: Coroutine[Any, Any, None], *, drain: Callable[[], bool] | None = None) -> None:
    """Run `work`; a signal cancels it, waits until all it started has ended, and exits with 128 + signal.

    A second signal does not wait: every process that Polar starts ends by itself with its parent. Where
    `drain` says that the work ends by itself from now on, the first signal does not cancel it.
    """
    received: list[signal.Signals] = []

    async def main() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def interrupt(number: signal.Signals) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            if drain is None or not drain():
                task.cancel()
            # Whoever read this may have gone: `polar serve 2>&1 | head`.
            with contextlib.suppress(OSError):
                typer.echo("\nstopping; once more to stop at once", err=True)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise

    # Not at the top: commands that only ask a server start without it.
    import uvloop

    uvloop.run(main())
    if received:
        raise typer.Exit(128 + received[0])
