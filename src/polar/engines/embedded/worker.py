"""The one thread that computes, and its bridge to the asyncio loop that serves."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial

from polar.engines.embedded.scheduler import Generation, Sampled, Scheduler
from polar.engines.embedded.scorer import Scored, Scorer

Command = Callable[[], None]


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
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="polar-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def generate(self, asked: Generation) -> AsyncGenerator[Sampled]:
        """The tokens of a request as they are sampled; leaving the iteration aborts the request."""
        number = next(self._numbers)
        stream = self._streams[number] = asyncio.Queue()
        self._commands.put(lambda: self.scheduler.submit(number, asked))
        has_ended = False
        try:
            while not has_ended:
                sampled = await stream.get()
                has_ended = sampled.finish_reason is not None
                yield sampled
        finally:
            del self._streams[number]
            if not has_ended:
                self._commands.put(lambda: self.scheduler.abort(number))

    async def score(self, ids: list[int]) -> list[float] | None:
        """The logprob of each token but the first; None if computing them failed."""
        if len(ids) < 2:
            return []
        number = next(self._numbers)
        future: asyncio.Future[list[float] | None] = self._loop.create_future()
        self._scores[number] = future
        self._commands.put(lambda: self._scorer.submit(number, ids))
        try:
            return await future
        finally:
            del self._scores[number]
            if future.cancelled():
                self._commands.put(lambda: self._scorer.abort(number))

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
            if not self._is_stopping and self.scheduler.has_work and (sampled := self.scheduler.step()):
                self._call(partial(self._deliver, sampled))
            if not self._is_stopping and self._scorer.has_work and (scored := self._scorer.step()):
                self._call(partial(self._deliver_scores, scored))

    def _obey(self) -> None:
        """Carry out the commands that have come, waiting for one while there is nothing to compute."""
        if not self.scheduler.has_work and not self._scorer.has_work:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _call(self, callback: Command) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, batch: list[Sampled]) -> None:
        for sampled in batch:
            # A request that was aborted a moment ago has no stream any more.
            if stream := self._streams.get(sampled.request):
                stream.put_nowait(sampled)

    def _deliver_scores(self, scored: Scored) -> None:
        future = self._scores.get(scored.request)
        if future is not None and not future.done():
            future.set_result(scored.logprobs)
