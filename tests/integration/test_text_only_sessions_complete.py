"""The whole system on an OpenAI-compatible endpoint: sessions are scored and kept, nothing is trainable."""

from __future__ import annotations

from pathlib import Path

import pandas
from typer.testing import CliRunner

from polar.app.stack import running
from polar.cli.main import app
from polar.client import AsyncClient
from polar.config.settings import EngineSettings, NodeSettings, ServerSettings, Settings
from polar.models.session import SessionStatus
from polar.recordings import recording
from polar.tasksets.export import ExportedSession, export
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import ASK, RUNTIMES, shell_task


async def test_a_text_only_session_under_any_model_name_has_a_reward_a_recording_and_no_trainable_token(
    tmp_path: Path,
) -> None:
    async with vllm_wire(Said("Hello.")) as wire:
        settings = Settings(
            data_dir=tmp_path / "data",
            server=ServerSettings(port=0),
            engine=EngineSettings(kind="openai", url=wire.url, model="gpt", api_key="sk-test"),
            node=NodeSettings(runtimes=RUNTIMES),
        )
        async with (
            running(settings, lambda _step: None) as stack,
            AsyncClient(stack.url, stack.token) as client,
        ):
            await client.submit(shell_task("t", ASK.replace('os.environ["POLAR_MODEL"]', '"gpt-4o"')))
            (result,) = await client.wait(["t"], timeout=60)
            kept = await client.recording(result.session_id)
    assert (result.status, result.reward, result.model) == (SessionStatus.COMPLETED, 1.0, "gpt")
    assert (result.stats.completions, result.stats.traces, result.stats.trainable_tokens) == (1, 0, 0)
    assert result.stats.excluded == {"untrainable": 7}
    assert result.stats.sampled_tokens == 7
    (completion,) = recording.decode(kept).completions
    assert completion.response.content == "Hello."
    assert completion.untrainable == "the engine gives no token ids"

    exported = export([ExportedSession(result, {}, recording.decode(kept))], tmp_path / "out")
    assert (exported.sessions, exported.traces, exported.trainable_tokens) == (1, 0, 0)
    sessions = pandas.read_parquet(exported.sessions_path)
    assert sessions["session_id"].tolist() == [result.session_id]
    assert len(pandas.read_parquet(exported.traces_path)) == 0

    (tmp_path / "recording").write_bytes(kept)
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "recording")])
    assert shown.exit_code == 0, shown.output
    assert "Hello." in shown.output
