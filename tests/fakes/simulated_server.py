"""A rollout server whose sessions take as long as chance says, on a clock that events alone move."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from polar.models.session import SessionResult, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import ResultPage, TaskBatchView, TaskView
from polar.trajectory.learnable import EndedSession
from tests.fakes.recordings import encoded
from tests.fakes.scripted_rollouts import sample, turns
from tests.systems import shell_task

TOKENS = 20
"""Of each session, sampled at even intervals."""
TRAINING = 1.0
"""How long a step takes."""


class SimulatedServer:
    """Runs as many sessions at once as it has places, in the order they came; time passes by events alone."""

    def __init__(self, places: int, spread: float, seed: int) -> None:
        self.now = 0.0
        self._random = np.random.default_rng(seed)
        self._spread = spread
        self._free = places
        self._waiting: list[tuple[str, int]] = []
        self._running: list[tuple[float, float, str, int]] = []
        self._updates = [0.0]
        """When each version came."""
        self._feed: list[SessionResult] = []
        self._samples: dict[str, EndedSession] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def submit_batches(self, tasks: Sequence[TaskSpec]) -> AsyncIterator[TaskBatchView]:
        for task in tasks:
            self._waiting += [(task.id, number) for number in range(task.samples)]
            self._start()
        yield TaskBatchView(tasks=())

    async def task(self, id: str) -> TaskView:
        ended = sum(result.task_id == id for result in self._feed)
        unended = sum(one[-2] == id for one in (*self._waiting, *self._running))
        sessions = Counter({SessionStatus.COMPLETED: ended, SessionStatus.RUNNING: unended})
        spec = shell_task(id, "true")
        return TaskView(spec=spec, status=TaskStatus.RUNNING, created_at=0.0, sessions=+sessions)

    async def newest_result(self) -> int:
        return len(self._feed)

    async def result_pages(
        self, task_ids: Collection[str], *, cursor: int, follow: bool
    ) -> AsyncIterator[ResultPage]:
        while True:
            while cursor == len(self._feed):
                self._end_next()
            cursor += 1
            if self._feed[cursor - 1].task_id in task_ids:
                yield ResultPage(results=(self._feed[cursor - 1],), cursor=cursor, end=len(self._feed))

    async def recording(self, session_id: str) -> bytes:
        recording = self._samples[session_id].recording
        assert recording is not None
        return encoded(recording)

    def train(self) -> None:
        """What goes on while a step is trained, and the version after it."""
        until = self.now + TRAINING
        while self._running and self._running[0][0] <= until:
            self._end_next()
        self.now = until
        self._updates.append(until)

    def _start(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            duration = float(self._random.lognormal(0.0, self._spread))
            heapq.heappush(self._running, (self.now + duration, self.now, *self._waiting.pop(0)))

    def _end_next(self) -> None:
        end, began, task_id, number = heapq.heappop(self._running)
        self.now = max(self.now, end)
        self._free += 1
        self._start()
        times = np.linspace(began, end, TOKENS)
        versions = (np.searchsorted(self._updates, times, side="right") - 1).astype(np.int32)
        completions = turns((1, 2, 3), [[5] * TOKENS])
        done = (replace(completions[0], policy_versions=versions),)
        ended = sample(done, float(number % 2), task_id=task_id, number=number)
        self._samples[ended.result.session_id] = ended
        self._feed.append(ended.result)
