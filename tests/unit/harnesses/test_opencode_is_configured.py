"""What OpenCode is told, without running it."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.opencode import OPENCODE, OpenCode
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

CONTEXT = harness_context({OPENCODE: "/o"}, instruction="-do it", model="policy/small")
STATE = PurePosixPath("/home/agent/.config/opencode")


def config(harness: OpenCode) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(harness.files(CONTEXT)[STATE / "opencode.json"])
    return document


def test_command_approves_everything_and_reads_the_instruction_from_stdin() -> None:
    command = OpenCode(OpenCode.Options()).command(CONTEXT)
    assert command.argv[:2] == ("/o/bin/opencode", "run")
    assert {"--auto", "--pure"} <= set(command.argv)
    assert command.stdin == b"-do it"


def test_only_the_gateway_provides_models() -> None:
    document = config(OpenCode(OpenCode.Options()))
    assert document["model"] == document["small_model"] == "polar/policy/small"
    assert document["enabled_providers"] == ["polar"]
    provider = document["provider"]["polar"]
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"]["baseURL"] == "http://127.0.0.1:1234/v1"
    assert provider["models"]["policy/small"]["limit"] == {"context": 8192, "output": 1024}


def test_nothing_is_fetched_in_the_background() -> None:
    harness = OpenCode(OpenCode.Options())
    files, env = harness.files(CONTEXT), harness.command(CONTEXT).env
    assert any(path.parent == STATE / "node_modules" for path in files)
    lock = json.loads(files[STATE / "package-lock.json"])
    assert "@opencode-ai/plugin" in lock["packages"][""]["dependencies"]
    for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "SHARE"):
        assert env[f"OPENCODE_DISABLE_{name}"] == "1"


def test_opencode_key_is_only_in_the_environment() -> None:
    harness = OpenCode(OpenCode.Options())
    command = harness.command(CONTEXT)
    assert command.env["POLAR_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in harness.files(CONTEXT).values())


def test_opencode_options_reach_its_configuration() -> None:
    options = OpenCode.Options(
        tools=("bash",), append_system_prompt="Really.", max_turns=3, title=True, compaction=False
    )
    harness = OpenCode(options)
    document = config(harness)
    assert (document["permission"]["*"], document["permission"]["bash"]) == ("deny", "allow")
    assert harness.files(CONTEXT)[PurePosixPath(document["instructions"][0])] == b"Really."
    assert document["agent"]["build"]["steps"] == 3
    assert document["agent"]["title"]["disable"] is False
    assert document["compaction"]["auto"] is False
    assert config(OpenCode(OpenCode.Options()))["permission"] == "allow"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tools": ["fly"]}, r"tools\.0"), ({"max_turns": 0}, "max_turns"), ({"x": 1}, "x")],
)
def test_bad_opencode_options_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="opencode", options=options))
