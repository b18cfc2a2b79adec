"""What a GPU is given: sizes that compile once, arrays that nobody waits for, numbers read once an update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polar.training.head import to_device
from polar.training.learner import Learner
from polar.training.material import PolicyVersions, material
from polar.training.metrics import GpuUsage
from polar.training.objective import Loss, Measured
from polar.training.policy import SHAPES, _granule, load_policy
from polar.training.settings import (
    BatchSettings,
    DivergenceLimits,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
)
from polar.trajectory.packing.batch import BLOCK, Batch
from tests.fakes.training_runs import groups

CPU = torch.device("cpu")


@pytest.mark.parametrize("most_tokens", [2, 128, 1000, 4096, 32_768, 100_000])
def test_batches_have_few_sizes_and_hold_the_budget(most_tokens: int) -> None:
    # Only a GPU pads its batches, so that nothing public shows it here.
    granule = _granule(most_tokens)
    sizes = {
        -(-length // granule) * granule for length in range(1, most_tokens + 1, max(1, most_tokens // 97))
    }
    assert len(sizes | {-(-most_tokens // granule) * granule}) <= SHAPES
    assert max(sizes) <= most_tokens + SHAPES * BLOCK
    assert granule % BLOCK == 0


def test_arrays_keep_their_values_whatever_their_layout_in_memory() -> None:
    wide = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert to_device(wide[:, 1], CPU).tolist() == [1, 5, 9]
    assert to_device(np.arange(4, dtype=np.float32)[::-1], CPU).tolist() == [3, 2, 1, 0]


def test_numbers_of_an_update_are_sums_of_losses_and_means_over_terms(tiny_model: Path) -> None:
    made = material(groups(), ObjectiveSettings(), BatchSettings(tokens=40), PolicyVersions(0))
    batches = made.packing.batches
    assert len(batches) > 1
    policy = load_policy(ModelSettings(name=str(tiny_model), device="cpu"))
    logprobs, entropy = map(torch.cat, zip(*map(policy.measure, batches), strict=True))
    slopes = torch.autograd.grad(logprobs.sum(), policy.parameters)

    def loss(_: Batch, measured: Measured) -> Loss:
        return Loss(measured.logprobs.sum(), {"entropy": measured.entropy.detach().sum()})

    found = Learner(policy, loss, OptimizerSettings(), DivergenceLimits(), steps=1).learn(made)
    assert found["loss"] == pytest.approx(float(logprobs.detach().sum()))
    assert found["entropy"] == pytest.approx(float(entropy.detach().mean()))
    assert found["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(slopes)), rel=1e-4)


def test_without_a_gpu_nothing_is_said_of_it() -> None:
    with GpuUsage(CPU) as busy:
        busy.begin()
        assert busy.share() is None


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "adapter"])
def test_bfloat16_is_close_and_trains_what_is_kept_in_float32(
    tiny_model: Path, lora: dict[str, int] | None
) -> None:
    (batch,) = material(
        groups(), ObjectiveSettings(), BatchSettings(), versions=PolicyVersions(0)
    ).packing.batches
    found = {}
    for precision in ("float32", "bfloat16"):
        settings = ModelSettings.model_validate(
            {"name": str(tiny_model), "device": "cpu", "precision": precision, "lora": lora}
        )
        policy = load_policy(settings)
        logprobs, _ = policy.measure(batch)
        logprobs.sum().backward()
        assert logprobs.dtype is torch.float32
        assert {parameter.dtype for parameter in policy.parameters} == {torch.float32}
        assert any(bool(p.grad.abs().max() > 0) for p in policy.parameters if p.grad is not None)
        found[precision] = logprobs.detach()
    apart = (found["float32"] - found["bfloat16"]).abs()
    assert 0 < float(apart.max()) < 0.5
