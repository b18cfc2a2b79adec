"""Several evaluators as one: the weighted sum of their rewards."""

from __future__ import annotations

from pydantic import Field, field_validator

from polar.config import plugins
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.evaluators.inside import cut
from polar.models.component import Component
from polar.models.session import Verdict


class Part(Component):
    """One evaluator of a sum."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What its reward is multiplied with; negative for a penalty."""
    label: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """What its component is called; None: its name."""
    gate: bool = False
    """If its reward is 0 or less, the sum is 0 and what comes after it is not asked."""

    @property
    def shown(self) -> str:
        return self.label or self.name


class WeightedEvaluator(Evaluator):
    """Asks its parts in order. A part that fails fails the whole: half a reward is a wrong one."""

    class Options(Evaluator.Options):
        evaluators: tuple[Part, ...] = Field(min_length=1, max_length=32)

        @field_validator("evaluators")
        @classmethod
        def _known(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
            labels = [part.shown for part in parts]
            for index, part in enumerate(parts):
                if labels.index(part.shown) != index:
                    raise ValueError(f"{index}.label: {part.shown!r} is taken; give each part its own label")
                # Raises InvalidInput, which names the field within the part and passes pydantic by.
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
        """What the parts can come to: those that are penalties to 1, all others to their lowest."""
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
            components[part.shown] = verdict.reward
            components |= {f"{part.shown}.{name}": value for name, value in verdict.components.items()}
            reports.append(f"{part.shown}: {verdict.reward:g} × {part.weight:g}\n{verdict.report}")
            if part.gate and verdict.reward <= 0:
                closed = True
                reports.append(f"{part.shown} is a gate and closed: what comes after it was not asked")
                break
        return Verdict(
            reward=0.0 if closed else total, components=components, report=cut("\n\n".join(reports))
        )
