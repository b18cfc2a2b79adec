"""Scores a session by how its agent ended: for smoke tests, and for data that needs no other judgement."""

from __future__ import annotations

from pydantic import Field

from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.session import AgentEnd, Verdict


class SessionCompleted(Evaluator):
    """1.0 if the agent ended by itself after enough completions, else 0.0."""

    class Options(Evaluator.Options):
        min_completions: int = Field(default=1, ge=0)
        """How many model calls it must have made."""
        exit_code: int | None = None
        """What it must have ended with; None: anything, since harnesses' exit codes lie."""

    options: Options

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        problems = []
        if context.agent_end is not AgentEnd.EXITED:
            problems.append(f"the agent did not end by itself: {context.agent_end}")
        if context.stats.completions < self.options.min_completions:
            problems.append(
                f"{context.stats.completions} completions, {self.options.min_completions} are wanted"
            )
        if self.options.exit_code not in (None, context.exit_code):
            problems.append(f"exit code {context.exit_code}, {self.options.exit_code} is wanted")
        return Verdict(reward=0.0 if problems else 1.0, report="; ".join(problems) or "completed")
