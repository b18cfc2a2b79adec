"""verl's own classes take what the bridge gives, and its own code compares the sessions of a group."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from polar.bridges.sessions import ScoredSession
from tests.fakes import trainer_types
from tests.fakes.routing import CHOSEN, LAYERS, routing_of
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.tiny_moe import SMALL, write_tiny_moe

FILLER = 0


@pytest.fixture
def bridge(trainers: Path) -> Any:
    return importlib.import_module("polar.bridges.verl")


@pytest.fixture
def verl(trainers: Path) -> Any:
    return importlib.import_module("verl.experimental.agent_loop.agent_loop")


def test_every_session_of_a_group_is_an_output(bridge: Any, verl: Any, group: list[ScoredSession]) -> None:
    made = [bridge.output(one, FILLER) for one in group]
    assert all(isinstance(one, verl.AgentLoopOutput) for one in made)
    assert (made[0].prompt_ids, made[0].response_ids) == ([1, 2, 3], [10, 11, 7, 8, 13])
    assert [one.response_mask for one in made] == [[1, 1, 0, 0, 1], [1, 1], [0], [0]]
    assert [one.reward_score for one in made] == [1.0, 0.0, 0.0, 0.0]
    assert [one.extra_fields["polar_excluded"] for one in made] == [
        {},
        {"tokens_beyond_one_trace": 2},
        {"sessions_failed": 1},
        {"sessions_untrainable": 1},
    ]


def test_a_session_is_one_row_of_its_group(bridge: Any, verl: Any, group: list[ScoredSession]) -> None:
    """A second trace shifts nothing; a session that failed counts as 0, for verl knows no missing reward."""
    rows = [bridge.output(one, FILLER) for one in group]
    mask, rewards = torch.zeros(4, 5), torch.zeros(4, 5)
    for place, one in enumerate(rows):
        mask[place, : len(one.response_mask)] = torch.tensor(one.response_mask, dtype=torch.float32)
        rewards[place, len(one.response_mask) - 1] = one.reward_score
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    found, _ = algorithms.compute_grpo_outcome_advantage(rewards, mask, np.array(["task"] * 4))
    assert found[0].tolist() == pytest.approx([1.5, 1.5, 0, 0, 1.5], abs=1e-4)
    assert found[1].tolist() == pytest.approx([-0.5, -0.5, 0, 0, 0], abs=1e-4)
    assert found[2:].tolist() == [[0.0] * 5] * 2


def test_experts_stand_where_verl_replays_them(
    bridge: Any, verl: Any, with_routing: ScoredSession, group: list[ScoredSession]
) -> None:
    """Of every token but the last, which verl leaves to its own router; also of a row that is not trained."""
    sessions = (with_routing, group[2])
    told, filling = [bridge.output(one, FILLER, (LAYERS, CHOSEN)).as_dict() for one in sessions]
    ids = [*told["prompts"].tolist(), *told["responses"].tolist()]
    assert told["routed_experts"].dtype == torch.int16
    assert told["routed_experts"].tolist() == [*routing_of(ids).tolist(), [[0] * CHOSEN] * LAYERS]
    assert filling["routed_experts"].shape == (2, LAYERS, CHOSEN)


def test_the_model_says_how_many_layers_and_experts_it_has(bridge: Any, tmp_path: Path) -> None:
    write_tiny_moe(tmp_path)
    expected = (SMALL["num_hidden_layers"], SMALL["num_experts_per_tok"])
    assert bridge.layers_and_experts(str(tmp_path)) == expected


def test_verl_makes_the_agent_loop_by_its_own_constructor(bridge: Any, verl: Any, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    assert issubclass(bridge.PolarAgentLoop, verl.AgentLoopBase)
    assert not bridge.PolarAgentLoop.__abstractmethods__
    rollout = {"prompt_length": 7, "response_length": 9}
    loop = bridge.PolarAgentLoop(
        trainer_config=verl.DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
        server_manager=None,
        tokenizer=AutoTokenizer.from_pretrained(write_tiny_llama(tmp_path)),
        processor=None,
        dataset_cls=None,
        data_config=verl.DictConfigWrap(OmegaConf.create({})),
    )
    limits = loop.rollout_config
    assert (limits.prompt_length, limits.response_length) == (7, 9)
    assert isinstance(loop.tokenizer.eos_token_id, int)


def test_the_copies_that_other_tests_use_are_of_these_classes(verl: Any) -> None:
    for name in ("AgentLoopOutput", "AgentLoopMetrics"):
        copy, real = getattr(trainer_types, name), getattr(verl, name)
        assert set(copy.model_fields) <= set(real.model_fields)
