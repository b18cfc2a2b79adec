"""Logprobs, entropies and their gradients are those of a plain softmax, however large the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polar.errors import InvalidInput
from polar.training import head
from polar.training.head import PART, Manner, score
from polar.training.policy import load_policy
from polar.training.settings import ModelSettings

EXACT = torch.float64


def plainly(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 9),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    uses=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_a_plain_softmax(
    rows: int, chunk: int, temperature: float, uses: tuple[float, float], seed: int
) -> None:
    torch.manual_seed(seed)
    vocabulary = 37
    hidden = torch.randn(rows, 5, dtype=EXACT, requires_grad=True)
    weight = torch.randn(vocabulary, 5, dtype=EXACT, requires_grad=True)
    labels, parts = torch.randint(vocabulary, (rows,)), torch.randn(2, rows, dtype=EXACT)
    manner = Manner(EXACT, chunk, temperature)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "PART", 8)
        for made in (score(hidden, weight, labels, manner), plainly(hidden, weight, labels, temperature)):
            used = [use * (part * one).sum() for use, part, one in zip(uses, parts, made, strict=True) if use]
            gradients = torch.autograd.grad(torch.stack(used).sum(), (hidden, weight))
            found.append((*made, *gradients))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def one_after_another(left: Tensor, right: Tensor) -> Tensor:
    """A product as the plainest kernel makes it: each sum in float32, from its first summand to its last."""
    total = np.zeros((len(left), right.shape[1]), np.float32)
    for column, row in zip(left.T.numpy(), right.numpy(), strict=True):
        total += column[:, None] * row
    return torch.as_tensor(total)


def test_a_vocabulary_of_unlikely_tokens_is_not_lost_in_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vocabulary = 16 * PART
    # The first token is likely, all others together make up 3e-4; embeddings have a direction in common.
    matrix = torch.randn(vocabulary, 4) * 0.1 + torch.tensor([0.5, 0.0, 0.0, 0.0])
    matrix[:, 3] = 0.0
    matrix[0, 3] = 0.185
    hidden = torch.tensor([[0.0, 0.0, 0.0, 100.0]], requires_grad=True)
    unlikely = torch.tensor([1])
    monkeypatch.setattr(head, "product", one_after_another)

    def gradient(logprobs: Tensor) -> Tensor:
        return torch.autograd.grad(logprobs.sum(), hidden)[0].double()

    exact = gradient(plainly(hidden.double(), matrix.double(), unlikely, 1.0)[0])

    def off(part: int) -> float:
        monkeypatch.setattr(head, "PART", part)
        found = gradient(score(hidden, matrix, unlikely, Manner(torch.float32, 1))[0])
        return float((found - exact).abs().max() / exact.abs().max())

    lost = off(vocabulary)
    assert lost > 1e-4
    assert off(PART) < lost / 10


def test_in_half_precision_sums_are_still_kept_in_float32() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 16).requires_grad_()
    hidden = torch.randn(4096, 16)
    labels = torch.randint(64, (4096,))
    rounded, matrix = (one.detach().bfloat16().double().requires_grad_() for one in (hidden, weight))
    ours, _ = score(hidden, weight, labels, Manner(torch.bfloat16, 8))
    assert ours.dtype is torch.float32
    theirs, _ = plainly(rounded, matrix, labels, 1.0)
    # Only what was multiplied was rounded, so nothing is left of a logit's own eighth of a unit …
    assert float((ours - theirs).detach().abs().max()) < 1e-5
    (made,) = torch.autograd.grad(ours.sum(), weight)
    (expected,) = torch.autograd.grad(theirs.sum(), matrix)
    # … and 512 chunks were added up: in bfloat16 they would stop growing.
    assert float((made - expected).norm() / expected.norm()) < 1e-3


def test_a_last_layer_with_an_adapter_of_its_own_is_refused(tiny_model: Path) -> None:
    lora = {"rank": 2, "targets": ["q_proj", "lm_head"]}
    settings = ModelSettings.model_validate({"name": str(tiny_model), "lora": lora, "device": "cpu"})
    with pytest.raises(InvalidInput, match="more than one matrix"):
        load_policy(settings)
