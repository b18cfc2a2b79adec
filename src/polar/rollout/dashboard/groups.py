"""A task's samples as the group that a trainer compares them in."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from polar.models.dashboard import GroupView, SampleView, SessionRow
from polar.models.views import TaskView


def group(task: TaskView, sessions: Sequence[SessionRow]) -> GroupView:
    """The samples with their advantages, as GRPO has them: in standard deviations from the mean."""
    rewards = [one.reward for one in sessions if one.reward is not None]
    mean = fmean(rewards) if rewards else None
    spread = pstdev(rewards) if rewards else None
    spec = task.spec
    return GroupView(
        id=spec.id,
        status=task.status,
        created_at=task.created_at,
        instruction=spec.instruction,
        harness=spec.harness.name,
        runtime=spec.runtime.name,
        evaluator=spec.evaluator.name,
        builder=spec.builder.name,
        priority=spec.priority,
        early_stop=spec.early_stop,
        files=tuple(spec.files),
        mean=mean,
        spread=spread,
        samples=tuple(
            SampleView(
                session=one,
                advantage=(one.reward - mean) / spread
                if one.reward is not None and mean is not None and spread
                else None,
            )
            for one in sessions
        ),
    )
