"""The interface of evaluators, which score a session after its agent has ended."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from polar.errors import PolarError
from polar.models.completion import Completion
from polar.models.session import AgentEnd, TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.runtimes.base import Sandbox

if TYPE_CHECKING:
    # It reads every attack, which only those need who try them.
    from polar.evaluators.attacks import Exam

UNGRADABLE = "ungradable"
"""The component of a verdict that is 1 if the agent prevented its work from being evaluated."""


_ROUNDING = 1e-9


class EvaluationFailed(PolarError):
    """The evaluator could not reach a verdict. An agent's failure is a low reward instead."""


class NoVerdict(EvaluationFailed):
    """A grader finished without stating a valid result.

    If it does state one without the agent's work, the session gets the lowest reward and is not retried:
    otherwise the graded code could suppress verdicts until it gets one it likes.
    """


class RewardTooLow(EvaluationFailed):
    """A reward is below the evaluator's `lowest_reward`."""


@dataclass(frozen=True, slots=True)
class JudgeEndpoint:
    """A judge model: tasks refer to it by name, and only the node knows its address and key."""

    url: str
    """Base URL, without `/chat/completions`."""
    model: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """What an evaluator may look at. Every process of the agent has ended."""

    task: TaskSpec
    sandbox: Sandbox
    """The agent's own sandbox, as it left it."""
    stats: TrajectoryStats
    timeout: float
    """Seconds from `started`."""
    agent_end: AgentEnd = AgentEnd.EXITED
    exit_code: int | None = None
    trace_ends: tuple[str, ...] = ()
    """For each trace of the session, the id of the completion whose transcript contains all of it."""
    completions: Callable[[], list[Completion]] = list
    """Reads the session's capture on demand, which may take long: call it in a thread."""
    sandbox_maker: Callable[[], AbstractAsyncContextManager[Sandbox]] | None = None
    """Creates a sandbox in the state in which the agent found its own; None if there is none."""
    artifacts: Path | None = None
    """Host directory, created on demand, for files that people may want to see."""
    cache: Path | None = None
    """Host directory, created on demand, that all evaluators of this node share."""
    judges: Mapping[str, JudgeEndpoint] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.started + self.timeout - time.monotonic())

    def fresh_sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """Return a sandbox made from the task like the agent's, without a gateway; it ends with the
        context."""
        if self.sandbox_maker is None:
            raise EvaluationFailed("this runtime cannot create a fresh sandbox")
        return self.sandbox_maker()

    def keep(self, name: str, data: bytes) -> None:
        """Store a file among the artifacts, if there is a place for them."""
        if self.artifacts is not None:
            self.artifacts.mkdir(parents=True, exist_ok=True)
            (self.artifacts / name).write_bytes(data)

    def with_sandbox(self, sandbox: Sandbox) -> EvaluationContext:
        return replace(self, sandbox=sandbox)


class Evaluator(ABC):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        lowest_reward: float = Field(default=0.0, le=0, allow_inf_nan=False)
        """The lowest reward it may give, which is also the reward of work that the agent made ungradable."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @property
    def lowest_reward(self) -> float:
        """The reward of ungradable work, so that making the grading fail never pays."""
        return float(getattr(self.options, "lowest_reward", 0.0))

    @property
    def wants_fresh_sandbox(self) -> bool:
        """Whether `evaluate` will ask for a fresh sandbox, which the node can then create in advance."""
        return False

    @classmethod
    def exams(cls) -> Sequence[Exam]:
        """Tasks on which `make test-attacks` plays the attacks against it; without one the suite fails."""
        return ()

    @abstractmethod
    async def evaluate(self, context: EvaluationContext) -> Verdict:
        """Score the session; raise EvaluationFailed if that is not possible."""

    async def score(self, context: EvaluationContext) -> Verdict:
        """Return the verdict of `evaluate`; raise RewardTooLow if it is below `lowest_reward`."""
        verdict = await self.evaluate(context)
        reward = min(verdict.reward, *verdict.trace_rewards.values(), 0.0)
        if reward < self.lowest_reward - _ROUNDING:
            raise RewardTooLow(
                f"the evaluator gave {reward:g}, which is below its lowest_reward of {self.lowest_reward:g}",
                hint="set lowest_reward in its options to the lowest reward that it may give",
            )
        return verdict


def evaluator(
    function: Callable[[EvaluationContext, Any], Awaitable[float | Verdict]],
    options: type[BaseModel] = Evaluator.Options,
    *,
    exams: Sequence[Exam] = (),
) -> type[Evaluator]:
    """Return an evaluator class that calls `function(context, options)`; register it as an entry point."""
    own = exams

    class FunctionEvaluator(Evaluator):
        __doc__ = function.__doc__
        Options = options  # type: ignore[assignment]

        @classmethod
        def exams(cls) -> Sequence[Exam]:
            return own

        async def evaluate(self, context: EvaluationContext) -> Verdict:
            score = await function(context, self.options)
            return score if isinstance(score, Verdict) else Verdict(reward=score)

    FunctionEvaluator.__name__ = getattr(function, "__name__", "FunctionEvaluator")
    return FunctionEvaluator
