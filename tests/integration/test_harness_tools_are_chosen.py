"""Harnesses that let the task choose their tools offer the model no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rollouts import roll_out


@pytest.mark.parametrize("name", ["opencode", "pi"])
async def test_only_the_chosen_tools_are_offered(tmp_path: Path, name: str) -> None:
    rollout = await roll_out(tmp_path / "data", name, ["Done."], options={"tools": ["bash"]})
    assert [tool.name for tool in rollout.recording.completions[0].tools] == ["bash"]


async def test_disabled_tools_of_qwen_code_are_not_offered(tmp_path: Path) -> None:
    options: dict[str, Any] = {"disabled_tools": ["agent", "skill"], "skills": False}
    rollout = await roll_out(tmp_path / "data", "qwen_code", ["Done."], options=options)
    assert not {"agent", "skill"} & {tool.name for tool in rollout.recording.completions[0].tools}
