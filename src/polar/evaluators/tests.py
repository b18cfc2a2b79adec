"""Scores a session by running tests that the agent never saw, and reading which of them passed."""

from __future__ import annotations

from polar.evaluators.base import EvaluationContext, Evaluator
from polar.evaluators.inside import UngradableWorkspace
from polar.evaluators.test_plan import TestPlan, run_plan, spoiled
from polar.evaluators.workspace import Place, Placed, graded_workspace
from polar.models.session import Verdict


class TestsEvaluator(Evaluator):
    __test__ = False

    class Options(TestPlan, Placed):
        pass

    options: Options

    @property
    def wants_fresh_sandbox(self) -> bool:
        return self.options.sandbox is Place.FRESH

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        try:
            async with graded_workspace(context, self.options, self.options.guarded) as prepared:
                return await run_plan(self.options, context, prepared)
        except UngradableWorkspace as error:
            return spoiled(error)
