"""What is special of the real Claude Code; what it shares with others is in test_harness_conformance.py."""

from __future__ import annotations

from pathlib import Path

from tests.rollouts import roll_out, scripted_call

CALL = scripted_call("Bash", command="echo hello > hello.txt", description="Write hello")


async def test_claude_code_offers_the_tools_that_are_asked_for(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "data", "claude_code", ["Done."], options={"tools": ["Bash", "Read"]})
    offered = {tool.name for tool in rollout.recording.completions[0].tools}
    assert {"Bash", "Read"} <= offered <= {"Bash", "Read", "DeferredToolPlaceholder"}


async def test_claude_code_ends_after_its_turns(tmp_path: Path) -> None:
    rollout = await roll_out(tmp_path / "data", "claude_code", [CALL], options={"max_turns": 2, "bare": True})
    assert len(rollout.recording.completions) == 2
    assert (rollout.result.exit_code, rollout.result.reward) == (1, 1.0)
