"""One way of scoring a session after its agent is gone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import BaseModel

from polar.errors import PolarError
from polar.models.session import TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.runtimes.base import Sandbox


class EvaluationFailed(PolarError):
    """The evaluator itself could not come to a verdict (the agent's failure is a low reward instead)."""


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """What an evaluator may look at. No process of the agent is alive any more."""

    task: TaskSpec
    sandbox: Sandbox
    stats: TrajectoryStats
    timeout: float


class Evaluator(ABC):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    async def evaluate(self, context: EvaluationContext) -> Verdict:
        """Score the session; EvaluationFailed if that was not possible."""
