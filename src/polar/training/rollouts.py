"""Groups from a rollout server, that runs ahead of training by as many steps as tokens may be stale."""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from polar.client import Client
from polar.errors import NotFound, Unavailable
from polar.models.session import SessionResult
from polar.models.task import TaskSpec
from polar.training.groups import Group, Material, Sample, material
from polar.training.settings import GrpoSettings
from polar.training.sources import Shuffled
from polar.trajectory.recording import DamagedRecording, Recording, decode

log = logging.getLogger(__name__)

PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0)
"""Between attempts to reach a server that has gone: long enough for it to be started again."""

MAX_ID = 128
"""How long a task's id may be."""

T = TypeVar("T")


class Rollouts:
    """Submits tasks and takes their groups in the order in which they are complete.

    What is in flight while a step is trained is `ahead` steps of groups: none when synchronous.
    """

    def __init__(
        self, settings: GrpoSettings, client: Client, tasks: Sequence[TaskSpec], samples: int
    ) -> None:
        self._settings = settings
        self._client = client
        self._tasks = tasks
        self._samples = samples
        self._order = Shuffled(len(tasks), settings.seed)
        self._run = secrets.token_hex(4)
        self._cursor = 0
        self._in_flight: dict[str, TaskSpec] = {}
        """Submitted and not taken, oldest first."""
        self._results: dict[str, dict[int, SessionResult]] = defaultdict(dict)
        self._complete: list[str] = []
        """Of those in flight: the tasks all of whose sessions have ended, in the order they did."""
        self._seen_from: dict[str, int] = {}
        """Of those in flight: where in the feed their first result stands."""

    def take(self, version: int) -> Material:
        wanted = self._settings.groups
        while len(self._in_flight) < wanted * (1 + self._settings.ahead):
            self._submit()
        _patiently(lambda: self._read_until(wanted))
        groups = [self._group(id) for id in self._complete[:wanted]]
        for group in groups:
            self._forget(group.task_id)
        return material(groups, self._settings.objective, self._settings.batch, version)

    def state(self) -> dict[str, Any]:
        return {
            "run": self._run,
            "position": self._order.position,
            "in_flight": list(self._in_flight),
            # Results of groups in flight are read again.
            "cursor": min(self._seen_from.values(), default=self._cursor),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was: tasks have fixed names, and submitting one again changes nothing."""
        self._run = state["run"]
        self._cursor = state["cursor"]
        in_flight = set(state["in_flight"])
        for position in range(state["position"]):
            self._order.position = position
            spec = self._next()
            if spec.id in in_flight:
                self._in_flight[spec.id] = spec
        self._order.position = state["position"]

    def _submit(self) -> None:
        spec = self._next()
        _patiently(lambda: self._client.submit(spec))
        self._in_flight[spec.id] = spec

    def _next(self) -> TaskSpec:
        position = self._order.position
        task = self._tasks[self._order.next()]
        return rollout_of(
            task, f"{self._run}-{position}", self._samples, self._settings.objective.temperature
        )

    def _read_until(self, wanted: int) -> None:
        """Follow the feed until so many groups are complete."""
        if len(self._complete) >= wanted:
            return
        for page in self._client.result_pages(list(self._in_flight), cursor=self._cursor, follow=True):
            for result in page.results:
                self._add(result)
            self._cursor = page.cursor
            if len(self._complete) >= wanted:
                return
        # Every task has ended: those that were cancelled are as complete as they will be.
        self._complete += [id for id in self._in_flight if id not in self._complete]

    def _add(self, result: SessionResult) -> None:
        self._seen_from.setdefault(result.task_id, self._cursor)
        samples = self._results[result.task_id]
        samples[result.sample] = result
        if len(samples) == self._samples and result.task_id not in self._complete:
            self._complete.append(result.task_id)

    def _group(self, task_id: str) -> Group:
        results = [result for _, result in sorted(self._results[task_id].items())]
        return Group(task_id, tuple(Sample(result, self._recording(result)) for result in results))

    def _recording(self, result: SessionResult) -> Recording | None:
        if not result.has_recording:
            return None
        try:
            return decode(_patiently(lambda: self._client.recording(result.session_id)))
        except (NotFound, DamagedRecording) as error:
            log.warning("session %s: %s", result.session_id, error)
            return None

    def _forget(self, task_id: str) -> None:
        self._complete.remove(task_id)
        del self._in_flight[task_id]
        self._results.pop(task_id, None)
        self._seen_from.pop(task_id, None)


class HeldOut:
    """Tasks that are not learnt from, rolled out now and then to see how well the policy does."""

    def __init__(self, client: Client, tasks: Sequence[TaskSpec], samples: int, temperature: float) -> None:
        self._client = client
        self._tasks = tasks
        self._samples = samples
        self._temperature = temperature
        self._run = secrets.token_hex(4)

    def numbers(self, step: int) -> dict[str, float]:
        """Mean reward, and the share of sessions with the full one; a session that failed has 0."""
        specs = [
            rollout_of(task, f"{self._run}-held-out-{step}-{number}", self._samples, self._temperature)
            for number, task in enumerate(self._tasks)
        ]
        for spec in specs:
            _patiently(partial(self._client.submit, spec))
        results = _patiently(lambda: self._client.wait([spec.id for spec in specs]))
        rewards = [result.reward or 0.0 for result in results]
        if not rewards:
            return {}
        successes = [reward >= 1.0 for reward in rewards]
        return {"held_out_reward": fmean(rewards), "held_out_success": fmean(successes)}


def rollout_of(task: TaskSpec, prefix: str, samples: int, temperature: float) -> TaskSpec:
    """The task under a name of its own, sampled as the trainer computes logprobs: nothing cut."""
    name = f"{prefix}-{task.id}"[:MAX_ID]
    sampling = task.sampling.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})
    return task.model_copy(update={"id": name, "samples": samples, "sampling": sampling, "early_stop": None})


def _patiently(ask: Callable[[], T]) -> T:
    """The answer of a server that may be away for a while."""
    for pause in PAUSES:
        try:
            return ask()
        except Unavailable as error:
            log.warning("%s; asking again in %g s", error, pause)
            time.sleep(pause)
    return ask()
