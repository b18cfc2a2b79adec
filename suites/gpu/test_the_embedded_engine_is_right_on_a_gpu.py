"""On a GPU: slots give what the plain model gives, however prompts are cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from polar.config.settings import EngineSettings
from polar.engines.embedded import attention
from polar.engines.embedded.attention import AttentionSegment
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.sampler import Draw
from polar.engines.embedded.scheduler import Generation, Scheduler
from tests.fakes.tiny_llama import write_tiny_llama

DEVICE = "cuda"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(directory: Path) -> SlotModel:
    return load(
        EngineSettings(model=str(directory), device=DEVICE, dtype="float32", slots=4, max_context=256)
    )


def test_sampled_tokens_and_logprobs_are_those_of_the_plain_model(model: SlotModel, directory: Path) -> None:
    scheduler = Scheduler(model)
    prompts = [[(11 * i + slot) % 250 for i in range(30 + slot)] for slot in range(6)]
    for number, ids in enumerate(prompts):
        scheduler.submit(number, Generation(ids, 40, Draw(seed=number)))
    sampled: dict[int, list[tuple[int, float]]] = {number: [] for number in range(len(prompts))}
    while scheduler.has_work:
        for token in scheduler.step():
            sampled[token.request].append((token.token_id, token.logprob))
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(DEVICE)
    for number, ids in enumerate(prompts):
        tokens = [id for id, _ in sampled[number]]
        with torch.inference_mode():
            logits = plain(torch.tensor([ids + tokens], device=DEVICE), use_cache=False).logits[0]
        rows = logits.float().log_softmax(-1)[len(ids) - 1 : -1]
        expected = rows.gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0].tolist()
        assert [logprob for _, logprob in sampled[number]] == pytest.approx(expected, abs=1e-3)


def test_a_long_prompt_is_the_same_in_one_step_in_several_and_in_parts(
    model: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(7 * i + 5) % 250 for i in range(240)]
    _, whole = model.forward([AttentionSegment(0, 0, ids, True)])
    monkeypatch.setattr(attention, "MASKED_AT_ONCE", 60)
    model.forward([AttentionSegment(1, 0, ids[:90], False)])
    step = [
        AttentionSegment(1, 90, ids[90:], True),
        AttentionSegment(2, 0, ids[:100], False),
        AttentionSegment(0, 240, [5], False),
    ]
    assert torch.allclose(model.forward(step)[1], whole, atol=1e-4)
