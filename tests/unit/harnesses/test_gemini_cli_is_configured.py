"""What Gemini CLI is told, without running it."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.base import NODE, HarnessContext
from polar.harnesses.gemini_cli import ASSUMED_CONTEXT, GEMINI, SIDE_CALLS, GeminiCli
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

STATE = PurePosixPath("/home/agent/.gemini")


def context(instruction: str = "Do it.") -> HarnessContext:
    return harness_context({NODE: "/n", GEMINI: "/g"}, instruction=instruction)


def settings(gemini: GeminiCli) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gemini.files(context())[STATE / "settings.json"])
    return document


def test_command_is_headless_approves_all_and_is_pointed_at_the_gateway() -> None:
    command = GeminiCli(GeminiCli.Options()).command(context())
    assert command.argv[:2] == ("/n/bin/node", "/g/node_modules/@google/gemini-cli/bundle/gemini.js")
    assert command.argv[command.argv.index("--approval-mode") + 1] == "yolo"
    assert command.argv[command.argv.index("--model") + 1] == "small"
    assert command.stdin == b"Do it."
    assert command.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:1234"
    assert command.env["GEMINI_CLI_NO_RELAUNCH"] == "true"


def test_settings_sign_in_by_key_and_send_nothing_elsewhere() -> None:
    told = settings(GeminiCli(GeminiCli.Options()))
    assert told["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert told["general"]["enableAutoUpdate"] is False
    assert told["privacy"]["usageStatisticsEnabled"] is False
    assert told["telemetry"]["enabled"] is False


def test_every_call_goes_to_the_model_of_the_session() -> None:
    told = settings(GeminiCli(GeminiCli.Options()))
    aliases = told["modelConfigs"]["customAliases"]
    assert {aliases[name]["modelConfig"]["model"] for name in SIDE_CALLS} == {"small"}
    agents = told["agents"]["overrides"].values()
    assert {agent["modelConfig"]["model"] for agent in agents} == {"small"}


def test_answers_and_context_are_as_long_as_the_model_allows() -> None:
    told = settings(GeminiCli(GeminiCli.Options()))
    (override,) = told["modelConfigs"]["customOverrides"]
    assert override["match"] == {"model": "small"}
    assert override["modelConfig"]["generateContentConfig"] == {"maxOutputTokens": 1024}
    assert 0.5 < told["model"]["compressionThreshold"] * ASSUMED_CONTEXT / 8192 < 1


def test_key_is_only_in_the_environment() -> None:
    gemini = GeminiCli(GeminiCli.Options())
    command = gemini.command(context())
    assert command.env["GEMINI_API_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in gemini.files(context()).values())


def test_an_instruction_that_looks_like_a_command_is_sent_as_text() -> None:
    command = GeminiCli(GeminiCli.Options()).command(context("/clear the table"))
    assert command.stdin == b"\n/clear the table"


def test_the_skill_about_another_program_is_not_listed() -> None:
    """With one built-in skill left, their order is the same in every session."""
    told = settings(GeminiCli(GeminiCli.Options()))
    assert told["skills"] == {"disabled": ["antigravity-support"]}


def test_options_become_settings() -> None:
    gemini = GeminiCli(
        GeminiCli.Options(tools=("glob",), agents=False, system_prompt="Be terse.", max_turns=7, retries=0)
    )
    command, told = gemini.command(context()), settings(gemini)
    assert gemini.files(context())[PurePosixPath(command.env["GEMINI_SYSTEM_MD"])] == b"Be terse."
    assert told["tools"]["core"] == ["glob"]
    assert told["experimental"]["enableAgents"] is False
    assert told["model"]["maxSessionTurns"] == 7
    assert told["general"]["maxAttempts"] == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tools": ["fly"]}, r"tools\.0"), ({"retries": 10}, "retries"), ({"x": 1}, "x")],
)
def test_bad_options_of_gemini_cli_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="gemini_cli", options=options))
