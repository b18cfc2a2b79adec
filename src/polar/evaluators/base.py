"""One way of scoring a session after its agent is gone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from polar.errors import PolarError
from polar.models.completion import Completion
from polar.models.session import AgentEnd, TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.runtimes.base import Sandbox

UNGRADABLE = "ungradable"
"""The component of a verdict that is 1 where the agent kept its work from being evaluated."""


_ROUNDING = 1e-9
"""What sums of weighted rewards may be off by."""


class EvaluationFailed(PolarError):
    """The evaluator itself could not come to a verdict (the agent's failure is a low reward instead)."""


class NoVerdict(EvaluationFailed):
    """A grader ran to its end and stated nothing that counts.

    Where it does state something without the agent, that is worth nothing and not tried again: code that is
    graded could keep verdicts it does not like from being stated, until it likes one.
    """


class RewardTooLow(EvaluationFailed):
    """A reward below the lowest that the evaluator is said to give."""


@dataclass(frozen=True, slots=True)
class JudgeEndpoint:
    """A model that judges: tasks name it, only the node knows where it is and with which key."""

    url: str
    """Up to and without `/chat/completions`."""
    model: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """What an evaluator may look at. Every process of the agent has ended."""

    task: TaskSpec
    sandbox: Sandbox
    """The agent's own, as it left it."""
    stats: TrajectoryStats
    timeout: float
    """Seconds from `started`."""
    agent_end: AgentEnd = AgentEnd.EXITED
    exit_code: int | None = None
    trace_ends: tuple[str, ...] = ()
    """For each trace of the session, the id of the completion whose transcript holds all of it."""
    completions: Callable[[], list[Completion]] = list
    """Reads the session's capture on demand, which may take long: call it in a thread."""
    sandbox_maker: Callable[[], AbstractAsyncContextManager[Sandbox]] | None = None
    """Makes a sandbox as the agent found its own; None where there is no such thing."""
    artifacts: Path | None = None
    """Host directory where an evaluator keeps files for people to look at; made on demand."""
    cache: Path | None = None
    """Host directory that evaluators of this node share; made on demand."""
    judges: Mapping[str, JudgeEndpoint] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.started + self.timeout - time.monotonic())

    def fresh_sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox made from the task as the agent's was, without a gateway; it ends with the context."""
        if self.sandbox_maker is None:
            raise EvaluationFailed("no fresh sandbox can be made here")
        return self.sandbox_maker()

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file for people to look at, where there is a place for it."""
        if self.artifacts is not None:
            self.artifacts.mkdir(parents=True, exist_ok=True)
            (self.artifacts / name).write_bytes(data)

    def with_sandbox(self, sandbox: Sandbox) -> EvaluationContext:
        return replace(self, sandbox=sandbox)


class Evaluator(ABC):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        lowest_reward: float = Field(default=0.0, le=0, allow_inf_nan=False)
        """The lowest reward it may give, and what work is worth whose agent kept it from being graded."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @property
    def lowest_reward(self) -> float:
        """An agent that faces it gains nothing by making the grading fail."""
        return float(getattr(self.options, "lowest_reward", 0.0))

    @property
    def wants_fresh_sandbox(self) -> bool:
        """Whether `evaluate` will ask for a fresh sandbox, so that the node can make it in advance."""
        return False

    @abstractmethod
    async def evaluate(self, context: EvaluationContext) -> Verdict:
        """Score the session; EvaluationFailed if that was not possible."""

    async def score(self, context: EvaluationContext) -> Verdict:
        """The verdict of `evaluate`; RewardTooLow where an agent would do better to keep it from coming."""
        verdict = await self.evaluate(context)
        reward = min(verdict.reward, *verdict.trace_rewards.values(), 0.0)
        if reward < self.lowest_reward - _ROUNDING:
            raise RewardTooLow(
                f"the evaluator gives {reward:g}, its lowest_reward is {self.lowest_reward:g}",
                hint="set lowest_reward in its options to the lowest reward that it may give",
            )
        return verdict


def evaluator(
    function: Callable[[EvaluationContext, Any], Awaitable[float | Verdict]],
    options: type[BaseModel] = Evaluator.Options,
) -> type[Evaluator]:
    """The evaluator class that calls `function(context, options)`; name it in the entry point."""

    class FunctionEvaluator(Evaluator):
        __doc__ = function.__doc__
        Options = options  # type: ignore[assignment]

        async def evaluate(self, context: EvaluationContext) -> Verdict:
            score = await function(context, self.options)
            return score if isinstance(score, Verdict) else Verdict(reward=score)

    FunctionEvaluator.__name__ = getattr(function, "__name__", "FunctionEvaluator")
    return FunctionEvaluator
