"""Several evaluators combined into one: the weighted sum of their rewards."""

from __future__ import annotations

from pydantic import Field, field_validator

from polar.config import plugins
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.evaluators.inside import truncate
from polar.models.component import Component
from polar.models.session import Verdict


class WeightedPart(Component):
    """One evaluator of the sum."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its reward; negative for a penalty."""
    label: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """The name of its component; the evaluator's name if unset."""
    gate: bool = False
    """If its reward is 0 or less, the sum is 0 and later evaluators are not run."""

    @property
    def component_name(self) -> str:
        return self.label or self.name


class WeightedEvaluator(Evaluator):
    """Runs its parts in order. If one fails, the whole evaluation fails: half a reward is a wrong one."""

    class Options(Evaluator.Options):
        evaluators: tuple[WeightedPart, ...] = Field(min_length=1, max_length=32)

        @field_validator("evaluators")
        @classmethod
        def _check_parts(cls, parts: tuple[WeightedPart, ...]) -> tuple[WeightedPart, ...]:
            labels = [part.component_name for part in parts]
            for index, part in enumerate(parts):
                if labels.index(part.component_name) != index:
                    raise ValueError(
                        f"{index}.label: {part.component_name!r} is already used; choose another"
                    )
                # Raises InvalidInput, which names the field within the part and is not caught by pydantic.
                plugins.options("evaluators", f"evaluator.options.evaluators.{index}", part)
            return parts

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._parts: list[Evaluator] = [
            plugins.create("evaluators", f"evaluator.options.evaluators.{index}", part)
            for index, part in enumerate(options.evaluators)
        ]

    @property
    def wants_fresh_sandbox(self) -> bool:
        return any(part.wants_fresh_sandbox for part in self._parts)

    @property
    def lowest_reward(self) -> float:
        """The lowest possible sum: penalties at 1, all other parts at their lowest."""
        parts = zip(self.options.evaluators, self._parts, strict=True)
        total = sum(part.weight * (1.0 if part.weight < 0 else one.lowest_reward) for part, one in parts)
        return min(total, super().lowest_reward)

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        total, closed = 0.0, False
        components: dict[str, float] = {}
        reports = []
        for part, evaluator in zip(self.options.evaluators, self._parts, strict=True):
            verdict = await evaluator.score(context)
            total += part.weight * verdict.reward
            components[part.component_name] = verdict.reward
            components |= {
                f"{part.component_name}.{name}": value for name, value in verdict.components.items()
            }
            reports.append(f"{part.component_name}: {verdict.reward:g} × {part.weight:g}\n{verdict.report}")
            if part.gate and verdict.reward <= 0:
                closed = True
                reports.append(f"{part.component_name} is a closed gate: later evaluators were not run")
                break
        return Verdict(
            reward=0.0 if closed else total, components=components, report=truncate("\n\n".join(reports))
        )
