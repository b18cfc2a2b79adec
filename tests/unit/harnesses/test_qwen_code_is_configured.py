"""What Qwen Code is told, without running it."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.base import NODE, HarnessContext
from polar.harnesses.qwen_code import QWEN, QwenCode
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

STATE = PurePosixPath("/home/agent/.qwen")


def context(instruction: str = "Do it.") -> HarnessContext:
    return harness_context({NODE: "/n", QWEN: "/q"}, instruction=instruction)


def settings(qwen: QwenCode) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(qwen.files(context())[STATE / "system-settings.json"])
    return document


def test_command_is_headless_approves_all_and_is_pointed_at_the_gateway() -> None:
    command = QwenCode(QwenCode.Options()).command(context())
    assert command.argv[0] == "/n/bin/node"
    assert command.argv[2] == "/q/node_modules/@qwen-code/qwen-code/cli.js"
    assert command.argv[command.argv.index("--approval-mode") + 1] == "yolo"
    assert command.stdin == b"Do it."
    assert command.env["OPENAI_BASE_URL"] == "http://127.0.0.1:1234/v1"
    assert command.env["OPENAI_MODEL"] == "small"
    assert command.env["QWEN_CODE_NO_RELAUNCH"] == "1"
    assert command.env["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == str(STATE / "system-settings.json")


def test_limits_of_the_model_are_told_and_nothing_is_sent_elsewhere() -> None:
    told = settings(QwenCode(QwenCode.Options()))
    generation = told["model"]["generationConfig"]
    assert generation["contextWindowSize"] == 8192
    assert generation["samplingParams"] == {"max_tokens": 1024}
    assert told["general"]["enableAutoUpdate"] is False
    assert told["privacy"]["usageStatisticsEnabled"] is False
    assert told["telemetry"]["enabled"] is False


def test_key_is_only_in_the_environment() -> None:
    qwen = QwenCode(QwenCode.Options())
    command = qwen.command(context())
    assert command.env["OPENAI_API_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in qwen.files(context()).values())


def test_an_instruction_that_looks_like_a_command_is_sent_as_text() -> None:
    command = QwenCode(QwenCode.Options()).command(context("/clear the table"))
    assert command.stdin == b"\n/clear the table"


def test_options_become_settings_and_flags() -> None:
    qwen = QwenCode(
        QwenCode.Options(
            disabled_tools=("agent",),
            skills=False,
            system_prompt="Be terse.",
            append_system_prompt="-- really",
            max_turns=7,
            shell_timeout_seconds=5,
            output="json",
        )
    )
    command, told = qwen.command(context()), settings(qwen)
    assert command.argv[command.argv.index("--max-session-turns") + 1] == "7"
    assert "--append-system-prompt=-- really" in command.argv
    assert command.argv[command.argv.index("--output-format") + 1] == "json"
    assert qwen.files(context())[PurePosixPath(command.env["QWEN_SYSTEM_MD"])] == b"Be terse."
    assert told["tools"] == {"disabled": ["agent"], "shell": {"defaultTimeoutMs": 5000}}
    assert told["skills"] == {"disabledLevels": ["bundled"]}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"disabled_tools": ["fly"]}, r"disabled_tools\.0"),
        ({"append_system_prompt": "x" * 40_000}, "append_system_prompt"),
        ({"max_turns": 0}, "max_turns"),
        ({"x": 1}, "x"),
    ],
)
def test_bad_options_of_qwen_code_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="qwen_code", options=options))
