"""What is special of the real mini-swe-agent; the rest is in test_harness_conformance.py."""

from __future__ import annotations

from pathlib import Path

from tests.rollouts import HUGE_INSTRUCTION, roll_out, scripted_call

CALL = scripted_call("bash", command="echo hello > hello.txt; env | grep ^PYTHON")
SUBMIT = scripted_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


async def test_commands_of_mini_swe_agent_do_not_see_how_python_was_set_up(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "data", "mini_swe_agent", [CALL, SUBMIT])
    _first, second = rollout.recording.completions
    of_every_sandbox = "PYTHONHASHSEED=0\\n"
    assert f'"output": "{of_every_sandbox}"' in second.messages[-1].content


async def test_mini_swe_agent_takes_templates_and_text_that_looks_like_one(tmp_path: Path) -> None:
    instruction = f"{HUGE_INSTRUCTION}: {{{{ x }}}} \x7f 😀\r\n"
    options = {"system_template": "You are terse.", "instance_template": "{{ task }}", "max_turns": 1}
    rollout = await roll_out(
        tmp_path / "data", "mini_swe_agent", [CALL], instruction=instruction, options=options
    )
    (asked,) = rollout.recording.completions
    system, user = asked.messages
    assert system.content == "You are terse."
    assert user.content == instruction
