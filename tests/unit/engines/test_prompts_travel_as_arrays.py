"""A prompt reaches an engine with the ids that its array holds, also where it is a view of a longer one."""

from __future__ import annotations

import numpy as np
import pytest

from polar.engines.base import Engine, GenerateRequest
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from polar.recordings.growth import Context
from tests.fakes import sglang_wire, vllm_wire

LONG = np.arange(100_000, dtype=np.int32)
VIEW = Context().extended(0, LONG).first(1_000)


async def sampled(engine: Engine, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    try:
        async for _ in engine.generate(GenerateRequest("r1", prompt, Sampling(max_tokens=1))):
            pass
    finally:
        await engine.close()


@pytest.mark.parametrize("prompt", [LONG, VIEW])
async def test_vllm_gets_the_ids(prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    answer = [vllm_wire.event([2], [-0.1], "stop"), vllm_wire.usage(1), "[DONE]"]
    async with vllm_wire.vllm_wire(answer) as wire:
        await sampled(VllmEngine(wire.url), prompt)
    assert wire.bodies[0]["prompt"] == prompt.tolist()


@pytest.mark.parametrize("prompt", [LONG, VIEW])
async def test_sglang_gets_the_ids(prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    async with sglang_wire.sglang_wire([sglang_wire.event([2], [-0.1], 1, "stop"), "[DONE]"]) as wire:
        await sampled(SglangEngine(wire.url), prompt)
    assert wire.bodies[0]["input_ids"] == prompt.tolist()
