"""Tries a taskset before anybody trains on it: can each task be solved, and is only work rewarded?

A script stands in for the agent, in the sandbox and under the evaluator that sessions have: one that does
nothing, the reference solution where the task has one, and the attacks that fit how the task is graded.
No model and no server takes part.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from polar.config import plugins
from polar.config.settings import NodeSettings
from polar.errors import PolarError
from polar.evaluators.attacks import ATTACKS, Attack, Kind, fitting
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.session import AgentEnd, TrajectoryStats
from polar.models.task import FileContent, Solution, TaskSpec
from polar.node.evaluation import evaluate
from polar.node.sandboxes import Sandboxes, SandboxPlace, Snapshots
from polar.node.services import judge_endpoints
from polar.runtimes.base import Command, Host, Sandbox

REPEATS = 2
"""How often the same work is scored, to see whether it always gets the same reward."""
SCRIPT_SECONDS = 600.0
"""The most that a script may take, however long an agent may."""
STAND_IN = {"name": "shell", "options": {"command": "true"}}
"""The harness of every task that is tried: a script plays the agent, so none of them need name one."""
EQUAL = 1e-9
"""Rewards closer than this are the same."""

_SIGNS = {
    Kind.PYTHON: ("python", ".py"),
    Kind.PYTEST: ("pytest", "test_", "conftest"),
    Kind.NODE: ("node", "npm", "package.json", ".js", ".ts"),
    Kind.CARGO: ("cargo", ".rs"),
    Kind.MAKE: ("make", "Makefile"),
}
"""What in a task's evaluator and file names shows that it is graded with these."""

T = TypeVar("T")


