"""However unlike the durations of sessions are, none outlives the staleness that its tokens may have."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest

from polar.models.session import SessionResult
from polar.models.task import TaskSpec
from polar.models.views import ResultPage, TaskBatchView
from polar.training.material import PolicyVersions
from polar.training.rollouts import RolloutSource
from polar.training.settings import GrpoSettings
from polar.trajectory.learnable import EndedSession, Excluded
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


@pytest.mark.parametrize("places", [8, 40])
@pytest.mark.parametrize("spread", [0.5, 1.5])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_token_is_lost_to_its_age(places: int, spread: float, max_staleness: int) -> None:
    settings = GrpoSettings.model_validate(
        {
            "out": Path("unused"),
            "steps": 12,
            "groups": 4,
            "rollouts": {"tasks": ["unused"], "samples": 4},
            "objective": {"max_staleness": max_staleness},
        }
    )
    assert settings.rollouts is not None
    server = SimulatedServer(places, spread, seed=0)
    tasks = [shell_task(f"t{number}", "true") for number in range(7)]
    rollouts = RolloutSource(settings, settings.rollouts, lambda: cast(Any, server), tasks)
    lost = trained = 0
    for step in range(settings.steps):
        made = rollouts.take(PolicyVersions(step))
        lost += made.excluded[Excluded.TOKENS_STALE]
        trained += sum(len(batch.terms) for batch in made.packing.batches)
        server.train()
    assert (lost, trained) == (0, settings.steps * 4 * 4 * TOKENS)
