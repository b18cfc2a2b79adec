"""`engine.kind: vllm` without a URL starts a real vLLM, with options that it takes, and ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from openai import AsyncOpenAI

from polar.app.stack import data_plane
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.gateway.session import SessionGrant, new_key
from polar.models.session import PROCESSED
from polar.models.task import Budgets, SamplingPin
from tests.captures import read_capture

pytestmark = pytest.mark.timeout(900)


async def test_a_vllm_of_polar_s_own_samples_trainable_tokens(vllm_program: Path, tmp_path: Path) -> None:
    engine = EngineSettings(
        kind="vllm",
        model=DEFAULT_MODEL,
        device="cpu",
        max_context=2048,
        slots=4,
        lora_rank=8,
        options=("--enforce-eager",),
    )
    said: list[str] = []
    settings = Settings(data_dir=tmp_path / "data", engine=engine)
    async with data_plane(settings, said.append) as plane:
        running = psutil.Process().children(recursive=True)
        grant = SessionGrant("s", new_key(), tmp_path / "capture", SamplingPin(seed=7), Budgets())
        plane.gateway.open_session(grant)
        async with AsyncOpenAI(base_url=f"{plane.gateway.url}/v1", api_key=grant.key) as client:
            messages: list[Any] = [{"role": "user", "content": "Say one word."}]
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model=DEFAULT_MODEL, messages=messages, max_completion_tokens=8
                )
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "Again."})
        await plane.gateway.close_session("s")
        assert (plane.model.logprobs_mode, plane.model.renderer) == (PROCESSED, "template")
        assert plane.model.max_context == 2048
    first, second = read_capture(grant.capture)
    assert first.untrainable is None
    assert second.parent == first.id
    assert np.isfinite(second.logprobs).all()
    assert any(line.startswith("starting vLLM, which may take minutes: ") for line in said)
    assert running
    assert not psutil.wait_procs(running, timeout=30)[1]
