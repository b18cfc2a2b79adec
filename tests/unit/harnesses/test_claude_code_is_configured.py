"""What Claude Code is told, without running it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.harnesses.claude_code import CLAUDE, MODEL_VARIABLES, ClaudeCode
from polar.models.component import Component
from tests.fakes.harness_context import harness_context

CONTEXT = harness_context({CLAUDE: "/c"}, instruction="-do it", tmp=PurePosixPath("/private"))


def test_command_is_headless_and_every_model_is_the_served_one() -> None:
    command = ClaudeCode(ClaudeCode.Options()).command(CONTEXT)
    assert command.argv[0] == "/c/claude"
    assert {"--print", "--dangerously-skip-permissions"} <= set(command.argv)
    assert command.stdin == b"-do it"
    assert command.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1234"
    assert {command.env[name] for name in MODEL_VARIABLES} == {"small"}


def test_state_is_private_and_limits_are_those_of_the_model() -> None:
    env = ClaudeCode(ClaudeCode.Options()).command(CONTEXT).env
    assert env["CLAUDE_CONFIG_DIR"] == "/home/agent/.claude"
    assert env["CLAUDE_CODE_TMPDIR"] == "/private"
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1024"
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"


def test_claude_code_key_is_only_in_the_environment() -> None:
    harness = ClaudeCode(ClaudeCode.Options(system_prompt="Be terse."))
    command = harness.command(CONTEXT)
    assert command.env["ANTHROPIC_API_KEY"] == "secret"
    assert not any("secret" in argument for argument in command.argv)
    assert not any(b"secret" in data for data in harness.files(CONTEXT).values())


def test_claude_code_prompts_travel_as_files() -> None:
    harness = ClaudeCode(ClaudeCode.Options(system_prompt="Be terse.", append_system_prompt="Really."))
    argv, files = harness.command(CONTEXT).argv, harness.files(CONTEXT)
    for flag, text in (("--system-prompt-file", b"Be terse."), ("--append-system-prompt-file", b"Really.")):
        assert files[PurePosixPath(argv[argv.index(flag) + 1])] == text


def test_instruction_with_a_slash_is_not_a_command() -> None:
    command = ClaudeCode(ClaudeCode.Options()).command(replace(CONTEXT, instruction="/clear it"))
    assert command.stdin == b"\n/clear it"


def test_claude_code_options_become_flags() -> None:
    options = ClaudeCode.Options(
        tools=(), max_turns=3, bare=True, effort="low", compaction=False, output="stream-json"
    )
    command = ClaudeCode(options).command(CONTEXT)
    argv = command.argv
    assert argv[argv.index("--tools") + 1] == ""
    assert argv[argv.index("--max-turns") + 1] == "3"
    assert argv[argv.index("--effort") + 1] == "low"
    assert {"--bare", "--verbose"} <= set(argv)
    assert command.env["DISABLE_COMPACT"] == "1"


@pytest.mark.parametrize(
    ("options", "field"), [({"effort": "hard"}, "effort"), ({"max_turns": 0}, "max_turns"), ({"x": 1}, "x")]
)
def test_bad_claude_code_options_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harness\.options\.{field}"):
        plugins.create("harnesses", "harness", Component(name="claude_code", options=options))
