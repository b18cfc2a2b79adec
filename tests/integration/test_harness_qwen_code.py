"""The real Qwen Code, unmodified, in both sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, scripted_call

CALL = scripted_call(
    "run_shell_command", command="echo hello > hello.txt", is_background=False, description="Write hello"
)


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_qwen_code_uses_a_tool_and_its_second_turn_extends_the_first(
    tmp_path: Path, runtime: str
) -> None:
    rollout = await roll_out(tmp_path / "data", "qwen_code", [CALL, "Done."], runtime=runtime)
    assert_rolled_out(rollout)
    first, _second = rollout.recording.completions
    assert first.dialect == "openai_chat"
    assert first.asked.max_tokens == 4096
    assert {"run_shell_command", "read_file", "edit", "write_file"} <= {tool.name for tool in first.tools}


async def test_qwen_code_is_given_any_instruction_and_its_options(tmp_path: Path) -> None:
    options = {
        "disabled_tools": ["agent", "skill"],
        "skills": False,
        "system_prompt": "You are terse.",
        "append_system_prompt": "--Be brave.",
    }
    rollout = await roll_out(
        tmp_path / "data", "qwen_code", ["Done."], instruction=HUGE_INSTRUCTION, options=options
    )
    (asked,) = rollout.recording.completions
    system, user = asked.messages
    assert user.content.rstrip().endswith(HUGE_INSTRUCTION)
    assert system.content.startswith("You are terse.")
    assert "--Be brave." in system.content
    assert not {"agent", "skill"} & {tool.name for tool in asked.tools}


async def test_qwen_code_takes_a_leading_slash_for_text(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "data", "qwen_code", ["Done."], instruction="/help @nobody there")
    (asked,) = rollout.recording.completions
    assert asked.messages[-1].content.endswith("/help @nobody there")
