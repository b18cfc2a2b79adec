"""AReaL's own code computes from the bridge's episodes the advantages that the sessions have."""

from __future__ import annotations

import asyncio
import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar.bridges.sessions import ScoredSession
from polar.errors import InvalidInput
from suites.bridges.conftest import without_its_imports

pytestmark = pytest.mark.usefixtures("trainers")


@pytest.fixture
def bridge(trainers: Path) -> Any:
    return importlib.import_module("polar.bridges.areal")


@pytest.fixture
def actor(trainers: Path) -> Any:
    """AReaL's trainer of policies, as far as it needs no model, set as the bridge asks for it."""
    without_its_imports("areal.trainer")
    without_its_imports("areal.trainer.ppo")
    arguments = importlib.import_module("areal.api.cli_args")
    config = arguments.PPOActorConfig(
        experiment_name="e", trial_name="t", reward_norm=None, adv_norm=None, kl_ctl=0.0
    )
    return importlib.import_module("areal.trainer.ppo.actor").PPOActor(config, engine=None)


def grouped(workflow: Any, samples: int, data: dict[str, Any]) -> Any:
    """An episode as AReaL's rollout engine runs it."""
    made = importlib.import_module("areal.infra.remote_inf_engine").GroupedRolloutWorkflow(
        workflow, samples, logging.getLogger("areal")
    )
    return asyncio.run(made.arun_episode(None, data))


def advantages(actor: Any, batch: list[Any]) -> list[list[list[float]]]:
    """Of each episode, of each row, those of the tokens that are trained."""
    return [
        [
            row[mask.bool()].tolist()
            for row, mask in zip(episode["advantages"], episode["loss_mask"], strict=True)
        ]
        for episode in actor.compute_advantages(batch)
    ]


def test_a_group_has_the_advantages_of_its_sessions_whatever_their_traces(
    bridge: Any, actor: Any, group: list[ScoredSession]
) -> None:
    """Of rewards 1, 0 (two traces), none (failed) and 0 (no trace): the mean is 1/3, of three sessions."""
    high, low = 2**0.5, -(2**-0.5)
    plain = [group[0], replace(group[1], traces=group[1].traces[:1])]
    batch = [bridge.episode(one) for one in (group, plain, [group[2]], group, plain)]
    assert batch[2] is None
    found = advantages(actor, [one for one in batch if one is not None])
    expected = [[high] * 3, [low] * 2, [low] * 2]
    for episode in (found[0], found[2]):
        assert episode == [pytest.approx(row, abs=1e-5) for row in expected]
    for episode in (found[1], found[3]):
        assert episode == [pytest.approx([1.0] * 3, abs=1e-5), pytest.approx([-1.0] * 2, abs=1e-5)]


def test_equal_rewards_are_advantages_of_zero(bridge: Any, actor: Any, group: list[ScoredSession]) -> None:
    ((row, *others),) = advantages(actor, [bridge.episode([group[1], group[3]])])
    assert row == [0.0] * 2
    assert len(others) == 1


def test_a_row_keeps_its_advantage_where_its_last_tokens_are_not_trained(
    bridge: Any, actor: Any, session: ScoredSession, group: list[ScoredSession]
) -> None:
    (trace,) = session.traces
    mask = trace.loss_mask.copy()
    mask[-1] = 0
    cut = replace(session, traces=(replace(trace, loss_mask=mask, logprobs=trace.logprobs * mask),))
    ((first, *_),) = advantages(actor, [bridge.episode([cut, group[1]])])
    assert first == pytest.approx([1.0, 1.0], abs=1e-5)


def test_areal_runs_the_workflow_and_reports_rewards(
    bridge: Any, group: list[ScoredSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def roll_out(client: Any, orders: list[Any], temperature: float) -> list[Any]:
        assert [order.samples for order in orders] == [4]
        return [tuple(group)]

    monkeypatch.setattr(bridge, "roll_out_groups", roll_out)
    monkeypatch.setattr(bridge, "client_of_this_loop", lambda: None)
    task = {"id": "t", "instruction": "go", "harness": "pi", "runtime": "process", "evaluator": "diff"}
    tracker = importlib.import_module("areal.utils.stats_tracker")
    made = grouped(bridge.workflow(config(), samples=4), 1, {"polar_task": task})
    assert made["input_ids"].tolist()[0] == [1, 2, 3, 10, 11, 7, 8, 13]
    assert made["loss_mask"].tolist()[0] == [0, 0, 0, 1, 1, 0, 0, 1]
    assert tracker.get("rollout").export()["rollout/reward"] == pytest.approx(1 / 3)


def config(**actor: Any) -> Any:
    arguments = importlib.import_module("areal.api.cli_args")
    given = {"experiment_name": "e", "trial_name": "t"}
    made = arguments.GRPOConfig(**given)
    made.actor = arguments.PPOActorConfig(**{**given, "reward_norm": None, "adv_norm": None, **actor})
    return made


def test_a_configuration_that_would_normalise_again_is_refused(bridge: Any) -> None:
    norm = importlib.import_module("areal.api.cli_args").NormConfig(
        mean_level="group", std_level="group", group_size=4
    )
    for wrong in ({"reward_norm": norm}, {"adv_norm": norm}, {"reward_bias": -0.5}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            bridge.workflow(config(**wrong), samples=4)
