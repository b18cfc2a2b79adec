"""A plain Python function as an evaluator, for packages that have nothing more to say than a score."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.session import Verdict


class NoOptions(BaseModel):
    model_config = {"extra": "forbid", "frozen": True}


def evaluator(
    function: Callable[[EvaluationContext, Any], Awaitable[float | Verdict]],
    options: type[BaseModel] = NoOptions,
) -> type[Evaluator]:
    """The evaluator class that calls `function(context, options)`; name it in the entry point."""

    class FunctionEvaluator(Evaluator):
        __doc__ = function.__doc__
        Options = options  # type: ignore[assignment]

        async def evaluate(self, context: EvaluationContext) -> Verdict:
            score = await function(context, self.options)
            return score if isinstance(score, Verdict) else Verdict(reward=score)

    FunctionEvaluator.__name__ = getattr(function, "__name__", "FunctionEvaluator")
    return FunctionEvaluator
