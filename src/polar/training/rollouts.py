"""Groups from a rollout server that runs ahead of training by as many steps as tokens may be stale."""

from __future__ import annotations

import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from polar.app.rollouts import training_task
from polar.client import Client
from polar.errors import NotFound, retry
from polar.evals.statistics import mean_of_outcomes
from polar.models.session import SessionResult
from polar.models.task import TaskSpec, TaskStatus
from polar.recordings.recording import DamagedRecording, Recording, decode
from polar.training.material import Material, PolicyVersions, material
from polar.training.settings import GrpoSettings, RolloutSettings
from polar.training.sources import Shuffled
from polar.trajectory.learnable import EndedSession, Excluded, Group

log = logging.getLogger(__name__)

MOST_URGENT = 100
"""The highest priority that a task may have."""

HELD_OUT = "held-out.jsonl"
"""In the run's directory: which held-out tasks passed, each time they were tried."""


class Scheduled(NamedTuple):
    """A task in flight: in which round through all tasks, and for which step at the latest."""

    round: int
    task: int
    due: int
    """The step after which its first tokens might be too stale."""


class RolloutSource:
    """Submits tasks and takes their groups in the order in which they are complete, and none too late.

    What is in flight while a step is trained is `ahead` steps of groups: none when synchronous. A group is
    due `ahead` steps after it was submitted. Slow ones are overtaken as long as they will still find a place
    in time; then they are waited for.
    """

    def __init__(
        self, settings: GrpoSettings, rollouts: RolloutSettings, client: Client, tasks: Sequence[TaskSpec]
    ) -> None:
        self._settings = settings
        self._rollouts = rollouts
        self._client = client
        self._tasks = tasks
        self._order = Shuffled(len(tasks), settings.seed)
        self._run = secrets.token_hex(4)
        self._cursor = 0
        self._page = 0
        """Where in the feed the page that was read last begins."""
        self._in_flight: dict[str, Scheduled] = {}
        """Submitted and not taken, oldest first."""
        self._results: dict[str, dict[int, SessionResult]] = defaultdict(dict)
        self._complete: list[str] = []
        """The tasks in flight all of whose sessions have ended, in the order in which they did."""
        self._seen_from: dict[str, int] = {}
        """Where in the feed the first result of each task in flight stands."""
        self._resting: dict[int, int] = {}
        """Task → the last round in which it is skipped."""
        self._passed_over = 0
        """Turns of resting tasks since the last step."""
        self._step = 0
        """The step that is being supplied."""

    def take(self, versions: PolicyVersions) -> Material:
        groups: list[Group] = []
        missing, spares = self._settings.groups, self._rollouts.spares
        ahead = self._settings.groups * self._settings.ahead
        while missing:
            while len(self._in_flight) < missing + ahead:
                self._submit()
            urgent = self._urgent(missing)
            retry(partial(self._read_until_one_is_complete, urgent))
            groups.append(group := self._pop(urgent))
            if group.rewards_differ or not spares:
                missing -= 1
            else:
                spares -= 1
        made = material(groups, self._settings.objective, self._settings.batch, versions)
        made.excluded[Excluded.TASKS_RESTING] += self._passed_over
        self._passed_over = 0
        self._step += 1
        return made

    def _urgent(self, missing: int) -> Collection[str]:
        """The tasks one of which must be next, for all that are in flight to be taken in time.

        Of a step and those before it no more groups may be due than they have places left.
        """
        for later in range(self._settings.ahead):
            due = [id for id, turn in self._in_flight.items() if turn.due <= self._step + later]
            if len(due) >= missing + self._settings.groups * later:
                return due
        return self._in_flight

    def state(self) -> dict[str, Any]:
        return {
            "run": self._run,
            "position": self._order.position,
            "in_flight": {id: tuple(turn) for id, turn in self._in_flight.items()},
            "resting": dict(self._resting),
            "step": self._step,
            "cursor": self._unsure_from,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was: what was in flight has fixed names, and is found by them."""
        self._run = state["run"]
        self._cursor = self._page = state["cursor"]
        self._order.position = state["position"]
        self._in_flight = {id: Scheduled(*turn) for id, turn in state["in_flight"].items()}
        self._resting = dict(state["resting"])
        self._step = state["step"]

    def _submit(self) -> None:
        """Have the task whose turn it is rolled out, unless it rests."""
        position, round = self._order.position, self._order.round
        turn = Scheduled(round, self._order.next(), self._step + self._settings.ahead)
        if turn.round <= self._resting.get(turn.task, -1):
            self._passed_over += 1
            return
        temperature = self._settings.objective.temperature
        prefix = f"{self._run}-{position}"
        spec = training_task(self._tasks[turn.task], prefix, self._rollouts.samples, temperature)
        known = retry(lambda: self._client.submit(spec))
        self._in_flight[spec.id] = turn
        if known.status is not TaskStatus.QUEUED:
            self._read_again()

    @property
    def _unsure_from(self) -> int:
        """Before this the feed has no result of a group that is still to be taken.

        A task is submitted when another's group was taken, and ends after that one did. A run that goes on
        submits again what it had submitted before, and the page it read last may reach beyond its results.
        """
        return min([self._page, *self._seen_from.values()])

    def _read_again(self) -> None:
        """Find the results of a task that is older than this process in their order among the others."""
        self._cursor = self._page = self._unsure_from
        self._results.clear()
        self._complete.clear()
        self._seen_from.clear()

    def _read_until_one_is_complete(self, among: Collection[str]) -> None:
        if self._is_one_complete(among):
            return
        for page in self._client.result_pages(list(self._in_flight), cursor=self._cursor, follow=True):
            self._page, self._cursor = self._cursor, page.cursor
            for result in page.results:
                self._add(result)
            if self._is_one_complete(among):
                return
        # Every task has ended: those that were cancelled are as complete as they will be.
        self._complete += [id for id in self._in_flight if id not in self._complete]

    def _is_one_complete(self, among: Collection[str]) -> bool:
        return any(id in among for id in self._complete)

    def _add(self, result: SessionResult) -> None:
        self._seen_from.setdefault(result.task_id, self._page)
        samples = self._results[result.task_id]
        samples[result.sample] = result
        if len(samples) == self._rollouts.samples and result.task_id not in self._complete:
            self._complete.append(result.task_id)

    def _pop(self, among: Collection[str]) -> Group:
        """The group among these that has been complete for longest; its task rests if it taught nothing."""
        task_id = next(id for id in self._complete if id in among)
        self._complete.remove(task_id)
        turn = self._in_flight.pop(task_id)
        results = [result for _, result in sorted(self._results.pop(task_id, {}).items())]
        self._seen_from.pop(task_id, None)
        group = Group(task_id, tuple(EndedSession(result) for result in results))
        if group.rewards_differ:
            return Group(task_id, tuple(EndedSession(result, self._recording(result)) for result in results))
        # What was recorded need not be read.
        self._resting[turn.task] = turn.round + self._rollouts.rest
        return group

    def _recording(self, result: SessionResult) -> Recording | None:
        if not result.has_recording:
            return None
        try:
            return decode(retry(lambda: self._client.recording(result.session_id)))
        except (NotFound, DamagedRecording) as error:
            log.warning("session %s: %s", result.session_id, error)
            return None


class HeldOut:
    """Tasks that are not learnt from, rolled out now and then to see how well the policy does."""

    def __init__(
        self, client: Client, tasks: Sequence[TaskSpec], samples: int, temperature: float, log_file: Path
    ) -> None:
        """`log_file` gets a line each time: the share of samples that passed, by task."""
        self._client = client
        self._tasks = tasks
        self._samples = samples
        self._temperature = temperature
        self._log_file = log_file
        self._run = secrets.token_hex(4)

    def numbers(self, step: int) -> dict[str, float]:
        """Mean reward, and the share of sessions with the full reward; a failed session counts as 0."""
        specs = [
            # Nothing is learnt until they have ended, so they go before what is rolled out ahead.
            training_task(
                task, f"{self._run}-held-out-{step}-{number}", self._samples, self._temperature
            ).model_copy(update={"priority": MOST_URGENT})
            for number, task in enumerate(self._tasks)
        ]
        for spec in specs:
            retry(partial(self._client.submit, spec))
        results = retry(lambda: self._client.wait([spec.id for spec in specs]))
        rewards: dict[str, list[float]] = {spec.id: [] for spec in specs}
        for result in results:
            rewards[result.task_id].append(result.reward or 0.0)
        passed = {
            task.id: fmean(one >= 1.0 for one in rewards[spec.id])
            for task, spec in zip(self._tasks, specs, strict=True)
            if rewards[spec.id]
        }
        success = mean_of_outcomes(list(passed.values()))
        if success is None:
            return {}
        with self._log_file.open("a") as file:
            file.write(json.dumps({"step": step, "passed": passed}) + "\n")
        numbers = {
            "held_out_reward": fmean(result.reward or 0.0 for result in results),
            "held_out_success": success.value,
        }
        if success.has_interval:
            numbers |= {"held_out_low": success.low, "held_out_high": success.high}
        return numbers
