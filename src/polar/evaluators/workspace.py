"""Where the agent's work is graded, what of it gets there, and what becomes of what steers the grading."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, Field

from polar.evaluators.base import EvaluationContext
from polar.evaluators.environment import SHARE_OF_TIME
from polar.evaluators.snapshot import pack, replace_workspace
from polar.evaluators.tampering import (
    Finding,
    Inventory,
    TamperPolicy,
    inventory_before,
    settle,
    take_inventory,
)
from polar.runtimes.base import Sandbox

EVERYTHING = ("*",)


class Place(StrEnum):
    """Where an evaluator's commands run."""

    FRESH = "fresh"
    """In a sandbox as the agent found its own, into which only its work is carried."""
    LIVE = "live"
    """In the sandbox of the agent, with everything it left there."""


class Guarded(BaseModel):
    """The options of every evaluator that runs something over the agent's work."""

    model_config = {"extra": "forbid", "frozen": True}

    allow: tuple[str, ...] = Field(default=EVERYTHING, min_length=1)
    """Patterns (`*` also stands for `/`) of the files that the agent may change; in a fresh sandbox all
    others stay the task's. One that steers test runners must be named: by a pattern that ends in its name."""
    protect: tuple[str, ...] = ()
    """Patterns of files that the agent must not have changed, e.g. `tests/*`."""
    tampering: TamperPolicy = TamperPolicy.NEUTRALISE
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of what is run, e.g. `PYTEST_PLUGINS: pytest_asyncio.plugin`."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """How long it may take, else the reward is 0; None: nearly all of `budgets.evaluate_seconds`."""

    def limit(self, context: EvaluationContext) -> float:
        """Seconds that what is run may take from now on."""
        return min(self.timeout_seconds or context.timeout, SHARE_OF_TIME * context.seconds_left)


class Placed(Guarded):
    sandbox: Place = Place.FRESH


@dataclass(frozen=True, slots=True)
class GradedWorkspace:
    """The agent's work, ready to be graded."""

    sandbox: Sandbox
    findings: tuple[Finding, ...]


@asynccontextmanager
async def graded_workspace(
    context: EvaluationContext, options: Placed, guarded: Sequence[str] = ()
) -> AsyncIterator[GradedWorkspace]:
    """The agent's work where the options want it; `guarded` are patterns that are protected besides."""
    if options.sandbox is Place.LIVE:
        protect = (*options.protect, *guarded)
        after = await take_inventory(context.sandbox, protect, timeout=context.seconds_left)
        before = await inventory_before(context, protect, after)
        yield await _settled(context, context.sandbox, options, before, after)
        return
    archive = await pack(context)
    async with context.fresh_sandbox() as fresh:

        async def carry() -> None:
            await replace_workspace(fresh, archive, options.allow, timeout=context.seconds_left)

        yield await changed_workspace(context, fresh, options, guarded, carry)


async def changed_workspace(
    context: EvaluationContext,
    fresh: Sandbox,
    options: Guarded,
    guarded: Sequence[str],
    change: Callable[[], Awaitable[None]],
) -> GradedWorkspace:
    """A fresh sandbox that `change` brings the agent's work into, without what would steer the grading."""
    protect = (*options.protect, *guarded)
    before = await take_inventory(fresh, protect, timeout=context.seconds_left)
    await change()
    after = await take_inventory(fresh, protect, timeout=context.seconds_left)
    return await _settled(context, fresh, options, before, after)


async def _settled(
    context: EvaluationContext, sandbox: Sandbox, options: Guarded, before: Inventory, after: Inventory
) -> GradedWorkspace:
    findings = await settle(
        sandbox, options.tampering, before, after, allow=options.allow, timeout=context.seconds_left
    )
    return GradedWorkspace(sandbox, findings)
