"""What mini-swe-agent is told, without running it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.base import HarnessContext
from polar.harnesses.mini_swe_agent import MINI, PYTHON, MiniSweAgent
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

STATE = PurePosixPath("/home/agent/.config/mini-swe-agent")


def context(instruction: str = "Do it.") -> HarnessContext:
    return harness_context({PYTHON: "/python", MINI: "/m"}, instruction=instruction)


def config(mini: MiniSweAgent, instruction: str = "Do it.") -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(mini.files(context(instruction))[STATE / "polar.yaml"])
    return document


def test_command_runs_in_an_interpreter_that_reads_no_environment() -> None:
    command = MiniSweAgent(MiniSweAgent.Options()).command(context())
    assert command.argv[0].startswith("/python/bin/python3")
    assert command.argv[1:4] == ("-I", "-S", "-c")
    assert command.argv[5] == "/m"
    assert not any(name.startswith("PYTHON") for name in command.env)
    assert command.env["MSWEA_CONFIGURED"] == "true"
    assert command.env["MSWEA_GLOBAL_CONFIG_DIR"] == str(STATE)


def test_configuration_approves_all_and_is_pointed_at_the_gateway() -> None:
    told = config(MiniSweAgent(MiniSweAgent.Options()))
    assert told["agent"] == {"mode": "yolo", "confirm_exit": False, "cost_limit": 0}
    assert told["model"]["model_name"] == "openai/small"
    assert told["model"]["model_kwargs"]["api_base"] == "http://127.0.0.1:1234/v1"
    assert told["model"]["model_kwargs"]["max_tokens"] == 1024


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_any_instruction_survives_the_configuration_file(instruction: str) -> None:
    assert config(MiniSweAgent(MiniSweAgent.Options()), instruction)["run"]["task"] == instruction


def test_key_is_only_in_the_environment() -> None:
    mini = MiniSweAgent(MiniSweAgent.Options())
    command = mini.command(context())
    assert command.env["OPENAI_API_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in mini.files(context()).values())


def test_options_become_configuration() -> None:
    mini = MiniSweAgent(
        MiniSweAgent.Options(max_turns=7, command_timeout_seconds=5, system_template="Be terse.", retries=1)
    )
    told = config(mini)
    assert told["agent"]["step_limit"] == 7
    assert told["agent"]["system_template"] == "Be terse."
    assert "instance_template" not in told["agent"]
    assert told["environment"] == {"timeout": 5}
    assert mini.command(context()).env["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] == "2"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_turns": 0}, "max_turns"), ({"retries": -1}, "retries"), ({"x": 1}, "x")],
)
def test_bad_options_of_mini_swe_agent_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="mini_swe_agent", options=options))
