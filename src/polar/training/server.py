"""A rollout server of the run's own: engine, gateway and node, on a thread beside the trainer."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from polar.app.datagen.place import Place, own_settings, own_system
from polar.app.datagen.plan import PlannedTask
from polar.models.task import TaskSpec
from polar.training.settings import GrpoSettings, RolloutSettings

log = logging.getLogger(__name__)

TURN_SECONDS = 0.0005
"""How long the server may keep the trainer from the interpreter, or the trainer the server; a tenth of what
Python allows by itself."""

Say = Callable[[str], None]


@contextmanager
def rollout_server(
    settings: GrpoSettings, rollouts: RolloutSettings, tasks: Sequence[TaskSpec], say: Say
) -> Iterator[Place]:
    """The server that the settings name, or a whole system started for this run and ended with it."""
    if rollouts.server is not None:
        yield Place(rollouts.server, None)
        return
    engine = {"model": settings.model.name}
    system = own_settings(settings.out, rollouts.config, engine, rollouts.concurrency)
    started: Future[Place] = Future()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        async with own_system(system, [PlannedTask(task.id, task) for task in tasks], say) as place:
            started.set_result(place)
            await ending.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if started.done():
                # The trainer sees a server that does not answer, and gives up after a while.
                log.error("the run's own rollout server has ended: %s", error)
            else:
                started.set_exception(error)

    thread = threading.Thread(target=work, name="polar-rollouts")
    with _short_turns():
        thread.start()
        try:
            yield started.result()
        finally:
            # Closed here and not by its thread, which may be at its end, or not, when it is told to end.
            loop.call_soon_threadsafe(ending.set)
            thread.join()
            loop.close()


@contextmanager
def _short_turns() -> Iterator[None]:
    """Threads wait less for each other: every kernel that is launched and every answer waits for its turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
