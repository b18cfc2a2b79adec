"""The real Claude Code, unmodified, in both sandboxes, through the whole chain against a scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, scripted_call

CALL = scripted_call("Bash", command="echo hello > hello.txt", description="Write hello")


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_claude_code_uses_a_tool_and_its_second_turn_extends_the_first(
    tmp_path: Path, runtime: str
) -> None:
    rollout = await roll_out(tmp_path / "data", "claude_code", [CALL, "Done."], runtime=runtime)
    assert_rolled_out(rollout)
    first, _second = rollout.recording.completions
    assert first.dialect == "anthropic_messages"
    assert {"Bash", "Edit", "Read", "Write"} <= {tool.name for tool in first.tools}


@pytest.mark.parametrize("instruction", [HUGE_INSTRUCTION, "/help me"], ids=["huge", "slash"])
async def test_claude_code_is_given_any_instruction(tmp_path: Path, instruction: str) -> None:
    rollout = await roll_out(
        tmp_path / "data", "claude_code", ["Done."], instruction=instruction, options={"bare": True}
    )
    (asked,) = rollout.recording.completions
    assert asked.messages[-1].content.strip() == instruction


async def test_claude_code_options_reach_the_model_call(tmp_path: Path) -> None:
    options = {
        "tools": ["Bash", "Read"],
        "system_prompt": "You are terse.",
        "append_system_prompt": "Be brave.",
    }
    rollout = await roll_out(tmp_path / "data", "claude_code", ["Done."], options=options)
    asked = rollout.recording.completions[0]
    assert (
        {"Bash", "Read"} <= {tool.name for tool in asked.tools} <= {"Bash", "Read", "DeferredToolPlaceholder"}
    )
    system = asked.messages[0].content
    assert "You are terse." in system
    assert "Be brave." in system


async def test_claude_code_ends_after_its_turns(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "data", "claude_code", [CALL], options={"max_turns": 2, "bare": True})
    assert len(rollout.recording.completions) == 2
    assert (rollout.result.exit_code, rollout.result.reward) == (1, 1.0)
