"""A real vLLM pauses, reads other weights from disk and goes on; each token carries their version."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from polar.config.settings import DEFAULT_MODEL
from polar.engines.base import EngineError, GenerateRequest, TokenChunk, WeightUpdate
from polar.engines.embedded.weights import ensure_model
from polar.engines.pausable import PausableEngine
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from polar.models.policy import PauseMode

WRITE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(1)
with torch.no_grad():
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
model.save_pretrained(sys.argv[2])
"""
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    directory = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-c", WRITE, ensure_model(DEFAULT_MODEL), directory], check=True)
    return directory


@pytest.fixture
async def engine(vllm_url: str) -> AsyncIterator[PausableEngine]:
    client = VllmEngine(vllm_url)
    engine = PausableEngine(client)
    yield engine
    await engine.resume()
    await engine.update_weights(WeightUpdate((await engine.model_info()).policy_version + 1))
    await client.close()


def asked(tokens: int, prompt: list[int] = PROMPT) -> GenerateRequest:
    return GenerateRequest(uuid4().hex, prompt, Sampling(temperature=0.0, max_tokens=tokens))


def joined(chunks: list[TokenChunk]) -> tuple[list[int], list[int]]:
    return [id for chunk in chunks for id in chunk.ids], [c.policy_version for c in chunks for _ in c.ids]


async def sampled(engine: PausableEngine, request: GenerateRequest) -> tuple[list[int], list[int]]:
    return joined([chunk async for chunk in engine.generate(request)])


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_completion_during_which_the_weights_change(
    engine: PausableEngine, other: Path, mode: PauseMode
) -> None:
    before = (await engine.model_info()).policy_version
    old, _ = await sampled(engine, asked(60))
    chunks: list[TokenChunk] = []
    begun = asyncio.Event()

    async def generate() -> None:
        async for chunk in engine.generate(asked(60)):
            chunks.append(chunk)
            if len(chunks) == 5:
                begun.set()

    generation: asyncio.Task[Any] = asyncio.create_task(generate())
    async with asyncio.timeout(120):
        await begun.wait()
        await engine.pause(mode)
        await engine.update_weights(WeightUpdate(before + 1, str(other)))
        await engine.resume()
        await generation
    ids, versions = joined(chunks)
    at = versions.count(before)
    assert versions == [before] * at + [before + 1] * (len(ids) - at)
    assert ids[:at] == old[:at]
    assert (await engine.model_info()).policy_version == before + 1
    if mode is PauseMode.DRAIN:
        assert ids == old
        return
    assert 5 <= at < len(ids)
    # What was computed before is computed anew: the rest is what the new weights say after those tokens.
    rest, _ = await sampled(engine, asked(len(ids) - at, PROMPT + ids[:at]))
    assert rest == ids[at:]
    assert rest != old[at:]


async def test_no_path_means_the_weights_it_was_started_with(engine: PausableEngine, other: Path) -> None:
    version = (await engine.model_info()).policy_version
    first, _ = await sampled(engine, asked(20))
    await engine.update_weights(WeightUpdate(version + 1, str(other)))
    assert (await sampled(engine, asked(20)))[0] != first
    await engine.update_weights(WeightUpdate(version + 2))
    again, versions = await sampled(engine, asked(20))
    assert again == first
    assert set(versions) == {version + 2}


async def test_nothing_is_sampled_during_a_pause(engine: PausableEngine, vllm_url: str) -> None:
    direct = VllmEngine(vllm_url)
    await engine.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(sampled(PausableEngine(direct), asked(3)))
    done, _ = await asyncio.wait({waiting}, timeout=1.0)
    assert not done
    await engine.resume()
    assert len((await asyncio.wait_for(waiting, 30))[0]) == 3
    await direct.close()


async def test_weights_that_are_not_there_leave_the_server_alive(
    engine: PausableEngine, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="holds no safetensors"):
        await engine.update_weights(WeightUpdate(99, str(tmp_path / "none")))
    assert len((await sampled(engine, asked(2)))[0]) == 2
