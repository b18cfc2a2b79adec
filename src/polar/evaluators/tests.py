"""Scores a session by running tests that the agent never saw, and reading which of them passed."""

from __future__ import annotations

from enum import StrEnum

from polar.evaluators.base import EvaluationContext, Evaluator
from polar.evaluators.inside import Spoiled
from polar.evaluators.snapshot import pack, replace_workspace
from polar.evaluators.tampering import inventory_before, take_inventory
from polar.evaluators.test_plan import TestPlan, run_plan, spoiled
from polar.models.session import Verdict


class Place(StrEnum):
    """Where an evaluator's commands run."""

    LIVE = "live"
    """In the sandbox of the agent, with everything it left there."""
    FRESH = "fresh"
    """In a sandbox as the agent found its own, into which only its workspace is carried."""


class TestsEvaluator(Evaluator):
    __test__ = False

    class Options(TestPlan):
        sandbox: Place = Place.LIVE

    options: Options

    @property
    def wants_fresh_sandbox(self) -> bool:
        return self.options.sandbox is Place.FRESH

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        try:
            if self.options.sandbox is Place.LIVE:
                return await self._live(context)
            return await self._fresh(context)
        except Spoiled as error:
            return spoiled(error)

    async def _live(self, context: EvaluationContext) -> Verdict:
        plan = self.options
        after = await take_inventory(context.sandbox, plan.guarded, timeout=context.seconds_left)
        before = await inventory_before(context, plan.guarded, after)
        return await run_plan(plan, context, context.sandbox, before, after)

    async def _fresh(self, context: EvaluationContext) -> Verdict:
        plan = self.options
        archive = await pack(context)
        async with context.fresh_sandbox() as fresh:
            before = await take_inventory(fresh, plan.guarded, timeout=context.seconds_left)
            await replace_workspace(fresh, archive, timeout=context.seconds_left)
            after = await take_inventory(fresh, plan.guarded, timeout=context.seconds_left)
            return await run_plan(plan, context, fresh, before, after)
