"""SkyRL's own checks pass what the bridge gives, and its own trainer computes the advantages of sessions."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polar.bridges.sessions import ScoredSession
from tests.fakes import trainer_types

FILLER = 0


@pytest.fixture
def bridge(trainers: Path) -> Any:
    return importlib.import_module("polar.bridges.skyrl")


@pytest.fixture
def ids(trainers: Path) -> list[Any]:
    base = importlib.import_module("skyrl.train.generators.base")
    return [base.TrajectoryID("task", number) for number in range(4)]


def test_the_generator_is_one_and_gives_the_declared_keys(bridge: Any) -> None:
    base = importlib.import_module("skyrl.train.generators.base")
    assert issubclass(bridge.PolarGenerator, base.GeneratorInterface)
    assert not bridge.PolarGenerator.__abstractmethods__
    assert set(base.GeneratorOutput.__annotations__) >= trainer_types.GENERATOR_OUTPUT


@pytest.mark.parametrize("step_wise", [True, False])
def test_skyrl_holds_any_group_for_valid(
    bridge: Any, ids: list[Any], group: list[ScoredSession], step_wise: bool
) -> None:
    validate = importlib.import_module("skyrl.train.utils.trainer_utils").validate_generator_output
    made = bridge.output(group, ids, FILLER, step_wise=step_wise)
    validate(len(group), made, step_wise=step_wise)
    made["loss_masks"][0] = made["loss_masks"][0][1:]
    with pytest.raises(AssertionError, match="same length"):
        validate(len(group), made, step_wise=step_wise)


def trained(output: Any, *, step_wise: bool) -> list[list[float]]:
    """The advantages of each row's trained tokens, by SkyRL's trainer."""
    trainer_class = importlib.import_module("skyrl.train.trainer").RayPPOTrainer
    settings = importlib.import_module("skyrl.train.config").SkyRLTrainConfig
    trainer = object.__new__(trainer_class)
    trainer.cfg = settings.from_cli_overrides(
        {
            "generator.step_wise_trajectories": step_wise,
            "generator.n_samples_per_prompt": 4,
            "trainer.train_batch_size": 1,
            "trainer.policy_mini_batch_size": 1,
        }
    )
    trainer.tokenizer = SimpleNamespace(pad_token_id=FILLER)
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    trainer.all_metrics = {}
    uids = [id.instance_id for id in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    batch["values"] = None
    batch = trainer.compute_advantages_and_returns(batch)
    return [
        row[mask.bool()].tolist() for row, mask in zip(batch["advantages"], batch["loss_mask"], strict=True)
    ]


def test_steps_have_the_advantage_of_their_session(
    bridge: Any, ids: list[Any], group: list[ScoredSession]
) -> None:
    """Of rewards 1, 0 (two traces), none (failed) and 0: the mean is that of the three that were scored."""
    rows = trained(bridge.output(group, ids, FILLER, step_wise=True), step_wise=True)
    scale = (2 / 3 / 3) ** 0.5
    high, low = 2 / 3 / scale, -1 / 3 / scale
    assert rows == [
        pytest.approx([high] * 3, abs=1e-4),
        pytest.approx([low] * 2, abs=1e-4),
        pytest.approx([low] * 2, abs=1e-4),
        [],
        [],
    ]


def test_one_sequence_a_session_has_its_advantage(
    bridge: Any, ids: list[Any], group: list[ScoredSession]
) -> None:
    rows = trained(bridge.output(group, ids, FILLER, step_wise=False), step_wise=False)
    assert [len(row) for row in rows] == [3, 2, 0, 0]
    assert rows[0][0] == pytest.approx(-2 * rows[1][0])
