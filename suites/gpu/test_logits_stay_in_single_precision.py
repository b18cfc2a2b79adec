"""On a GPU: what half precision multiplies is summed in float32, by the engine as by the trainer."""

from __future__ import annotations

from pathlib import Path

import torch

from polar.config.settings import EngineSettings
from polar.engines.embedded.attention import AttentionSegment
from polar.engines.embedded.model import load, product
from polar.training.head import PART, Manner, score
from tests.fakes.tiny_llama import write_tiny_llama

DEVICE = "cuda"


def test_products_of_half_precision_are_not_rounded_to_it() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        left, right = torch.randn(5, 300).to(dtype), torch.randn(300, 7).to(dtype)
        made = product(left.to(DEVICE), right.to(DEVICE))
        assert made.dtype is torch.float32
        assert torch.allclose(made.cpu().double(), left.double() @ right.double(), atol=1e-4, rtol=0)


def test_an_engine_in_half_precision_gives_logits_in_single(tmp_path: Path) -> None:
    settings = EngineSettings(
        model=str(write_tiny_llama(tmp_path)), device=DEVICE, dtype="bfloat16", slots=2, max_context=256
    )
    model = load(settings)
    for segment in (
        AttentionSegment(0, 0, [(7 * i) % 250 for i in range(100)], True),
        AttentionSegment(0, 100, [5], True),
    ):
        _, logits = model.forward([segment])
        assert logits.dtype is torch.float32
        assert not torch.equal(logits, logits.bfloat16().float())


def test_scores_and_gradients_are_those_of_a_cpu() -> None:
    torch.manual_seed(0)
    vocabulary = 3 * PART + 5
    hidden, weight = torch.randn(70, 32), torch.randn(vocabulary, 32)
    labels = torch.randint(vocabulary, (70,))
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-3)):
        found = []
        for device in ("cpu", DEVICE):
            given, matrix = (one.to(device).requires_grad_() for one in (hidden, weight))
            logprobs, entropy = score(given, matrix, labels.to(device), Manner(dtype, 32))
            gradients = torch.autograd.grad((logprobs + 0.1 * entropy).sum(), (given, matrix))
            found.append([one.detach().cpu() for one in (logprobs, entropy, *gradients)])
        for there, here in zip(*found, strict=True):
            assert float((there - here).norm() / here.norm()) < near
