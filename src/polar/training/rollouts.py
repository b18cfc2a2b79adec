"""Groups from a rollout server that runs ahead of training by as many steps as tokens may be stale."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from polar.app.rollouts import follow, read_recording, training_task
from polar.client import AsyncClient
from polar.errors import retry_async
from polar.evals.statistics import mean_of_outcomes
from polar.models.session import SessionResult
from polar.models.task import TaskSpec
from polar.training.material import Material, PolicyVersions, material
from polar.training.settings import GrpoSettings, HeldOutSettings, RolloutSettings
from polar.training.sources import Shuffled
from polar.trajectory.learnable import EndedSession, Excluded, Group

MOST_URGENT = 100
"""The highest priority that a task may have."""

HELD_OUT = "held-out.jsonl"
"""File in the run's directory with the pass rate of each held-out task over time."""

Connect = Callable[[], AsyncClient]
"""Makes a client of the rollout server."""
Complete = tuple[str, list[SessionResult]]
"""(id of a finished task, its results)."""


class Scheduled(NamedTuple):
    """A submitted task, with its round through all tasks and its latest step."""

    round: int
    task: int
    due: int
    """The step after which its first tokens may be too stale."""
    cursor: int = 0
    """End of the feed when it was submitted; its results come after that."""


class RolloutSource:
    """Submits tasks and takes their groups in the order in which they are complete, and none too late.

    What is in flight while a step is trained is `ahead` steps of groups: none when synchronous. A group is
    due `ahead` steps after it was submitted. Slow ones are overtaken as long as they will still find a place
    in time; then they are waited for. The server keeps the order in which sessions ended. Each step reads it
    again from where the oldest task in flight was submitted: so does a run that goes on.
    """

    def __init__(
        self, settings: GrpoSettings, rollouts: RolloutSettings, connect: Connect, tasks: Sequence[TaskSpec]
    ) -> None:
        self._settings = settings
        self._rollouts = rollouts
        self._connect = connect
        self._tasks = tasks
        self._order = Shuffled(len(tasks), settings.seed)
        self._run = secrets.token_hex(4)
        self._in_flight: dict[str, Scheduled] = {}
        """Submitted tasks not yet taken, oldest first."""
        self._resting: dict[int, int] = {}
        """Last round in which each task is skipped."""
        self._passed_over = 0
        """Skipped turns since the last step."""
        self._step = 0
        """The step that is being supplied."""
        self._cursor = 0
        """A cursor before the results of every task yet to be taken."""

    def take(self, versions: PolicyVersions) -> Material:
        groups = asyncio.run(self._groups())
        settings = self._settings
        made = material(
            groups, settings.objective, settings.batch, versions, settings.seed, settings.minibatches
        )
        made.numbers.update(self._rewards_by_family(groups))
        made.excluded[Excluded.TASKS_RESTING] += self._passed_over
        self._passed_over = 0
        self._step += 1
        return made

    def state(self) -> dict[str, Any]:
        return {
            "run": self._run,
            "position": self._order.position,
            "in_flight": {id: tuple(turn) for id, turn in self._in_flight.items()},
            "resting": dict(self._resting),
            "step": self._step,
            "cursor": self._cursor,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from `state`: submitted tasks have fixed ids, and are found by them."""
        self._run = state["run"]
        self._order.position = state["position"]
        self._in_flight = {id: Scheduled(*turn) for id, turn in state["in_flight"].items()}
        self._resting = dict(state["resting"])
        self._step = state["step"]
        self._cursor = state["cursor"]

    def _rewards_by_family(self, groups: Sequence[Group]) -> dict[str, float]:
        """Mean rewards by the family that the tasks' metadata name."""
        found: dict[str, list[float]] = defaultdict(list)
        for group in groups:
            if isinstance(family := self._tasks[group.turn[1]].metadata.get("family"), str):
                found[f"reward/{family}"] += [it.reward or 0.0 for it in group.scored if not it.is_branch]
        return {name: fmean(rewards) for name, rewards in found.items() if rewards}

    async def _groups(self) -> list[Group]:
        """Collect a step's groups, and a spare for each with all rewards equal, if available."""
        taken: list[Group] = []
        async with self._connect() as client:
            while missing := self._missing(taken):
                await self._submit(client, missing)
                async with aclosing(self._complete(client)) as complete:
                    await self._choose(client, complete, taken)
        return taken

    def _missing(self, taken: Sequence[Group]) -> int:
        equal = sum(not self._settings.objective.learns_from(group) for group in taken)
        return self._settings.groups - len(taken) + min(equal, self._rollouts.spares)

    def _lacking(self, missing: int) -> int:
        """Number of tasks to submit now."""
        return missing + self._settings.groups * self._settings.ahead - len(self._in_flight)

    async def _submit(self, client: AsyncClient, missing: int) -> None:
        """Submit tasks up to the limit."""
        newest = await retry_async(client.newest_result)
        tasks = self._scheduled(missing, newest)
        known = await retry_async(lambda: _submit(client, tasks))
        # These were submitted before the run went on from a checkpoint. What follows a new task is new.
        for id in known:
            self._in_flight[id] = self._in_flight[id]._replace(cursor=self._cursor)
        if len(known) < len(tasks):
            self._cursor = newest

    def _scheduled(self, missing: int, cursor: int) -> list[TaskSpec]:
        """The next tasks, without resting ones."""
        tasks = []
        while self._lacking(missing) > 0:
            prefix = f"{self._run}-{self._order.position}"
            due = self._step + self._settings.ahead
            turn = Scheduled(self._order.round, self._order.next(), due, cursor)
            if turn.round <= self._resting.get(turn.task, -1):
                self._passed_over += 1
                continue
            temperature = self._settings.objective.temperature
            spec = training_task(self._tasks[turn.task], prefix, self._rollouts.samples, temperature)
            spec = spec.model_copy(update={"run": self._settings.named})
            self._in_flight[spec.id] = turn
            tasks.append(spec)
        return tasks

    async def _complete(self, client: AsyncClient) -> AsyncGenerator[Complete, None]:
        """Yield tasks as they finish."""
        results: dict[str, list[SessionResult]] = defaultdict(list)
        complete: set[str] = set()
        cursor = min(turn.cursor for turn in self._in_flight.values())
        async for result in follow(client, list(self._in_flight), cursor):
            ended = results[result.task_id]
            ended.append(result)
            has_samples = len(ended) >= self._rollouts.samples
            if has_samples and await _are_all(client, result.task_id, len(ended)):
                complete.add(result.task_id)
                yield result.task_id, ended
        # Every task has ended: those that were cancelled are as complete as they will be.
        for id in [id for id in self._in_flight if id not in complete]:
            yield id, results[id]

    async def _choose(
        self, client: AsyncClient, complete: AsyncIterator[Complete], taken: list[Group]
    ) -> None:
        """Take groups until there are enough, or more tasks must be submitted."""
        waiting: dict[str, list[SessionResult]] = {}
        async for task_id, results in complete:
            waiting[task_id] = results
            while missing := self._missing(taken):
                urgent = self._urgent(missing)
                chosen = next((id for id in waiting if id in urgent), None)
                if chosen is None:
                    break
                taken.append(await self._group(client, chosen, waiting.pop(chosen)))
            if not missing or self._lacking(missing) > 0:
                return

    def _urgent(self, missing: int) -> Collection[str]:
        """Tasks from which the next group must come so that none misses its step.

        At no step may more groups be due than the steps up to it have places left.
        """
        for later in range(self._settings.ahead):
            due = [id for id, turn in self._in_flight.items() if turn.due <= self._step + later]
            if len(due) >= missing + self._settings.groups * later:
                return due
        return self._in_flight

    async def _group(self, client: AsyncClient, task_id: str, results: list[SessionResult]) -> Group:
        """Read recordings if they teach something; otherwise the task rests."""
        turn = self._in_flight.pop(task_id)
        results.sort(key=lambda result: result.sample)
        group = Group(task_id, tuple(map(EndedSession, results)), (turn.round, turn.task))
        if self._settings.objective.learns_from(group):
            recordings = [await read_recording(client, result) for result in results]
            return replace(group, samples=tuple(map(EndedSession, results, recordings)))
        self._resting[turn.task] = turn.round + self._rollouts.rest
        return group


async def _are_all(client: AsyncClient, task_id: str, ended: int) -> bool:
    """Whether these are all sessions of a task, branches included."""
    sessions = (await retry_async(lambda: client.task(task_id))).sessions
    return all(status.ended for status in sessions) and sum(sessions.values()) == ended


async def _submit(client: AsyncClient, tasks: Sequence[TaskSpec]) -> set[str]:
    """Submit tasks; return the ids that the server already had."""
    return {id async for batch in client.submit_batches(tasks) for id in batch.known}


class HeldOut:
    """Evaluates the policy on held-out tasks from time to time."""

    def __init__(
        self, asked: HeldOutSettings, connect: Connect, tasks: Sequence[TaskSpec], run: GrpoSettings
    ) -> None:
        self._asked = asked
        self._connect = connect
        self._tasks = tasks
        self._temperature = run.objective.temperature
        self._named = run.named
        self._log_file = run.out / HELD_OUT
        self._run = secrets.token_hex(4)

    def __call__(self, step: int, is_last: bool) -> dict[str, float]:
        """Mean reward, and the share of sessions with the full reward; a failed session counts as 0."""
        if step % self._asked.every and not is_last:
            return {}
        specs = [
            # Nothing is learnt until they have ended, so they go before what is rolled out ahead.
            training_task(
                task, f"{self._run}-held-out-{step}-{number}", self._asked.samples, self._temperature
            ).model_copy(update={"priority": MOST_URGENT, "branching": None, "run": self._named})
            for number, task in enumerate(self._tasks)
        ]
        results = asyncio.run(self._results(specs))
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

    async def _results(self, tasks: Sequence[TaskSpec]) -> list[SessionResult]:
        async with self._connect() as client:
            newest = await retry_async(client.newest_result)
            await retry_async(lambda: _submit(client, tasks))
            return [result async for result in follow(client, [task.id for task in tasks], newest)]
