"""Scores a session, and tells an agent that keeps its work from being evaluated from an evaluator that fails.

An agent that has nothing to gain may fill its disk or lock its files. It must not escape its verdict by that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from polar.evaluators.base import UNGRADABLE, EvaluationContext, Evaluator, NoVerdict, RewardTooLow
from polar.models.session import Verdict
from polar.node.failures import BudgetExceeded, is_outage

log = logging.getLogger(__name__)

_ERROR_SHOWN = 2_000


async def evaluate(evaluator: Evaluator, context: EvaluationContext) -> Verdict:
    """The verdict. Where none comes for the agent's work, although one comes where no agent has been, that is
    the agent's doing, and it gets the lowest reward: at once if its grader ran and stated none, else if
    another try fails too."""
    try:
        return await _evaluate_once(evaluator, context)
    except Exception as error:
        if _is_not_the_agents(error) or not await _works_without_agent(evaluator, context):
            raise
        if isinstance(error, NoVerdict):
            return _ungradable(evaluator, error)
        log.warning("an evaluation failed, and does not where no agent has been: trying again (%r)", error)
    try:
        return await _evaluate_once(evaluator, context)
    except Exception as error:
        if _is_not_the_agents(error):
            raise
        return _ungradable(evaluator, error)


@asynccontextmanager
async def budget(seconds: float, name: str) -> AsyncIterator[None]:
    """A deadline whose end is an error that names the budget."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BudgetExceeded(f"budgets.{name} ({seconds:g} s) is used up") from None


async def _evaluate_once(evaluator: Evaluator, context: EvaluationContext) -> Verdict:
    async with budget(context.timeout, "evaluate_seconds"):
        return await evaluator.score(replace(context, started=time.monotonic()))


async def _works_without_agent(evaluator: Evaluator, context: EvaluationContext) -> bool:
    """Whether a workspace that no agent has touched comes to a verdict."""
    try:
        async with context.fresh_sandbox() as untouched:
            await _evaluate_once(evaluator, context.with_sandbox(untouched))
    except Exception as error:
        if is_outage(error):
            raise
        return False
    return True


def _is_not_the_agents(error: Exception) -> bool:
    return is_outage(error) or isinstance(error, RewardTooLow)


def _ungradable(evaluator: Evaluator, error: Exception) -> Verdict:
    told = f"the agent left what cannot be evaluated: {str(error) or repr(error)}"
    return Verdict(reward=evaluator.lowest_reward, components={UNGRADABLE: 1.0}, report=told[:_ERROR_SHOWN])
