"""The real OpenCode, unmodified, in both sandboxes, through the whole chain against a scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, scripted_call

CALL = scripted_call("bash", command="echo hello > hello.txt", description="Write hello")


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_opencode_uses_a_tool_and_its_second_turn_extends_the_first(
    tmp_path: Path, runtime: str
) -> None:
    rollout = await roll_out(tmp_path / "data", "opencode", [CALL, "Done."], runtime=runtime)
    assert_rolled_out(rollout)
    first, _second = rollout.recording.completions
    assert first.dialect == "openai_chat"
    assert {"bash", "edit", "read", "write"} <= {tool.name for tool in first.tools}


async def test_opencode_is_given_any_instruction_and_its_options(tmp_path: Path) -> None:
    options = {"tools": ["bash"], "system_prompt": "You are terse.", "append_system_prompt": "Be brave."}
    rollout = await roll_out(
        tmp_path / "data", "opencode", ["Done."], instruction=HUGE_INSTRUCTION, options=options
    )
    (asked,) = rollout.recording.completions
    system, user = asked.messages
    assert user.content == HUGE_INSTRUCTION
    assert system.content.startswith("You are terse.")
    assert "Be brave." in system.content
    assert [tool.name for tool in asked.tools] == ["bash"]
