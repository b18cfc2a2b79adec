"""What the real small model samples through the gateway, an engine that scores it again agrees with."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from polar.app.proxy import proxy_session
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.engines.embedded.model import load
from polar.engines.embedded.server import EmbeddedServer
from polar.models.task import SamplingPin

pytestmark = pytest.mark.model

TURNS = ("Name three colours.", "Now three animals.", "Which was the first colour?")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def test_a_recorded_conversation_is_verified_within_a_thousandth(tmp_path: Path) -> None:
    model = load(
        EngineSettings(model=DEFAULT_MODEL, device="cpu", dtype="float32", slots=2, max_context=1024)
    )
    async with EmbeddedServer(model) as server:
        recording = await _recorded(server.url, tmp_path)
        code, sound = await _verify(recording, "--engine", server.url)
        assert code == 0, sound
        total = sound["total"]
        assert total["trained_tokens"] == total["delta_logprob"]["tokens"] > len(TURNS)
        assert 0 <= total["delta_logprob"]["mean"] <= total["delta_logprob"]["max"] <= 1e-3
        strict, refused = await _verify(recording, "--engine", server.url, "--tolerance", "0")
    assert strict == 1
    assert "a logprob differs by" in refused["total"]["failure"]


async def _recorded(engine: str, directory: Path) -> Path:
    """The recording of a few turns that extend each other."""
    settings = Settings(data_dir=directory, engine=EngineSettings(url=engine))
    pins = SamplingPin(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=24)
    async with proxy_session(settings, pins, lambda _step: None) as session:
        agent = openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key=session.key)
        messages: list[Any] = []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            answer = await agent.chat.completions.create(model=session.model.name, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        await agent.close()
    return session.recording


async def _verify(recording: Path, *options: str) -> tuple[int, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polar", "verify", str(recording), "--json", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=recording.parent,
    )
    out, err = await process.communicate()
    assert process.returncode in (0, 1), err.decode()
    return process.returncode, json.loads(out)
