"""Scores a session by how its agent ended, for smoke tests and for data that needs no grading."""

from __future__ import annotations

from pydantic import Field

from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.session import AgentEnd, Verdict


class SessionCompleted(Evaluator):
    """Gives 1.0 if the agent exited by itself after enough completions, else 0.0."""

    class Options(Evaluator.Options):
        min_completions: int = Field(default=1, ge=0)
        """Minimum number of model calls."""
        exit_code: int | None = None
        """Required exit code; any if unset, since harnesses' exit codes are unreliable."""

    options: Options

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        problems = []
        if context.agent_end is not AgentEnd.EXITED:
            problems.append(f"the agent did not exit by itself: {context.agent_end}")
        if context.stats.completions < self.options.min_completions:
            problems.append(
                f"{context.stats.completions} completions, at least {self.options.min_completions} required"
            )
        if self.options.exit_code not in (None, context.exit_code):
            problems.append(f"exit code {context.exit_code}, {self.options.exit_code} required")
        return Verdict(reward=0.0 if problems else 1.0, report="; ".join(problems) or "completed")
