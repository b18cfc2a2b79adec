"""What is special of the real Gemini CLI; what it shares with others is in test_harness_conformance.py."""

from __future__ import annotations

from pathlib import Path

from tests.rollouts import roll_out, scripted_call


async def test_gemini_cli_offers_the_tools_that_are_asked_for_and_none_of_the_web(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "all", "gemini_cli", ["Done."])
    offered = {tool.name for tool in rollout.recording.completions[0].tools}
    assert not {"google_web_search", "web_fetch"} & offered
    rollout = await roll_out(
        tmp_path / "one", "gemini_cli", ["Done."], options={"tools": ["run_shell_command"]}
    )
    assert [tool.name for tool in rollout.recording.completions[0].tools] == ["run_shell_command"]


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
