"""The one thread that computes, and its bridge to the asyncio loop that serves."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial

from polar.engines.embedded.model import NewWeights
from polar.engines.embedded.scheduler import Generation, Sampled, Scheduler
from polar.models.policy import PauseMode

Command = Callable[[], None]


class _WorkerState(Enum):
    RUNNING = auto()
    DRAINING = auto()
    """Finishes running requests and queues new ones."""
    PAUSED = auto()
    STOPPED = auto()


class Worker:
    """Runs a scheduler in a thread of its own. Public methods are called from the asyncio loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        """Commands to run between two steps."""
        self._numbers = itertools.count()
        self._streams: dict[int, asyncio.Queue[Sampled]] = {}
        self._state = _WorkerState.RUNNING
        self._paused = asyncio.Event()
        self._held: dict[int, Generation] = {}
        """Requests queued during a pause."""
        self._thread = threading.Thread(target=self._run, name="polar-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        return self._state is not _WorkerState.RUNNING

    async def generate(self, asked: Generation) -> AsyncGenerator[list[Sampled]]:
        """Stream a request's tokens; closing the iterator aborts it. Tokens of one version that are ready
        together are yielded together."""
        number = next(self._numbers)
        stream = self._streams[number] = asyncio.Queue()
        self._commands.put(partial(self._begin, number, asked))
        has_ended = False
        following: Sampled | None = None
        try:
            while not has_ended:
                batch = [following or await stream.get()]
                following = None
                while following is None and not stream.empty():
                    sampled = stream.get_nowait()
                    if sampled.goes_with(batch[0]):
                        batch.append(sampled)
                    else:
                        following = sampled
                has_ended = batch[-1].finish_reason is not None
                yield batch
        finally:
            del self._streams[number]
            if not has_ended:
                self._commands.put(partial(self._abort, number))

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing, and return once stopped. New requests are queued."""
        await self._do(partial(self._pause, mode))
        await self._paused.wait()

    async def resume(self) -> None:
        await self._do(self._resume)

    async def use(self, policy: NewWeights) -> None:
        """Replace the weights between two steps."""
        await self._do(partial(self.scheduler.use, policy))

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    async def _do(self, command: Command) -> None:
        """Run a command on the thread; raise what it raises."""
        done: Future[None] = Future()

        def carry_out() -> None:
            try:
                command()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._commands.put(carry_out)
        await asyncio.shield(asyncio.wrap_future(done))

    def _run(self) -> None:
        while self._state is not _WorkerState.STOPPED:
            self._obey()
            if self._has_work and (sampled := self.scheduler.step()):
                self._call(partial(self._deliver, sampled))
            if self._state is _WorkerState.DRAINING and not self._has_work:
                self._rest()

    @property
    def _has_work(self) -> bool:
        is_computing = self._state in (_WorkerState.RUNNING, _WorkerState.DRAINING)
        return is_computing and self.scheduler.has_work

    def _obey(self) -> None:
        """Carry out the commands that have come, waiting for one while there is nothing to compute."""
        if not self._has_work:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _begin(self, number: int, asked: Generation) -> None:
        if self._state is _WorkerState.RUNNING:
            self.scheduler.submit(number, asked)
        else:
            self._held[number] = asked

    def _abort(self, number: int) -> None:
        if self._held.pop(number, None) is None:
            self.scheduler.abort(number)

    def _pause(self, mode: PauseMode) -> None:
        if self._state is _WorkerState.PAUSED:
            return
        self._state = _WorkerState.DRAINING
        if mode is PauseMode.KEEP:
            self._rest()
        elif mode is PauseMode.ABORT:
            self._call(partial(self._deliver, self.scheduler.abort_all()))

    def _rest(self) -> None:
        self._state = _WorkerState.PAUSED
        self._call(self._paused.set)

    def _resume(self) -> None:
        self._state = _WorkerState.RUNNING
        # Whoever waits for a pause that has not come about need not wait on.
        self._call(self._paused.set)
        self._call(self._paused.clear)
        for number, asked in self._held.items():
            self.scheduler.submit(number, asked)
        self._held.clear()

    def _stop(self) -> None:
        self._state = _WorkerState.STOPPED

    def _call(self, callback: Command) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, batch: list[Sampled]) -> None:
        for sampled in batch:
            # A request that was aborted a moment ago no longer has a stream.
            if stream := self._streams.get(sampled.request):
                stream.put_nowait(sampled)
