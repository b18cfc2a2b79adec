"""The one thread that computes, and its bridge to the asyncio loop that serves."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from enum import Enum, auto
from functools import partial

from polar.engines.embedded.model import NewWeights
from polar.engines.embedded.scheduler import Generation, Sampled, Scheduler
from polar.engines.embedded.scorer import Scored, Scorer
from polar.models.policy import PauseMode

Command = Callable[[], None]


class _WorkerState(Enum):
    RUNNING = auto()
    DRAINING = auto()
    """What has come is computed to its end; what comes is held."""
    PAUSED = auto()


class Worker:
    """Runs a scheduler in a thread of its own. All methods are called from the asyncio loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._streams: dict[int, asyncio.Queue[Sampled]] = {}
        self._scorer = Scorer(scheduler.model, scheduler.table)
        self._scores: dict[int, asyncio.Future[list[float] | None]] = {}
        self._state = _WorkerState.RUNNING
        self._held: dict[int, Command] = {}
        """Requests that wait for the end of a pause, and what begins each."""
        self._when_paused: list[Command] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="polar-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        return self._state is not _WorkerState.RUNNING

    async def generate(self, asked: Generation) -> AsyncGenerator[list[Sampled]]:
        """The tokens of a request as they are sampled; leaving the iteration aborts the request.

        Tokens of one policy version that are there by the time they are asked for come together.
        """
        number = next(self._numbers)
        stream = self._streams[number] = asyncio.Queue()
        self._commands.put(lambda: self._begin(number, lambda: self.scheduler.submit(number, asked)))
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
                self._commands.put(lambda: self._abort(number))

    async def score(self, ids: list[int]) -> list[float] | None:
        """The logprob of each token but the first; None if computing them failed."""
        if len(ids) < 2:
            return []
        number = next(self._numbers)
        future: asyncio.Future[list[float] | None] = self._loop.create_future()
        self._scores[number] = future
        self._commands.put(lambda: self._begin(number, lambda: self._scorer.submit(number, ids)))
        try:
            return await future
        finally:
            del self._scores[number]
            if future.cancelled():
                self._commands.put(lambda: self._abort(number))

    async def pause(self, mode: PauseMode) -> None:
        """Compute nothing more; return once that is so. What comes meanwhile is held."""
        done = asyncio.Event()
        self._commands.put(lambda: self._pause(mode, lambda: self._call(done.set)))
        await done.wait()

    async def resume(self) -> None:
        self._commands.put(self._resume)
        await self.settled()

    async def use(self, policy: NewWeights) -> None:
        """Replace the weights between two steps."""
        done: asyncio.Future[None] = self._loop.create_future()

        def replace() -> None:
            try:
                self._finish_scoring()
                self.scheduler.use(policy)
            except Exception as error:
                self._call(partial(_fail, done, error))
            else:
                self._call(partial(_succeed, done))

        self._commands.put(replace)
        await done

    async def settled(self) -> None:
        """Return when the thread has carried out every command given so far."""
        done = asyncio.Event()
        self._commands.put(lambda: self._call(done.set))
        await done.wait()

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._commands.put(self._set_stopping)
        await asyncio.to_thread(self._thread.join)

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        while not self._is_stopping:
            self._obey()
            if self._is_stopping or not self._has_work:
                continue
            if self.scheduler.has_work and (sampled := self.scheduler.step()):
                self._call(partial(self._deliver, sampled))
            if self._scorer.has_work:
                self._score()
            self._settle_if_drained()

    @property
    def _has_work(self) -> bool:
        has_any = self.scheduler.has_work or self._scorer.has_work
        return has_any and self._state is not _WorkerState.PAUSED

    def _obey(self) -> None:
        """Carry out the commands that have come, waiting for one while there is nothing to compute."""
        if not self._has_work:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _begin(self, number: int, begin: Command) -> None:
        if self._state is _WorkerState.RUNNING:
            begin()
        else:
            self._held[number] = begin

    def _abort(self, number: int) -> None:
        if self._held.pop(number, None) is None:
            self.scheduler.abort(number)
            self._scorer.abort(number)
            self._settle_if_drained()

    def _pause(self, mode: PauseMode, done: Command) -> None:
        self._when_paused.append(done)
        if self._state is _WorkerState.PAUSED:
            self._tell_paused()
            return
        self._state = _WorkerState.DRAINING
        if mode is PauseMode.ABORT:
            self._call(partial(self._deliver, self.scheduler.abort_all()))
        if mode is not PauseMode.DRAIN:
            # A prompt that is scored in part must not meet other weights.
            self._finish_scoring()
            self._rest()
        self._settle_if_drained()

    def _settle_if_drained(self) -> None:
        if self._state is _WorkerState.DRAINING and not self._has_work:
            self._rest()

    def _rest(self) -> None:
        self._state = _WorkerState.PAUSED
        self._tell_paused()

    def _tell_paused(self) -> None:
        for done in self._when_paused:
            done()
        self._when_paused.clear()

    def _resume(self) -> None:
        self._state = _WorkerState.RUNNING
        self._tell_paused()
        for begin in self._held.values():
            begin()
        self._held.clear()

    def _finish_scoring(self) -> None:
        while self._scorer.is_midway:
            self._score()

    def _score(self) -> None:
        if scored := self._scorer.step():
            self._call(partial(self._deliver_scores, scored))

    def _call(self, callback: Command) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, batch: list[Sampled]) -> None:
        for sampled in batch:
            # A request that was aborted a moment ago no longer has a stream.
            if stream := self._streams.get(sampled.request):
                stream.put_nowait(sampled)

    def _deliver_scores(self, scored: Scored) -> None:
        future = self._scores.get(scored.request)
        if future is not None and not future.done():
            future.set_result(scored.logprobs)


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
