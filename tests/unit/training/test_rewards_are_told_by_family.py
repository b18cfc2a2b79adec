"""Where tasks name a family, metrics have a mean reward for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from polar.training.material import PolicyVersions
from polar.training.rollouts import RolloutSource
from polar.training.settings import GrpoSettings
from tests.fakes.rollout_client import RolloutClient
from tests.systems import shell_task


def test_each_family_has_its_mean_reward() -> None:
    families = ("edit", "edit", "search", None, 7)
    tasks = [
        shell_task(f"t{number}", "true", metadata={"family": family, "level": number})
        for number, family in enumerate(families)
    ]
    run = GrpoSettings.model_validate(
        {"out": Path("unused"), "steps": 1, "groups": 5, "rollouts": {"tasks": ["unused"], "samples": 2}}
    )
    assert run.rollouts is not None
    client = RolloutClient()
    # Sessions of all others get 1 and 0.
    client.equal = {"-t1"}
    numbers = (
        RolloutSource(run, run.rollouts, lambda: cast(Any, client), tasks).take(PolicyVersions(0)).numbers
    )
    found = {name: value for name, value in numbers.items() if name.startswith("reward/")}
    assert found == pytest.approx({"reward/edit": 0.75, "reward/search": 0.5})
