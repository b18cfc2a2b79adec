"""Polar's engine client and gateway against a real vLLM server: exact ids, true logprobs, streams, aborts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from polar.app.stack import data_plane
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.engines.base import GenerateRequest
from polar.engines.embedded.weights import ensure_model
from polar.engines.vllm import VllmEngine
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.models.chat import Sampling
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from suites.vllm_metrics import is_idle, metric
from tests.captures import read_capture
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)


@dataclass
class Scene:
    gateway: Gateway
    grant: SessionGrant
    client: AsyncOpenAI

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


@pytest.fixture
async def scene(vllm_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    settings = Settings(data_dir=tmp_path, engine=EngineSettings(url=vllm_url, model=DEFAULT_MODEL))
    async with data_plane(settings, lambda _step: None) as plane:
        pin = SamplingPin(temperature=0.8, seed=7)
        grant = SessionGrant("s", new_key(), tmp_path / "capture", pin, Budgets())
        plane.gateway.open_session(grant)
        async with AsyncOpenAI(base_url=f"{plane.gateway.url}/v1", api_key=grant.key) as client:
            yield Scene(plane.gateway, grant, client)


async def test_logprobs_are_those_of_the_distribution_sampled_from(scene: Scene) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name three colours."}]
    for _ in range(2):
        answer = await scene.client.chat.completions.create(
            model=DEFAULT_MODEL, messages=messages, max_tokens=24
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "And two more."},
        ]
    first, second = await scene.captured()
    assert second.parent == first.id
    assert second.prompt_ids.tolist()[: len(first.prompt_ids) + len(first.sampled_ids)] == [
        *first.prompt_ids.tolist(),
        *first.sampled_ids.tolist(),
    ]
    model = AutoModelForCausalLM.from_pretrained(ensure_model(DEFAULT_MODEL), dtype=torch.float32).eval()
    for completion in (first, second):
        ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.sampled_ids.tolist()]])
        with torch.inference_mode():
            rows = (model(ids).logits[0] / 0.8).log_softmax(-1)[len(completion.prompt_ids) - 1 : -1]
        expected = rows.gather(1, torch.tensor(completion.sampled_ids.tolist())[:, None])[:, 0].numpy()
        assert np.abs(expected - completion.logprobs).max() <= 1e-3


async def test_a_stream_samples_what_the_whole_answer_samples(vllm_url: str) -> None:
    engine = VllmEngine(vllm_url)
    try:
        sampling = Sampling(temperature=1.0, seed=11, max_tokens=20)
        runs = []
        for number in range(2):
            request = GenerateRequest(f"r{number}", [1, 4093, 198, 9690], sampling)
            runs.append([id async for chunk in engine.generate(request) for id in chunk.ids])
        assert runs[0] == runs[1]
        assert len(runs[0]) == 20
        assert await engine.tokenize("<|im_start|>user") == [1, 4093]
    finally:
        await engine.close()


async def test_a_client_that_leaves_ends_the_generation_in_vllm(scene: Scene, vllm_url: str) -> None:
    stream = await scene.client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Count to ten thousand."}],
        max_tokens=3000,
        stream=True,
        extra_body={"stop": ["no such text"]},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    assert await metric(vllm_url, "num_requests_running") == 1
    await stream.close()
    await eventually(partial(is_idle, vllm_url), 30, every=0.1)
    (completion,) = await scene.captured()
    assert completion.finish_reason == "cancelled"
    assert 0 < len(completion.sampled_ids) < 3000


async def test_a_second_turn_finds_its_prefix_in_vllm_s_cache(scene: Scene, vllm_url: str) -> None:
    before = await metric(vllm_url, "prefix_cache_hits_total")
    messages: list[Any] = [{"role": "user", "content": "Remember these words: " + "apple pear plum " * 60}]
    for _ in range(2):
        answer = await scene.client.chat.completions.create(
            model=DEFAULT_MODEL, messages=messages, max_tokens=4
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "Go on."},
        ]
    first, _ = await scene.captured()
    assert await metric(vllm_url, "prefix_cache_hits_total") - before >= len(first.prompt_ids) // 2
