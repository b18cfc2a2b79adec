"""Tries out a taskset before training: can each task be solved, and is only real work rewarded?

A script replaces the agent, in the same sandbox and under the same evaluator as in sessions: one that does
nothing, the reference solution if the task has one, and the attacks that apply to its grading. No model and
no server is involved.
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
from polar.evaluators.attacks import ATTACKS, Attack, Kind, attacks_of_kinds
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
"""Maximum seconds for a script, however long an agent may take."""
STAND_IN = {"name": "shell", "options": {"command": "true"}}
"""The harness of every task: a script plays the agent, so tasks need not name one."""
EQUAL = 1e-9
"""Rewards that differ by less are equal."""

_NODE = ("node", "npm", "package.json", ".js", ".ts")
_SIGNS = {
    Kind.PYTHON: ("python", ".py"),
    Kind.PYTEST: ("pytest", "test_", "conftest"),
    # Which of them `npm test` runs is nowhere to be seen.
    **dict.fromkeys((Kind.NODE, Kind.JEST, Kind.VITEST, Kind.MOCHA, Kind.BUN), _NODE),
    Kind.CARGO: ("cargo", ".rs"),
    Kind.MAKE: ("make", "Makefile"),
}
"""Parts of a task's evaluator options and file names that show what it is graded with."""

T = TypeVar("T")


class Trouble(StrEnum):
    UNGRADABLE = "cannot be graded"
    """Its evaluator or sandbox fails whatever the agent does."""
    UNSOLVABLE = "not solvable"
    """Its reference solution does not pass."""
    FREE = "rewards no work"
    """Doing nothing passes, or is worth as much as the solution."""
    CHEATABLE = "can be cheated"
    """An attack is worth more than doing nothing."""
    ESCAPABLE = "can be escaped"
    """An attack makes its grading fail, so that the session is left out instead of scored."""
    FLAKY = "flaky"
    """The same work was scored differently."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done in the sandbox instead of an agent's work."""

    name: str
    script: str = "true"
    files: Mapping[str, FileContent] = field(default_factory=dict)
    """Files in the directory `$POLAR_SOLUTION`."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The score of a trial; exactly one of `reward` and `error` is set."""

    trial: str
    reward: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskReport:
    task_id: str
    nothing: tuple[TrialOutcome, ...]
    solution: tuple[TrialOutcome, ...] = ()
    """Empty if the task has no reference solution."""
    attacks: tuple[TrialOutcome, ...] = ()
    pass_reward: float = 1.0

    @property
    def troubles(self) -> dict[Trouble, str]:
        """The problems, each with its evidence."""
        found = {
            Trouble.UNGRADABLE: self._failure(),
            Trouble.UNSOLVABLE: self._short_of_passing(),
            Trouble.FREE: self._free(),
            Trouble.CHEATABLE: ", ".join(one.trial for one in self.successful_attacks),
            Trouble.ESCAPABLE: self._escaped(),
            Trouble.FLAKY: " and ".join(filter(None, map(_disagreement, (self.nothing, self.solution)))),
        }
        return {trouble: seen for trouble, seen in found.items() if seen}

    @property
    def successful_attacks(self) -> tuple[TrialOutcome, ...]:
        """The attacks that got more reward than doing nothing."""
        free = max(_rewards(self.nothing), default=0.0)
        return tuple(one for one in self.attacks if one.reward is not None and one.reward > free + EQUAL)

    @property
    def escapes(self) -> tuple[TrialOutcome, ...]:
        """The attacks that made grading fail, which works where nothing is done."""
        return () if _first_error(self.nothing) else tuple(one for one in self.attacks if one.error)

    def _failure(self) -> str:
        return _first_error((*self.nothing, *self.solution))

    def _escaped(self) -> str:
        names = ", ".join(one.trial for one in self.escapes)
        return names and f"{names}: {_first_error(self.escapes)}"

    def _short_of_passing(self) -> str:
        worst = min(_rewards(self.solution), default=self.pass_reward)
        if worst >= self.pass_reward - EQUAL:
            return ""
        return f"the solution is worth {worst:g}, but {self.pass_reward:g} is needed to pass"

    def _free(self) -> str:
        free = max(_rewards(self.nothing), default=0.0)
        enough = min([self.pass_reward, *_rewards(self.solution)])
        return f"doing nothing is worth {free:g}" if free >= enough - EQUAL else ""


def _first_error(outcomes: Sequence[TrialOutcome]) -> str:
    return next((one.error for one in outcomes if one.error), "")


def _rewards(outcomes: Sequence[TrialOutcome]) -> list[float]:
    return [one.reward for one in outcomes if one.reward is not None]


def _disagreement(outcomes: Sequence[TrialOutcome]) -> str:
    rewards = _rewards(outcomes)
    if not rewards or max(rewards) - min(rewards) <= EQUAL:
        return ""
    return f"{outcomes[0].trial} was worth {', '.join(f'{reward:g}' for reward in rewards)}"


def trials(task: TaskSpec, solution: Solution | None, *, attacks: bool) -> Iterator[tuple[str, Trial]]:
    """Yield every trial of a task, with the part of its report that it belongs to."""
    for _ in range(REPEATS):
        yield "nothing", Trial("doing nothing")
    if solution is not None:
        for _ in range(REPEATS):
            yield "solution", Trial("the solution", solution.script, solution.files)
    if attacks:
        for attack in attacks_on(task):
            yield "attacks", Trial(attack.name, attack.command)


def attacks_on(task: TaskSpec) -> tuple[Attack, ...]:
    """Return the attacks that apply to a task's grading; all of them if an image or preparation hides it, and
    none in plain processes, where they would write to this machine's own directories."""
    if task.runtime.name == "process":
        return ()
    if task.prepare or "image" in task.runtime.options:
        return ATTACKS
    shown = json.dumps([task.evaluator.options, *task.files])
    return attacks_of_kinds({kind for kind, signs in _SIGNS.items() if any(sign in shown for sign in signs)})


@dataclass(frozen=True, slots=True)
class TrialNode(SandboxPlace):
    """Runs trials like a node, without a gateway."""

    async def score(self, task: TaskSpec, trial: Trial, name: str) -> TrialOutcome:
        try:
            return TrialOutcome(trial.name, reward=await self._reward(task, trial, name))
        except PolarError as error:
            return TrialOutcome(trial.name, error=str(error))
        except TimeoutError:
            return TrialOutcome(
                trial.name, error="the task's budget for preparation or evaluation is used up"
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
    """Return the report of each task, calling `note` with each when it is ready; run `jobs` at a time."""
    seats = asyncio.Semaphore(jobs)

    async def score(task: TaskSpec, trial: Trial, name: str) -> TrialOutcome:
        async with seats:
            return await place.score(task, trial, name)

    async def report(number: int, task: TaskSpec) -> TaskReport:
        # All trials of a task share its preparation.
        task = task.model_copy(update={"samples": max(2, task.samples)})
        planned = list(trials(task, solutions.get(task.id), attacks=attacks))
        outcomes = await _run_all(
            [score(task, trial, f"{number}-{k}") for k, (_, trial) in enumerate(planned)]
        )
        parts = {
            part: tuple(outcome for (own, _), outcome in zip(planned, outcomes, strict=True) if own == part)
            for part in ("nothing", "solution", "attacks")
        }
        made = TaskReport(task.id, **parts, pass_reward=pass_reward)
        note(made)
        return made

    return await _run_all([report(number, task) for number, task in enumerate(tasks)])


async def _run_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    async with asyncio.TaskGroup() as group:
        started = [group.create_task(one) for one in work]
    return [one.result() for one in started]
