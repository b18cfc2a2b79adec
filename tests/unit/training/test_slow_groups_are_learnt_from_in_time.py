"""However unlike the durations of sessions are, none outlives the staleness that its tokens may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from polar.training.material import PolicyVersions
from polar.training.rollouts import RolloutSource
from polar.training.settings import GrpoSettings
from polar.trajectory.learnable import Excluded
from tests.fakes.simulated_server import TOKENS, SimulatedServer
from tests.systems import shell_task


@pytest.mark.parametrize("places", [8, 40])
@pytest.mark.parametrize("spread", [0.5, 1.5])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_token_is_lost_to_its_age(places: int, spread: float, max_staleness: int) -> None:
    settings = GrpoSettings.model_validate(
        {
            "out": Path("unused"),
            "steps": 12,
            "groups": 4,
            "rollouts": {"tasks": ["unused"], "samples": 4},
            "objective": {"max_staleness": max_staleness},
        }
    )
    assert settings.rollouts is not None
    server = SimulatedServer(places, spread, seed=0)
    tasks = [shell_task(f"t{number}", "true") for number in range(7)]
    rollouts = RolloutSource(settings, settings.rollouts, lambda: cast(Any, server), tasks)
    lost = trained = 0
    for step in range(settings.steps):
        made = rollouts.take(PolicyVersions(step))
        lost += made.excluded[Excluded.TOKENS_STALE]
        trained += sum(len(batch.terms) for batch in made.packing.batches)
        server.train()
    assert (lost, trained) == (0, settings.steps * 4 * 4 * TOKENS)
