"""The arguments that pages and examples give to trainers are ones that these trainers take."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from polar.errors import InvalidInput

ROOT = Path(__file__).parents[2]
ARGUMENT = re.compile(r"[a-z][\w.]*\.\w+=.+")


def arguments(path: str, command: str) -> list[str]:
    """The `section.name=value` arguments of the command in a page or a script."""
    text = (ROOT / path).read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith(command))
    found = [word for word in shlex.split(line) if ARGUMENT.fullmatch(word)]
    assert found
    return found


def test_skyrl(trainers: Path) -> None:
    given = arguments("docs/bridges/skyrl.md", "python examples/bridges/skyrl/main.py")
    settings = importlib.import_module("skyrl.train.config").SkyRLTrainConfig
    found = settings.from_cli_overrides(given)
    assert found.generator.step_wise_trajectories
    assert found.data.train_data == ["rows.parquet"]


def test_areal(trainers: Path) -> None:
    from omegaconf import OmegaConf

    bridge = importlib.import_module("polar.bridges.areal")
    config = importlib.import_module("areal.api.cli_args").GRPOConfig
    base = OmegaConf.structured(config)
    norm = {"actor": {"reward_norm": {"mean_level": "group"}, "adv_norm": None}}
    given = OmegaConf.from_dotlist(
        arguments("docs/bridges/areal.md", "python examples/bridges/areal/train.py")
    )
    with pytest.raises(InvalidInput, match="reward_norm"):
        bridge.workflow(OmegaConf.merge(base, norm), samples=2)
    made = bridge.workflow(OmegaConf.merge(base, norm, given), samples=2)
    assert isinstance(made, bridge.PolarWorkflow)


def test_verl(trainers: Path) -> None:
    hydra = importlib.import_module("hydra")
    given = arguments("examples/bridges/verl/train.sh", "exec python -m verl.trainer.main_ppo")
    with hydra.initialize_config_dir(str(trainers / "verl" / "trainer" / "config"), version_base=None):
        found = hydra.compose("ppo_trainer", overrides=[one.replace("$", "\\$") for one in given])
    assert found.actor_rollout_ref.rollout.agent.default_agent_loop == "polar"
    assert found.actor_rollout_ref.rollout.n == 16
