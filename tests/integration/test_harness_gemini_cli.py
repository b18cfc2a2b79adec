"""The real Gemini CLI, unmodified, in both sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, scripted_call

CALL = scripted_call("run_shell_command", command="echo hello > hello.txt", description="Write hello")


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_gemini_cli_uses_a_tool_and_its_second_turn_extends_the_first(
    tmp_path: Path, runtime: str
) -> None:
    rollout = await roll_out(tmp_path / "data", "gemini_cli", [CALL, "Done."], runtime=runtime)
    assert_rolled_out(rollout)
    first, _second = rollout.recording.completions
    assert first.dialect == "google_generate"
    assert first.asked.max_tokens == 4096
    offered = {tool.name for tool in first.tools}
    assert {"run_shell_command", "read_file", "replace", "write_file"} <= offered
    assert not {"google_web_search", "web_fetch"} & offered


async def test_gemini_cli_is_given_any_instruction_and_its_options(tmp_path: Path) -> None:
    options = {"tools": ["run_shell_command"], "system_prompt": "You are terse."}
    rollout = await roll_out(
        tmp_path / "data", "gemini_cli", ["Done."], instruction=HUGE_INSTRUCTION, options=options
    )
    (asked,) = rollout.recording.completions
    system, user = asked.messages
    assert user.content.endswith(HUGE_INSTRUCTION)
    assert system.content.startswith("You are terse.")
    assert [tool.name for tool in asked.tools] == ["run_shell_command"]


async def test_gemini_cli_takes_a_leading_slash_for_text(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "data", "gemini_cli", ["Done."], instruction="/help @nobody there")
    (asked,) = rollout.recording.completions
    assert asked.messages[-1].content.endswith("/help @nobody there")


async def test_a_sub_agent_of_gemini_cli_asks_the_same_model_in_a_conversation_of_its_own(
    tmp_path: Path,
) -> None:
    delegate = scripted_call("invoke_agent", agent_name="codebase_investigator", prompt="Look around.")
    rollout = await roll_out(tmp_path / "data", "gemini_cli", [delegate, "Nothing.", "Nothing.", "Done."])
    assert rollout.result.exit_code == 0
    asked, investigation, _reminded, answered = rollout.recording.completions
    assert investigation.parent is None
    assert "Look around." in investigation.messages[-1].content
    assert answered.parent == asked.id
