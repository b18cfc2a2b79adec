"""The real Pi, unmodified, in its sandbox, through the whole chain against a scripted engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polar.models.session import AgentEnd, SessionStatus
from polar.models.task import TaskSpec
from polar.recordings import recording
from tests.sandboxes import require_runtime
from tests.systems import system

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello > hello.txt"}}\n</tool_call>'


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
async def test_pi_uses_a_tool_and_its_second_turn_extends_the_exact_tokens_of_the_first(
    tmp_path: Path, runtime: str
) -> None:
    await require_runtime(runtime)
    task = TaskSpec.model_validate(
        {
            "id": "pi",
            "instruction": "Write the word hello to hello.txt.",
            "harness": {"name": "pi", "options": {"tools": ["bash"]}},
            "runtime": runtime,
            "evaluator": {"name": "command", "options": {"command": "grep -qx hello hello.txt"}},
        }
    )
    async with system(tmp_path / "data", [CALL, "Done."]) as running:
        await running.client.submit(task)
        async with running.node():
            (result,) = await running.client.wait(["pi"], timeout=120)
        assert (result.status, result.agent_end, result.exit_code) == (
            SessionStatus.COMPLETED,
            AgentEnd.EXITED,
            0,
        )
        assert result.reward == 1.0
        kept = recording.decode(await running.client.recording(result.session_id))
    first, second = kept.completions
    assert second.parent == first.id
    before = np.concatenate([first.prompt_ids, first.sampled_ids])
    assert np.array_equal(second.prompt_ids[: len(before)], before)
    assert first.response.tool_calls[0].name == "bash"
    assert result.stats.trainable_tokens == len(first.sampled_ids) + len(second.sampled_ids)
