"""Scores the agent's patch: extracted from its workspace, applied to a clean one, then tested there.

The patch is computed in a repository of our own, never in the agent's `.git`. A fresh sandbox holds the
original workspace, and the agent's files are unpacked beside it. Both become trees of a repository that the
agent never touched, so no hook, filter, attribute, alias or object that it planted has any effect.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from pydantic import Field

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.inside import CLEAN_GIT, UngradableWorkspace, place_file, private_directory, run_script
from polar.evaluators.tests import TestPlan, run_plan
from polar.evaluators.workspace import (
    GradedWorkspace,
    GradingOptions,
    WorkspaceEvaluator,
    changed_workspace,
    pack,
)
from polar.models.session import Verdict
from polar.runtimes.base import Sandbox, SandboxError

PATCH_BYTES = 4 * 1024 * 1024
PATCH_NAME = "patch.diff"
_NO_GIT = 86
_FILES = re.compile(rb"^diff --git a/(.+) b/\1$", re.MULTILINE)


async def extract_patch(
    context: EvaluationContext,
    fresh: Sandbox,
    exclude: Sequence[str],
    limit: int,
    *,
    allow: Sequence[str] = ("*",),
) -> bytes:
    """Return the agent's patch to the paths that `allow` matches, against the workspace of `fresh`."""
    archive = await pack(context)
    mine = private_directory(fresh)
    await place_file(fresh, mine / "workspace.tar", archive)
    pathspecs = (
        *(f":(top){pattern}" for pattern in allow),
        *(f":(exclude,top,glob){pattern}" for pattern in exclude),
    )
    words = (str(mine), str(limit + 1), *pathspecs)
    result = await run_script(fresh, "diff", *words, timeout=context.seconds_left, env=CLEAN_GIT)
    if result.exit_code == _NO_GIT:
        raise EvaluationFailed("the sandbox has no git", hint="use a runtime or an image with git")
    if result.exit_code != 0:
        raise UngradableWorkspace(f"no patch could be made: {result.stderr.text(1000)}")
    try:
        patch = await fresh.download(mine / PATCH_NAME, max_bytes=limit)
    except SandboxError:
        raise UngradableWorkspace(f"the patch is larger than {limit} bytes") from None
    context.keep(PATCH_NAME, patch)
    return patch


async def apply_patch(sandbox: Sandbox, patch: bytes, *, timeout: float) -> str | None:
    """Apply a patch to the workspace; return git's output if it does not apply."""
    if not patch.strip():
        return None
    file = private_directory(sandbox) / PATCH_NAME
    await place_file(sandbox, file, patch if patch.endswith(b"\n") else patch + b"\n")
    result = await run_script(sandbox, "apply", str(file), timeout=timeout, env=CLEAN_GIT)
    return None if result.exit_code == 0 else result.stderr.text(2000)


def touched_files(patch: bytes) -> tuple[str, ...]:
    """Return the paths that a patch adds, changes or removes, as git wrote them."""
    return tuple(dict.fromkeys(match.decode(errors="replace") for match in _FILES.findall(patch)))


class PatchOptions(GradingOptions):
    """Options of evaluators that take the agent's work as a patch."""

    exclude: tuple[str, ...] = ()
    """Paths (git glob patterns such as `tests/**`) whose changes are left out of the patch."""
    max_patch_bytes: int = Field(default=PATCH_BYTES, ge=1, le=64 * 1024 * 1024)
    """Maximum size of the patch; a longer one gets the lowest reward."""


class DiffEvaluator(WorkspaceEvaluator):
    class Options(TestPlan, PatchOptions):
        pass

    options: Options

    async def grade(self, context: EvaluationContext) -> Verdict:
        plan = self.options
        return await grade_patch(
            context, plan, plan.exclude, plan.guards, lambda patched: run_plan(plan, context, patched)
        )


async def grade_patch(
    context: EvaluationContext,
    options: PatchOptions,
    exclude: Sequence[str],
    guarded: Sequence[str],
    test: Callable[[GradedWorkspace], Awaitable[Verdict]],
) -> Verdict:
    """Run `test` in a fresh sandbox with the agent's patch, without anything that would steer the grading."""
    async with context.fresh_sandbox() as fresh:
        patch = await extract_patch(context, fresh, exclude, options.max_patch_bytes, allow=options.allow)

        async def apply() -> None:
            problem = await apply_patch(fresh, patch, timeout=context.seconds_left)
            if problem:
                raise UngradableWorkspace(f"the patch does not apply: {problem}")

        verdict = await test(await changed_workspace(context, fresh, options, guarded, apply))
    size = {"patch_bytes": float(len(patch)), "patch_files": float(len(touched_files(patch)))}
    return verdict.model_copy(update={"components": {**verdict.components, **size}})
