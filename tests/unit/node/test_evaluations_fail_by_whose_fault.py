"""An evaluation that fails is the agent's doing only where it fails again, and not without the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from polar.errors import PolarError
from polar.evaluators.base import UNGRADABLE, EvaluationContext, EvaluationFailed, Evaluator, NoVerdict
from polar.models.session import FailureReason, TrajectoryStats, Verdict
from polar.node.evaluation import evaluate
from polar.node.failures import BudgetExceeded, reason_for
from polar.runtimes.base import Sandbox, SandboxUnavailable
from tests.fakes.control_plane import idle_task

Outcome = float | Exception | None
"""A reward, an error, or None: it never ends."""

AGENTS = cast(Sandbox, "the agent's")
UNTOUCHED = cast(Sandbox, "untouched")


class Planned(Evaluator):
    """Comes to what is planned for a sandbox, one after the other; the last of it again and again."""

    def __init__(self, agents: Sequence[Outcome], untouched: Outcome, lowest: float) -> None:
        super().__init__(Evaluator.Options(lowest_reward=lowest))
        self._agents, self._untouched = list(agents), untouched

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        outcome = self._untouched
        if context.sandbox is AGENTS:
            outcome = self._agents.pop(0) if len(self._agents) > 1 else self._agents[0]
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return Verdict(reward=cast(float, outcome))


@asynccontextmanager
async def untouched() -> AsyncIterator[Sandbox]:
    yield UNTOUCHED


async def verdict(
    *agents: Outcome, untouched_gives: Outcome = 0.5, timeout: float = 600.0, lowest: float = 0.0
) -> Verdict:
    context = EvaluationContext(idle_task(), AGENTS, TrajectoryStats(), timeout, sandbox_maker=untouched)
    return await evaluate(Planned(agents, untouched_gives, lowest), context)


def lost() -> Exception:
    error = EvaluationFailed("could not be run")
    error.__cause__ = SandboxUnavailable("no memory")
    return error


@pytest.mark.parametrize(
    "error", [EvaluationFailed("locked"), ValueError("no JSON"), OSError(36, "too long")]
)
async def test_what_fails_only_over_the_agent_s_work_is_worth_nothing(error: Exception) -> None:
    scored = await verdict(error)
    assert (scored.reward, scored.components) == (0.0, {UNGRADABLE: 1.0})
    assert str(error) in scored.report


async def test_an_evaluation_that_the_agent_makes_endless_is_worth_nothing() -> None:
    assert (await verdict(None, timeout=0.01)).reward == 0.0


@pytest.mark.parametrize("of_nothing", [EvaluationFailed("broken"), KeyError("x")])
async def test_what_fails_without_the_agent_too_is_the_task_s(of_nothing: Exception) -> None:
    with pytest.raises(EvaluationFailed, match="the first"):
        await verdict(EvaluationFailed("the first"), untouched_gives=of_nothing)


async def test_what_takes_too_long_without_the_agent_too_is_the_task_s() -> None:
    with pytest.raises(BudgetExceeded, match="evaluate_seconds"):
        await verdict(None, untouched_gives=None, timeout=0.01)


@pytest.mark.parametrize("silence", [EvaluationFailed("locked"), NoVerdict("nothing stated"), None])
async def test_an_agent_that_faces_a_penalty_gains_nothing_by_silencing_its_grader(silence: Outcome) -> None:
    assert (await verdict(-1.0, lowest=-1.0)).reward == -1.0
    assert (await verdict(silence, timeout=0.01, lowest=-1.0)).reward == -1.0


async def test_a_reward_that_silence_would_beat_is_refused_as_the_task_s() -> None:
    with pytest.raises(
        PolarError, match=r"gave -1, which is below its lowest_reward of 0 \(set lowest_reward"
    ) as failed:
        await verdict(-1.0)
    assert reason_for(failed.value) is FailureReason.TASK


async def test_what_fails_once_costs_no_reward() -> None:
    assert (await verdict(OSError(24, "Too many open files"), 1.0)).reward == 1.0


async def test_what_is_graded_cannot_wait_for_a_verdict_that_it_likes() -> None:
    scored = await verdict(NoVerdict("the place of the reward was locked"), 1.0)
    assert (scored.reward, scored.components) == (0.0, {UNGRADABLE: 1.0})
    with pytest.raises(NoVerdict):
        await verdict(NoVerdict("nothing stated"), untouched_gives=NoVerdict("nothing stated"))


@pytest.mark.parametrize("plan", [lambda: (lost(),), lambda: (EvaluationFailed("x"), lost())])
async def test_an_outage_is_nobody_s_fault(plan: Callable[[], tuple[Outcome, ...]]) -> None:
    with pytest.raises(PolarError) as failed:
        await verdict(*plan())
    assert reason_for(failed.value) is FailureReason.INFRASTRUCTURE


async def test_an_outage_without_the_agent_is_nobody_s_fault() -> None:
    with pytest.raises(PolarError) as failed:
        await verdict(EvaluationFailed("x"), untouched_gives=lost())
    assert reason_for(failed.value) is FailureReason.INFRASTRUCTURE
