"""The quickstart with an adapter: every token is sampled with it, and a group's rewards are shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from polar.app import quickstart
from polar.app.stack import running
from polar.config.settings import DEFAULT_MODEL, EngineSettings, load_settings
from polar.errors import InvalidInput
from polar.models.session import SessionStatus
from tests.fakes.tiny_llama import write_adapter, write_tiny_llama
from tests.systems import ASK, shell_task


@pytest.mark.timeout(120)
async def test_an_adapter_becomes_the_policy(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", max_position_embeddings=4096)
    settings = load_settings(
        overrides={
            "data_dir": tmp_path / "data",
            "server": {"port": 0},
            "engine": {"model": str(model), "device": "cpu", "threads": 1},
        }
    )
    task = shell_task("ask", ASK, samples=2, sampling={"max_tokens": 8, "seed": 1})
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    adapter = write_adapter(tmp_path / "adapter")
    results = await quickstart.run(settings, [task], console, adapter)
    assert [result.status for result in results] == [SessionStatus.COMPLETED] * 2
    assert {(r.policy_version_min, r.policy_version_max) for r in results} == {(1, 1)}
    console.print(quickstart.summary(results, 1.0, settings.data_dir))
    assert "ask: 1.00  1.00  (mean 1.00, standard deviation 0.00)" in shown.getvalue()
    said: list[str] = []
    async with running(settings, said.append, policy=adapter):
        assert said[-1] == "resuming the policy at version 1"
    other = write_adapter(tmp_path / "other")
    with pytest.raises(InvalidInput, match="was started with other weights"):
        async with running(settings, said.append, policy=other):
            pass


def test_the_shipped_adapter_is_for_the_default_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "WARM_START", tmp_path / "warm_start")
    assert quickstart.shipped_policy(EngineSettings()) is None
    write_adapter(tmp_path / "warm_start")
    assert quickstart.shipped_policy(EngineSettings()) == tmp_path / "warm_start"
    assert quickstart.shipped_policy(EngineSettings(model="other")) is None
    assert quickstart.shipped_policy(EngineSettings(model=DEFAULT_MODEL, url="http://127.0.0.1:1")) is None
