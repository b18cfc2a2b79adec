"""What Pi is told, without running it."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.base import NODE
from polar.harnesses.pi import PI, Pi
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

CONTEXT = harness_context({NODE: "/n", PI: "/p"})
STATE = PurePosixPath("/home/agent/.pi/agent")


def documents(pi: Pi) -> tuple[dict[str, Any], dict[str, Any]]:
    files = pi.files(CONTEXT)
    return json.loads(files[STATE / "models.json"]), json.loads(files[STATE / "settings.json"])


def test_command_is_headless_offline_and_pointed_at_the_gateway() -> None:
    command = Pi(Pi.Options()).command(CONTEXT)
    assert command.argv[:2] == ("/n/bin/node", "/p/dist/bundle/cli.js")
    assert {"--print", "--no-session"} <= set(command.argv)
    assert command.stdin == b"Do it."
    assert command.env["PI_OFFLINE"] == "1"
    assert command.env["NODE_DISABLE_COMPILE_CACHE"] == "1"  # its /tmp ends with the session
    assert command.env["PI_CODING_AGENT_DIR"] == str(STATE)
    models, _ = documents(Pi(Pi.Options()))
    provider = models["providers"]["polar"]
    assert provider["baseUrl"] == "http://127.0.0.1:1234/v1"
    assert provider["models"] == [
        {"id": "small", "reasoning": False, "contextWindow": 8192, "maxTokens": 1024}
    ]


def test_key_is_only_in_the_environment() -> None:
    pi = Pi(Pi.Options())
    command = pi.command(CONTEXT)
    assert command.env["POLAR_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in pi.files(CONTEXT).values())


def test_compaction_leaves_room_in_a_small_context() -> None:
    _, settings = documents(Pi(Pi.Options()))
    compaction = settings["compaction"]
    assert compaction["enabled"] is True
    assert compaction["reserveTokens"] + compaction["keepRecentTokens"] < 8192
    assert documents(Pi(Pi.Options(compaction=False)))[1]["compaction"]["enabled"] is False


def test_prompts_travel_as_files() -> None:
    pi = Pi(Pi.Options(system_prompt="Be terse.", append_system_prompt="Really."))
    argv, files = pi.command(CONTEXT).argv, pi.files(CONTEXT)
    for flag, text in (("--system-prompt", b"Be terse."), ("--append-system-prompt", b"Really.")):
        assert files[PurePosixPath(argv[argv.index(flag) + 1])] == text


def test_thinking_declares_a_model_that_thinks() -> None:
    pi = Pi(Pi.Options(thinking="high"))
    argv = pi.command(CONTEXT).argv
    assert argv[argv.index("--thinking") + 1] == "high"
    assert documents(pi)[0]["providers"]["polar"]["models"][0]["reasoning"] is True


def test_no_tools_is_said_as_such() -> None:
    assert "--no-tools" in Pi(Pi.Options(tools=())).command(CONTEXT).argv


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": ["fly"]}, r"tools\.0"),
        ({"thinking": "hard"}, "thinking"),
        ({"retries": -1}, "retries"),
        ({"x": 1}, "x"),
    ],
)
def test_bad_options_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="pi", options=options))
