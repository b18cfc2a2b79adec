"""On a GPU: the kernel reads what plain attention would, and a graph gives the logits of a launched step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from polar.config.settings import EngineSettings
from polar.engines.embedded import attention
from polar.engines.embedded.attention import Segment
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.scheduler import Generation, Scheduler
from tests.fakes.tiny_llama import write_tiny_llama

DEVICE = "cuda"


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 80), (32, 2, 128), (16, 16, 32)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_each_token_reads_its_own_slot_up_to_its_own_position(
    heads: int, key_heads: int, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    from polar.engines.embedded.token_attention import attend_tokens

    torch.manual_seed(0)
    keys, values = (torch.randn(5, key_heads, 1100, size, device=DEVICE).to(dtype) for _ in range(2))
    query = torch.randn(1, heads, 7, size, device=DEVICE).to(dtype)[0].transpose(0, 1)
    rows = torch.tensor([0, 1, 2, 3, 4, 4, 0], device=DEVICE)
    positions = torch.tensor([0, 511, 512, 1099, 600, 601, 63], device=DEVICE)
    out = attend_tokens(query, keys, values, rows, positions, size**-0.5)
    for at, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        seen = slice(0, position + 1)
        expected = F.scaled_dot_product_attention(
            query[at][None, :, None].double(),
            keys[row][None, :, seen].double(),
            values[row][None, :, seen].double(),
            enable_gqa=True,
        )[0, :, 0]
        assert torch.allclose(out[at].double(), expected, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SlotModel:
    directory = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load(
        EngineSettings(model=str(directory), device=DEVICE, dtype="float32", slots=4, max_context=256)
    )


def launched(model: SlotModel, segments: list[Segment], monkeypatch: Any) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(model, "_graphs", None)
        return model.forward(segments)[1].clone()


def test_a_replayed_step_gives_the_logits_of_a_launched_one(
    model: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model._graphs is not None
    prompts = [[(7 * i + 13 * slot) % 250 for i in range(20 + 50 * slot)] for slot in range(3)]
    for slot, ids in enumerate(prompts):
        model.forward([Segment(slot, 0, ids, True)])
    step = [Segment(slot, len(ids), [5 + slot], True) for slot, ids in enumerate(prompts)]
    step[1] = Segment(1, len(prompts[1]), list(range(40)), True)
    expected = launched(model, step, monkeypatch)
    _, replayed = model.forward(step)
    assert torch.allclose(replayed, expected, atol=1e-4)


def test_sampled_tokens_and_logprobs_are_those_of_the_plain_model(model: SlotModel) -> None:
    scheduler = Scheduler(model)
    prompts = [[(11 * i + slot) % 250 for i in range(30 + slot)] for slot in range(6)]
    for number, ids in enumerate(prompts):
        scheduler.submit(number, Generation(ids, 40, seed=number))
    sampled: dict[int, list[tuple[int, float]]] = {number: [] for number in range(len(prompts))}
    while scheduler.has_work:
        for token in scheduler.step():
            sampled[token.request].append((token.token_id, token.logprob))
    model._model.set_attn_implementation("sdpa")
    try:
        for number, ids in enumerate(prompts):
            tokens = [id for id, _ in sampled[number]]
            with torch.inference_mode():
                logits = model._model(torch.tensor([ids + tokens], device=DEVICE), use_cache=False).logits[0]
            rows = logits.float().log_softmax(-1)[len(ids) - 1 : -1]
            expected = rows.gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0].tolist()
            assert [logprob for _, logprob in sampled[number]] == pytest.approx(expected, abs=1e-3)
    finally:
        model._model.set_attn_implementation("polar_slots")


def test_a_long_prompt_is_the_same_in_one_step_in_several_and_in_parts(
    model: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(7 * i + 5) % 250 for i in range(240)]
    whole = launched(model, [Segment(0, 0, ids, True)], monkeypatch)
    monkeypatch.setattr(attention, "MASKED_AT_ONCE", 60)
    launched(model, [Segment(1, 0, ids[:90], False)], monkeypatch)
    step = [Segment(1, 90, ids[90:], True), Segment(2, 0, ids[:100], False), Segment(0, 240, [5], False)]
    assert torch.allclose(launched(model, step, monkeypatch), whole, atol=1e-4)


def test_new_weights_are_what_a_replayed_step_computes_with(model: SlotModel) -> None:
    ids = list(range(30))
    _, before = model.forward([Segment(0, 0, ids, True)])
    before = before.clone()
    old = {name: tensor.detach().clone() for name, tensor in model.weights.items()}
    model.use({name: tensor * 1.5 for name, tensor in old.items() if "norm" in name})
    try:
        _, after = model.forward([Segment(0, 0, ids, True)])
        assert not torch.allclose(before, after, atol=1e-2)
    finally:
        model.use(old)