class Trouble(StrEnum):
    """What can be wrong with a task."""

    UNGRADABLE = "cannot be graded"
    """Its evaluator, or its sandbox, fails whatever the agent does."""
    UNSOLVABLE = "not solvable"
    """Its reference solution does not pass."""
    FREE = "rewards no work"
    """Doing nothing passes, or is worth as much as the solution."""
    CHEATABLE = "can be cheated"
    """An attack is worth more than doing nothing."""
    FLAKY = "flaky"
    """The same work was scored differently."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done in the sandbox instead of an agent's work."""

    name: str
    script: str = "true"
    files: Mapping[str, FileContent] = field(default_factory=dict)
    """In the directory that `$POLAR_SOLUTION` names."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial was scored; exactly one of `reward` and `error` is set."""

    trial: str
    reward: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What the trials of one task show."""

    task_id: str
    nothing: tuple[TrialOutcome, ...]
    solution: tuple[TrialOutcome, ...] = ()
    """Empty where the task has no reference solution."""
    attacks: tuple[TrialOutcome, ...] = ()
    pass_reward: float = 1.0

    @property
    def troubles(self) -> dict[Trouble, str]:
        """What is wrong, each with what was seen."""
        found = {
            Trouble.UNGRADABLE: self._failure(),
            Trouble.UNSOLVABLE: self._short_of_passing(),
            Trouble.FREE: self._free(),
            Trouble.CHEATABLE: ", ".join(one.trial for one in self.successful_attacks),
            Trouble.FLAKY: " and ".join(filter(None, map(_disagreement, (self.nothing, self.solution)))),
        }
        return {trouble: seen for trouble, seen in found.items() if seen}

    @property
    def successful_attacks(self) -> tuple[TrialOutcome, ...]:
        """Those that were rewarded beyond doing nothing."""
        free = max(_rewards(self.nothing), default=0.0)
        return tuple(one for one in self.attacks if one.reward is not None and one.reward > free + EQUAL)

    def _failure(self) -> str:
        return next((one.error for one in (*self.nothing, *self.solution) if one.error), "")

    def _short_of_passing(self) -> str:
        worst = min(_rewards(self.solution), default=self.pass_reward)
        if worst >= self.pass_reward - EQUAL:
            return ""
        return f"the solution is worth {worst:g}, and {self.pass_reward:g} passes"

    def _free(self) -> str:
        free = max(_rewards(self.nothing), default=0.0)
        enough = min([self.pass_reward, *_rewards(self.solution)])
        return f"doing nothing is worth {free:g}" if free >= enough - EQUAL else ""


def _rewards(outcomes: Sequence[TrialOutcome]) -> list[float]:
    return [one.reward for one in outcomes if one.reward is not None]


def _disagreement(outcomes: Sequence[TrialOutcome]) -> str:
    rewards = _rewards(outcomes)
    if not rewards or max(rewards) - min(rewards) <= EQUAL:
        return ""
    return f"{outcomes[0].trial} was worth {', '.join(f'{reward:g}' for reward in rewards)}"


def trials(task: TaskSpec, solution: Solution | None, *, attacks: bool) -> Iterator[tuple[str, Trial]]:
    """Every trial of a task, with the part of its report that it belongs to."""
    for _ in range(REPEATS):
        yield "nothing", Trial("doing nothing")
    if solution is not None:
        for _ in range(REPEATS):
            yield "solution", Trial("the solution", solution.script, solution.files)
    if attacks:
        for attack in attacks_on(task):
            yield "attacks", Trial(attack.name, attack.command)


def attacks_on(task: TaskSpec) -> tuple[Attack, ...]:
    """The attacks that fit how a task is graded; all of them where an image or preparation hides that."""
    if task.prepare or "image" in task.runtime.options:
        return ATTACKS
    shown = json.dumps([task.evaluator.options, *task.files])
    return fitting({kind for kind, signs in _SIGNS.items() if any(sign in shown for sign in signs)})


@dataclass(frozen=True, slots=True)
class TrialNode(SandboxPlace):
    """Where trials are made: as on a node, without its gateway."""

    async def score(self, task: TaskSpec, trial: Trial, name: str) -> TrialOutcome:
        """Make the trial in a sandbox of its own and have it evaluated."""
        try:
            return TrialOutcome(trial.name, reward=await self._reward(task, trial, name))
        except PolarError as error:
            return TrialOutcome(trial.name, error=str(error))
        except TimeoutError:
            return TrialOutcome(
                trial.name, error="a budget of the task is used up: preparation or evaluation"
            )

    async def _reward(self, task: TaskSpec, trial: Trial, name: str) -> float:
        budgets = task.budgets
        evaluator: Evaluator = plugins.create("evaluators", "evaluator", task.evaluator)
        sandboxes = Sandboxes(name, task, self, name)
        async with sandboxes.sandbox() as sandbox:
            exit_code = await _play(sandbox, trial, min(budgets.run_seconds, SCRIPT_SECONDS))
            context = EvaluationContext(
                task=task,
                sandbox=sandbox,
                stats=TrajectoryStats(),
                timeout=budgets.evaluate_seconds,
                agent_end=AgentEnd.EXITED,
                exit_code=exit_code,
                sandbox_maker=sandboxes.sandbox,
                cache=self.directory / "cache",
                judges=judge_endpoints(self.settings),
            )
            return (await evaluate(evaluator, context)).reward


async def _play(sandbox: Sandbox, trial: Trial, seconds: float) -> int:
    place = sandbox.home / ".polar" / "solution"
    for path, file in trial.files.items():
        await sandbox.upload(place / path, file.data, executable=file.executable)
    command = Command(("/bin/sh", "-c", trial.script), {"POLAR_SOLUTION": str(place)})
    result = await sandbox.exec(command, timeout=seconds, log_name="agent")
    await sandbox.kill()
    return result.exit_code


@asynccontextmanager
async def trial_node(settings: NodeSettings) -> AsyncIterator[TrialNode]:
    """A place for trials that is gone afterwards."""
    with TemporaryDirectory(prefix="polar-validate-") as scratch:
        snapshots = Snapshots(Host(Path(scratch)))
        try:
            yield TrialNode(settings, Path(scratch), snapshots)
        finally:
            await snapshots.close()


async def validate(
    tasks: Sequence[TaskSpec],
    solutions: Mapping[str, Solution],
    place: TrialNode,
    *,
    jobs: int,
    attacks: bool = True,
    pass_reward: float = 1.0,
    note: Callable[[TaskReport], None] = lambda _report: None,
) -> list[TaskReport]:
    """The report of each task in order, passed to `note` once it is made; at most `jobs` run at a time."""
    seats = asyncio.Semaphore(jobs)

    async def score(task: TaskSpec, trial: Trial, name: str) -> TrialOutcome:
        async with seats:
            return await place.score(task, trial, name)

    async def report(number: int, task: TaskSpec) -> TaskReport:
        # Samples of a task share its preparation.
        task = task.model_copy(update={"samples": max(2, task.samples)})
        planned = list(trials(task, solutions.get(task.id), attacks=attacks))
        outcomes = await _gathered(
            [score(task, trial, f"{number}-{k}") for k, (_, trial) in enumerate(planned)]
        )
        parts = {
            part: tuple(outcome for (own, _), outcome in zip(planned, outcomes, strict=True) if own == part)
            for part in ("nothing", "solution", "attacks")
        }
        made = TaskReport(task.id, **parts, pass_reward=pass_reward)
        note(made)
        return made

    return await _gathered([report(number, task) for number, task in enumerate(tasks)])


async def _gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    async with asyncio.TaskGroup() as group:
        started = [group.create_task(one) for one in work]
    return [one.result() for one in started]
