"""Where the agent's work is graded, which part of it gets there, and how tampering is handled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from pydantic import Field

from polar.evaluators.base import EvaluationContext, EvaluationFailed, Evaluator
from polar.evaluators.inside import (
    SHARE_OF_TIME,
    UngradableWorkspace,
    place_file,
    private_directory,
    report_of,
    run_script,
    truncate,
)
from polar.evaluators.tampering import (
    INSTALLED,
    Inventory,
    Tampered,
    TamperingFound,
    TamperPolicy,
    compare,
    take_inventory,
    tampering_remarks,
    undo,
)
from polar.models.session import Verdict
from polar.runtimes.base import ExecResult, Sandbox, SandboxError

EVERYTHING = ("*",)


class Place(StrEnum):
    """Where an evaluator's commands run."""

    FRESH = "fresh"
    """A sandbox in the state the agent found its own in, to which only its work is copied."""
    LIVE = "live"
    """The agent's own sandbox, with everything it left there."""


class GradingOptions(Evaluator.Options):
    """Options of every evaluator that runs something over the agent's work."""

    allow: tuple[str, ...] = Field(default=EVERYTHING, min_length=1)
    """Patterns (`*` also matches `/`) of files that the agent may change; in a fresh sandbox all others
    keep the task's content. A file that steers test runners must be allowed by a pattern that ends in
    its name."""
    protect: tuple[str, ...] = ()
    """Patterns of files that the agent must not have changed, such as `tests/*`."""
    tampering: TamperPolicy = TamperPolicy.NEUTRALISE
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for the command, such as `PYTEST_PLUGINS: pytest_asyncio.plugin`."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Time limit, after which the reward is the lowest; most of `budgets.evaluate_seconds` if unset."""

    def limit(self, context: EvaluationContext) -> float:
        """Return the seconds that the command may take from now."""
        return min(self.timeout_seconds or context.timeout, SHARE_OF_TIME * context.seconds_left)


class SandboxOptions(GradingOptions):
    sandbox: Place = Place.FRESH


@dataclass(frozen=True, slots=True)
class GradedWorkspace:
    sandbox: Sandbox
    findings: tuple[TamperingFound, ...]

    def explain(self, verdict: Verdict, result: ExecResult) -> Verdict:
        """Add to a verdict what a person wants to know first; `result` is how the grader ended."""
        remarks = (verdict.report, *tampering_remarks(self.findings), report_of(result))
        return Verdict(
            reward=verdict.reward,
            components={**verdict.components, "tampering": float(len(self.findings))},
            report=truncate("\n".join(filter(None, remarks))),
        )


class WorkspaceEvaluator(Evaluator):
    """Grades the agent's work in a sandbox. Ungradable work gets the lowest reward."""

    options: GradingOptions

    @property
    def wants_fresh_sandbox(self) -> bool:
        """False for a live sandbox, which needs a fresh one only briefly, for comparison."""
        return not isinstance(self.options, SandboxOptions) or self.options.sandbox is Place.FRESH

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        try:
            return await self.grade(context)
        except UngradableWorkspace as error:
            findings = error.findings if isinstance(error, Tampered) else ()
            return Verdict(
                reward=self.lowest_reward,
                components={"tampering": float(len(findings))},
                report=truncate("\n".join([error.message, *tampering_remarks(findings)])),
            )

    @abstractmethod
    async def grade(self, context: EvaluationContext) -> Verdict:
        """Score the agent's work, or raise UngradableWorkspace."""


@asynccontextmanager
async def graded_workspace(
    context: EvaluationContext, options: SandboxOptions, guarded: Sequence[str] = ()
) -> AsyncIterator[GradedWorkspace]:
    """Yield the agent's work in the chosen sandbox; `guarded` patterns are protected as well."""
    if options.sandbox is Place.LIVE:
        protect = (*options.protect, *guarded)
        async with context.fresh_sandbox() as fresh:
            before = await take_inventory(fresh, protect, timeout=context.seconds_left)
        after = await take_inventory(context.sandbox, protect, timeout=context.seconds_left)
        yield await _handle_tampering(context, context.sandbox, options, before, after)
        return
    archive = await pack(context)
    async with context.fresh_sandbox() as fresh:

        async def carry() -> None:
            await replace_workspace(fresh, archive, options.allow, timeout=context.seconds_left)

        yield await changed_workspace(context, fresh, options, guarded, carry)


async def changed_workspace(
    context: EvaluationContext,
    fresh: Sandbox,
    options: GradingOptions,
    guarded: Sequence[str],
    change: Callable[[], Awaitable[None]],
) -> GradedWorkspace:
    """Bring the agent's work into a fresh sandbox with `change`, removing what would steer the grading."""
    protect = (*options.protect, *guarded)
    before = await take_inventory(fresh, protect, timeout=context.seconds_left)
    await change()
    after = await take_inventory(fresh, protect, timeout=context.seconds_left)
    return await _handle_tampering(context, fresh, options, before, after)


async def _handle_tampering(
    context: EvaluationContext, sandbox: Sandbox, options: GradingOptions, before: Inventory, after: Inventory
) -> GradedWorkspace:
    findings = compare(before, after, options.allow)
    if findings and options.tampering is TamperPolicy.ZERO:
        raise Tampered(findings)
    undone = findings if options.tampering is TamperPolicy.NEUTRALISE else ()
    await undo(sandbox, undone, before, timeout=context.seconds_left)
    return GradedWorkspace(sandbox, findings)


ARCHIVE_BYTES = 256 * 1024 * 1024
"""Maximum size of a workspace that is copied to another sandbox."""


async def pack(context: EvaluationContext) -> bytes:
    directory = private_directory(context.sandbox)
    arguments = (str(directory), str(ARCHIVE_BYTES + 1))
    await run_script(context.sandbox, "pack", *arguments, timeout=context.seconds_left, must_succeed=True)
    try:
        return await context.sandbox.download(directory / "workspace.tar", max_bytes=ARCHIVE_BYTES)
    except SandboxError as error:
        raise EvaluationFailed(
            f"the workspace cannot be copied: {error}",
            hint="set `sandbox: live` to grade it in the agent's sandbox",
        ) from error


async def replace_workspace(
    sandbox: Sandbox, archive: bytes, allow: Sequence[str], *, timeout: float
) -> None:
    """Replace a sandbox's workspace with an archive, as far as `allow` permits, keeping installed files."""
    mine = private_directory(sandbox)
    await place_file(sandbox, mine / "workspace.tar", archive)
    if "*" in allow:
        named = {part for pattern in allow for part in PurePosixPath(pattern).parts}
        what, tests = "everything", [("-name", name) for name in INSTALLED if name not in named]
    else:
        what, tests = "some", [("-path", f"./{pattern.removeprefix('./')}") for pattern in allow]
    words = [word for test in tests for word in ("-o", *test)][1:]
    result = await run_script(sandbox, "carry", str(mine), what, *words, timeout=timeout)
    if result.exit_code != 0:
        raise UngradableWorkspace(f"the workspace cannot be unpacked: {result.stderr.text(500)}")
