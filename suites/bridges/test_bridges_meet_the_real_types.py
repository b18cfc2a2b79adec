"""The types that bridges were tested with are the trainers' own, and the real ones take what they give."""

from __future__ import annotations

import ast
import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from polar.bridges.sessions import ScoredSession, scored
from tests.fakes import trainer_types
from tests.fakes.scripted_rollouts import sample, turns
from tests.fakes.tiny_llama import write_tiny_llama

FILLER = 0


@pytest.fixture
def session() -> ScoredSession:
    made = sample(turns((1, 2, 3), [[10, 11], [13]]), 1.0)
    return scored(made.result, made.recording, 1.0)


@pytest.fixture
def failed(session: ScoredSession) -> ScoredSession:
    return replace(session, traces=())


def test_verl_takes_what_the_bridge_gives(
    trainers: Path, session: ScoredSession, failed: ScoredSession
) -> None:
    bridge = importlib.import_module("polar.bridges.verl")
    real = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    assert issubclass(bridge.PolarAgentLoop, real.AgentLoopBase)
    assert not bridge.PolarAgentLoop.__abstractmethods__
    made = bridge.output(session, FILLER)
    assert isinstance(made, real.AgentLoopOutput)
    assert (made.prompt_ids, made.response_ids) == ([1, 2, 3], [10, 11, 7, 8, 13])
    assert made.response_mask == [1, 1, 0, 0, 1]
    assert isinstance(bridge.output(failed, FILLER), real.AgentLoopOutput)
    for name in ("AgentLoopOutput", "AgentLoopMetrics"):
        assert fields(getattr(trainer_types, name)) <= fields(getattr(real, name))


def test_verl_makes_the_agent_loop_by_its_own_constructor(trainers: Path, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    bridge = importlib.import_module("polar.bridges.verl")
    wrapped = importlib.import_module("verl.experimental.agent_loop.agent_loop").DictConfigWrap
    rollout = {"prompt_length": 7, "response_length": 9}
    loop = bridge.PolarAgentLoop(
        trainer_config=wrapped(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
        server_manager=None,
        tokenizer=AutoTokenizer.from_pretrained(write_tiny_llama(tmp_path)),
        processor=None,
        dataset_cls=None,
        data_config=wrapped(OmegaConf.create({})),
    )
    limits = loop.rollout_config
    assert (limits.prompt_length, limits.response_length) == (7, 9)
    assert isinstance(loop.tokenizer.eos_token_id, int)


def test_areal_takes_what_the_bridge_gives(
    trainers: Path, session: ScoredSession, failed: ScoredSession
) -> None:
    bridge = importlib.import_module("polar.bridges.areal")
    real = importlib.import_module("areal.api.workflow_api")
    assert isinstance(bridge.PolarWorkflow(), real.RolloutWorkflow)
    made = bridge.episode(session)
    assert made["input_ids"].tolist() == [[1, 2, 3, 10, 11, 7, 8, 13]]
    assert made["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 1]]
    assert bridge.episode(failed) is None


def test_skyrl_declares_the_keys_that_the_bridge_gives(trainers: Path) -> None:
    """Its modules do not import on Python 3.11: the declaration is read instead."""
    output = declared(trainers / "skyrl/train/generators/base.py")["GeneratorOutput"]
    assert isinstance(output, ast.ClassDef)
    keys = {ast.unparse(node.target) for node in output.body if isinstance(node, ast.AnnAssign)}
    assert keys >= trainer_types.GENERATOR_OUTPUT


@pytest.mark.parametrize("step_wise", [True, False])
def test_skyrl_holds_what_the_bridge_gives_for_valid(
    trainers: Path, session: ScoredSession, failed: ScoredSession, step_wise: bool
) -> None:
    """By its own checks, taken out of the module that they stand in."""
    functions = declared(trainers / "skyrl/train/utils/trainer_utils.py")
    names = ("validate_generator_output", "_validate_step_wise_fields")
    program = ast.unparse(ast.Module([functions[name] for name in names], []))
    found: dict[str, Any] = {"np": np, "logger": logging.getLogger("skyrl"), "GeneratorOutput": dict}
    exec(program, found)
    several = replace(session, traces=session.traces * 3)
    sessions = [several, failed, session]
    ids = [trainer_types.TrajectoryID("task", number) for number in range(len(sessions))]
    made = trainer_types.bridge("skyrl").output(sessions, ids, FILLER, step_wise=step_wise)
    found["validate_generator_output"](len(sessions), made, step_wise=step_wise)
    made["loss_masks"][0] = made["loss_masks"][0][1:]
    with pytest.raises(AssertionError, match="same length"):
        found["validate_generator_output"](len(sessions), made, step_wise=step_wise)


def declared(file: Path) -> dict[str, ast.stmt]:
    return {
        node.name: node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


def fields(model: Any) -> set[str]:
    return set(model.model_fields)
