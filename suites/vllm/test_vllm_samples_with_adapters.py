"""A real vLLM is given adapters while it runs, and each token carries the version it was sampled with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from polar.config.settings import DEFAULT_MODEL
from polar.engines.base import GenerateRequest, WeightUpdate
from polar.engines.embedded.weights import ensure_model
from polar.engines.pausable import PausableEngine
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from polar.models.session import PROCESSED

PROMPT = [1, 4093, 198, 9690, 198]
CLOSE = 0.1
"""What bfloat16, in which vLLM's kernels for adapters compute on a GPU, may do to a logprob on average."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[PeftModel, Path]:
    """The model with an adapter that changes much of what it says, and the adapter's directory."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(ensure_model(DEFAULT_MODEL), dtype=torch.float32)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, lora).eval()
    adapted.save_pretrained(directory := tmp_path_factory.mktemp("adapter"))
    return adapted, directory


@pytest.fixture
async def engine(vllm_url: str) -> AsyncIterator[PausableEngine]:
    client = VllmEngine(vllm_url)
    engine = PausableEngine(client)
    yield engine
    await client.close()


async def sampled(engine: PausableEngine) -> tuple[list[int], list[float], set[int]]:
    request = GenerateRequest(uuid4().hex, PROMPT, Sampling(temperature=1.0, max_tokens=24, seed=5))
    chunks = [chunk async for chunk in engine.generate(request)]
    ids = [id for chunk in chunks for id in chunk.ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    return ids, logprobs, {chunk.policy_version for chunk in chunks if chunk.ids}


def expected(model: PeftModel, ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = (
        rows.gather(1, torch.tensor(ids)[:, None])[:, 0].float().numpy()
    )
    return found


async def test_tokens_are_those_of_the_adapter_and_carry_its_version(
    engine: PausableEngine, policy: tuple[PeftModel, Path]
) -> None:
    model, directory = policy
    version = (await engine.model_info()).policy_version
    _, _, before = await sampled(engine)
    await engine.update_weights(WeightUpdate(version + 1, str(directory)))
    ids, logprobs, versions = await sampled(engine)
    assert before == {version}
    assert versions == {version + 1}
    assert np.abs(expected(model, ids) - logprobs).mean() < CLOSE
    with model.disable_adapter():
        assert np.abs(expected(model, ids) - logprobs).mean() > 3 * CLOSE
    await engine.update_weights(WeightUpdate(version + 2))


async def test_going_back_to_the_first_weights_leaves_the_adapter(
    engine: PausableEngine, policy: tuple[PeftModel, Path]
) -> None:
    model, directory = policy
    version = (await engine.model_info()).policy_version
    await engine.update_weights(WeightUpdate(version + 1, str(directory)))
    await engine.update_weights(WeightUpdate(version + 2))
    ids, logprobs, versions = await sampled(engine)
    assert versions == {version + 2}
    with model.disable_adapter():
        assert np.abs(expected(model, ids) - logprobs).mean() < CLOSE


async def test_the_probe_finds_what_the_logprobs_are_of(vllm_url: str) -> None:
    engine = VllmEngine(vllm_url)
    try:
        await engine.check()
        assert (await engine.model_info()).logprobs_mode == PROCESSED
    finally:
        await engine.close()
