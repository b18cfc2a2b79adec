"""Claude Code, unmodified, against the embedded engine: beside Pi in the quickstart, a second real pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.app.stack import running
from polar.client import AsyncClient
from polar.config.settings import ServerSettings, Settings
from polar.models.session import AgentEnd, SessionStatus
from polar.models.task import TaskSpec
from polar.recordings import recording
from tests.sandboxes import require_runtime

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model"), pytest.mark.timeout(300)]


async def test_every_token_that_the_small_model_sampled_for_it_is_trainable(tmp_path: Path) -> None:
    await require_runtime("bubblewrap")
    task = TaskSpec.model_validate(
        {
            "id": "claude",
            "instruction": "Run this command: echo hello > hello.txt",
            "harness": {"name": "claude_code", "options": {"bare": True}},
            "evaluator": {"name": "command", "options": {"command": "test -f hello.txt"}},
            "sampling": {"temperature": 0.7, "max_tokens": 48, "seed": 1},
            "budgets": {"max_completions": 2, "run_seconds": 120},
        }
    )
    settings = Settings(data_dir=tmp_path / "data", server=ServerSettings(port=0))
    async with running(settings, lambda _step: None) as stack, AsyncClient(stack.url, stack.token) as client:
        await client.submit(task)
        (result,) = await client.wait(["claude"], timeout=200)
        kept = recording.decode(await client.recording(result.session_id))
    assert result.status is SessionStatus.COMPLETED
    assert result.agent_end in (AgentEnd.EXITED, AgentEnd.BUDGET)
    assert result.reward in (0.0, 1.0)
    assert result.stats.sampled_tokens == result.stats.trainable_tokens > 0
    assert {completion.dialect for completion in kept.completions} == {"anthropic_messages"}
    assert all((completion.logprobs <= 0).all() for completion in kept.completions)
