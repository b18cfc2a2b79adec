"""The real mini-swe-agent, unmodified, in both sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, scripted_call

CALL = scripted_call("bash", command="echo hello > hello.txt; env | grep ^PYTHON")
SUBMIT = scripted_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_mini_swe_agent_uses_its_tool_and_its_second_turn_extends_the_first(
    tmp_path: Path, runtime: str
) -> None:
    rollout = await roll_out(tmp_path / "data", "mini_swe_agent", [CALL, SUBMIT], runtime=runtime)
    assert_rolled_out(rollout)
    first, second = rollout.recording.completions
    assert first.dialect == "openai_chat"
    assert first.asked.max_tokens == 4096
    assert [tool.name for tool in first.tools] == ["bash"]
    assert '"output": ""' in second.messages[-1].content, "commands must not see how Python was set up"


async def test_mini_swe_agent_is_given_any_instruction_and_its_options(tmp_path: Path) -> None:
    instruction = f"{HUGE_INSTRUCTION}: {{{{ x }}}} \x7f 😀\r\n"
    options = {"system_template": "You are terse.", "instance_template": "{{ task }}", "max_turns": 1}
    rollout = await roll_out(
        tmp_path / "data", "mini_swe_agent", [CALL], instruction=instruction, options=options
    )
    (asked,) = rollout.recording.completions
    system, user = asked.messages
    assert system.content == "You are terse."
    assert user.content == instruction
