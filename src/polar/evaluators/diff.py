"""Scores the agent's patch: taken from its workspace, applied to a clean one, then tested there."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from polar.evaluators.base import EvaluationContext, Evaluator
from polar.evaluators.inside import UngradableWorkspace
from polar.evaluators.patch import PATCH_BYTES, apply_patch, extract_patch, touched_files
from polar.evaluators.test_plan import TestPlan, run_plan, spoiled
from polar.evaluators.workspace import GradedWorkspace, Guarded, changed_workspace
from polar.models.session import Verdict
from polar.runtimes.base import Sandbox


class DiffEvaluator(Evaluator):
    class Options(TestPlan):
        exclude: tuple[str, ...] = ()
        """Paths (git's glob patterns: `tests/**`) whose changes are left out of the patch."""
        max_patch_bytes: int = Field(default=PATCH_BYTES, ge=1, le=64 * 1024 * 1024)
        """A longer patch is worth nothing."""

    options: Options

    @property
    def wants_fresh_sandbox(self) -> bool:
        return True

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        plan = self.options
        try:
            async with context.fresh_sandbox() as fresh:
                patch = await extract_patch(
                    context, fresh, plan.exclude, plan.max_patch_bytes, allow=plan.allow
                )
                patched = await patched_workspace(context, fresh, patch, plan, plan.guarded)
                verdict = await run_plan(plan, context, patched)
        except UngradableWorkspace as error:
            return spoiled(error)
        return with_patch(verdict, patch)


async def patched_workspace(
    context: EvaluationContext, fresh: Sandbox, patch: bytes, options: Guarded, guarded: Sequence[str]
) -> GradedWorkspace:
    """A fresh sandbox with the agent's patch, of which nothing is left that steers the grading."""

    async def apply() -> None:
        problem = await apply_patch(fresh, patch, timeout=context.seconds_left)
        if problem:
            raise UngradableWorkspace(f"the patch does not apply: {problem}")

    return await changed_workspace(context, fresh, options, guarded, apply)


def with_patch(verdict: Verdict, patch: bytes) -> Verdict:
    """A verdict that also tells how much the agent changed."""
    files = touched_files(patch)
    components = {**verdict.components, "patch_bytes": float(len(patch)), "patch_files": float(len(files))}
    return verdict.model_copy(update={"components": components})
