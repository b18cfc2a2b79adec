"""Metrics say of which tokens trainer and engine disagree: how old they are, and where they stand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polar.training.learner import Learner
from polar.training.material import PolicyVersions, material
from polar.training.objective import policy_loss
from polar.training.policy import load_policy
from polar.training.settings import (
    BatchSettings,
    DivergenceLimits,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
)
from tests.fakes.scripted_rollouts import group

ANSWERS = ([[10, 11, 12], [13]], [[20, 21, 22], [23]])
LONG = tuple(range(1, 200)) * 6


def test_tails_of_the_ratio_and_mismatch_are_those_of_the_tokens_named(tmp_path: Path) -> None:
    from tests.fakes.tiny_llama import write_tiny_llama

    model = write_tiny_llama(tmp_path / "model", max_position_embeddings=2048)
    groups = [
        group(ANSWERS, (1.0, 0.0), task_id="new", version=5, logprob=-5.4),
        group(ANSWERS, (1.0, 0.0), task_id="old", version=3, logprob=-6.0, prompt=LONG),
        group(ANSWERS, (0.0, 1.0), task_id="oldest", version=0, logprob=-5.0, prompt=(4, 5)),
    ]
    objective = ObjectiveSettings(max_staleness=9)
    made = material(groups, objective, BatchSettings(tokens=1220), PolicyVersions(5))
    policy = load_policy(ModelSettings(name=str(model), device="cpu"))
    apart, ages, positions = (
        np.concatenate(found)
        for found in zip(
            *(
                (
                    policy.logprobs(batch).numpy() - batch.terms.logprobs,
                    5 - batch.terms.versions,
                    batch.positions[batch.terms.targets],
                )
                for batch in made.packing.batches
            ),
            strict=True,
        )
    )
    assert len(made.packing.batches) > 1
    loss = partial(policy_loss, settings=objective)
    found = Learner(policy, loss, OptimizerSettings(), DivergenceLimits(), steps=1).learn(made)

    for name, of_age in {"0": ages == 0, "2": ages == 2, "3": ages == 5}.items():
        ratio = np.exp(apart[of_age])
        for tail, is_there in {
            "under-0.5": ratio < 0.5,
            "under-0.8": ratio < 0.8,
            "over-1.25": ratio > 1.25,
            "over-2": ratio > 2,
        }.items():
            assert found[f"importance/age-{name}/{tail}"] == pytest.approx(is_there.mean())
    assert 0 < found["importance/age-2/over-1.25"] < 1
    for start, of_range in {0: positions < 1024, 1024: positions >= 1024}.items():
        assert found[f"mismatch/position-{start}"] == pytest.approx(np.abs(apart[of_range]).mean(), rel=1e-4)
    # Nothing is said of tokens that there are none of.
    assert {name for name in found if name.startswith("mismatch/")} == {
        "mismatch/position-0",
        "mismatch/position-1024",
    }
    assert not [name for name in found if name.startswith("importance/age-1")]
