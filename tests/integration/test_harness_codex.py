"""The real Codex CLI, unmodified, in both sandboxes, through the whole chain against a scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, scripted_call

SHELL = scripted_call("exec_command", cmd="echo hello > hello.txt")
PATCH = scripted_call(
    "apply_patch", input="*** Begin Patch\n*** Add File: hello.txt\n+hello\n*** End Patch\n"
)


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
@pytest.mark.parametrize("call", [SHELL, PATCH], ids=["exec_command", "apply_patch"])
async def test_codex_uses_a_tool_and_its_second_turn_extends_the_first(
    tmp_path: Path, runtime: str, call: str
) -> None:
    rollout = await roll_out(tmp_path / "data", "codex", [call, "Done."], runtime=runtime)
    assert_rolled_out(rollout)
    first, _second = rollout.recording.completions
    assert first.dialect == "openai_responses"
    assert {"exec_command", "write_stdin", "apply_patch"} <= {tool.name for tool in first.tools}


async def test_codex_is_given_any_instruction_and_its_options(tmp_path: Path) -> None:
    options = {"system_prompt": "You are terse.", "append_system_prompt": "Be brave. \U0001f600\x7f"}
    rollout = await roll_out(
        tmp_path / "data", "codex", ["Done."], instruction=HUGE_INSTRUCTION, options=options
    )
    (asked,) = rollout.recording.completions
    texts = [message.content for message in asked.messages]
    assert texts[-1] == HUGE_INSTRUCTION
    assert texts[0].startswith("You are terse.")
    assert any("Be brave. \U0001f600\x7f" in text for text in texts)
