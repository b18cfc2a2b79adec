"""Agents of presets, as they come from their registries, keep every harness's promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.config import plugins
from polar.harnesses import preset
from tests.fakes import tool_server
from tests.integration import test_harness_conformance as conformance
from tests.integration import test_tasks_bring_their_tools as tools
from tests.rollouts import HUGE_INSTRUCTION, roll_out

pytestmark = pytest.mark.timeout(600)

PRESETS = preset.names()
WITH_TOOLS = [name for name in PRESETS if plugins.load("harnesses", name).takes_tools]


@pytest.fixture(autouse=True)
async def _installed(name: str) -> None:
    """Have the agent downloaded before its session's clock runs."""
    await conformance.harness(name).install()


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
@pytest.mark.parametrize("name", PRESETS)
async def test_the_task_is_done_and_each_turn_extends_the_one_before(
    tmp_path: Path, name: str, runtime: str
) -> None:
    expected = conformance.case(name)
    for call in expected.calls:
        await conformance.test_a_tool_is_used_and_the_second_turn_extends_the_first(
            tmp_path, name, call, runtime
        )
    if not expected.calls:
        rollout = await roll_out(tmp_path / "data", name, [expected.ends_with], runtime=runtime)
        assert rollout.result.reward == 1.0
        assert rollout.recording.completions[0].dialect == expected.dialect


@pytest.mark.parametrize("instruction", [HUGE_INSTRUCTION, "/help @nobody there"], ids=["huge", "slash"])
@pytest.mark.parametrize("name", PRESETS)
async def test_any_instruction_arrives(tmp_path: Path, name: str, instruction: str) -> None:
    await conformance.test_any_instruction_arrives_as_it_is(tmp_path, name, instruction)


@pytest.mark.parametrize("name", WITH_TOOLS)
async def test_a_command_s_tool_is_called(tmp_path: Path, name: str) -> None:
    await tools.test_a_command_s_tool_is_called(tmp_path, name)


@pytest.mark.parametrize("name", tools.OFFERED_AS)
async def test_a_server_s_tool_is_called(tmp_path: Path, name: str) -> None:
    await tools.assert_server_is_asked(tmp_path / "data", name)


@pytest.mark.parametrize("name", ["opencode", "pi"])
async def test_a_task_s_own_tools_stay_where_those_of_the_harness_are_chosen(
    tmp_path: Path, name: str
) -> None:
    rollout = await roll_out(
        tmp_path / "data",
        name,
        ["Done."],
        options={"tools": ["bash"]},
        files={"server.py": {"text": Path(tool_server.__file__).read_text()}},
        tools={"words": {"command": "python3", "args": ["server.py"], "env": {"SECRET": "s"}}},
    )
    offered = {tool.name for tool in rollout.recording.completions[0].tools}
    assert offered == {"bash", tools.OFFERED_AS[name]}
