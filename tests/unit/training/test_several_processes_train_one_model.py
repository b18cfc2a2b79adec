"""Several processes train one model as one process would: dealt fairly, put together exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polar.errors import InvalidInput
from polar.training.learner import NOTHING, Deal, Dealt, cost, deal
from polar.training.objective import Measured, policy_loss
from polar.training.policy import load_policy
from polar.training.ranks import Ranks
from polar.training.run import train
from polar.training.settings import GrpoSettings, ModelSettings, ObjectiveSettings
from polar.training.sharding import Part, optimizer_part, restore_optimizer
from polar.trajectory.packing.batch import Trained, TrainingRow
from polar.trajectory.packing.pack import pack_sequences
from tests.fakes.ranks import assert_same, numbers, run_of, trained
from tests.fakes.tiny_hybrid import FAMILIES, write_tiny_hybrid
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.training_runs import quiet

PAIRS = 100.0


class Dealer(Ranks):
    """Rank 0 of several, all of whose deals are looked at."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.deals: list[Deal] = []

    def scatter(self, values: Any) -> Any:
        self.deals = list(values)
        return self.deals[0]


def batch(length: int) -> Dealt:
    none = np.empty(0, np.float32)
    nothing = Trained(np.empty(0, np.int64), none, none, none, np.empty(0, np.int32))
    row = TrainingRow("row", np.zeros(length, np.int32), nothing)
    (packed,) = pack_sequences([row], length).batches
    return Dealt(packed, np.empty(0, np.int64))


@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=9), max_size=3), st.integers(2, 5))
def test_every_minibatch_is_dealt_whole_and_all_ranks_make_as_many_passes_of_it(
    lengths: list[list[int]], size: int
) -> None:
    dealer, minibatches = Dealer(size), [list(map(batch, part)) for part in lengths]
    deal(minibatches, dealer, PAIRS)
    empty = 0
    for at, minibatch in enumerate(minibatches):
        shares = [share.minibatches[at] for share in dealer.deals]
        dealt = [one for share in shares for one in share if one is not NOTHING]
        assert sorted(map(id, dealt)) == sorted(map(id, minibatch))
        assert {len(share) for share in shares} == {-(-len(minibatch) // size)}
        empty += sum(one is NOTHING for share in shares for one in share)
    found = dealer.deals[0].numbers
    assert found["empty_passes"] == empty
    assert 0 <= found["balance"] <= 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(2, 4), st.randoms())
def test_no_other_deal_of_as_many_passes_takes_less_time(lengths: list[int], size: int, chance: Any) -> None:
    dealer, minibatch = Dealer(size), [batch(length) for length in lengths]
    deal([minibatch], dealer, PAIRS)
    passes = zip(*(share.minibatches[0] for share in dealer.deals), strict=True)
    ours = sum(max(cost(one.batch, PAIRS) for one in made if one is not NOTHING) for made in passes)
    chance.shuffle(minibatch)
    others = [minibatch[start : start + size] for start in range(0, len(minibatch), size)]
    assert ours <= sum(max(cost(one.batch, PAIRS) for one in made) for made in others) + 1e-6


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_an_empty_pass_has_a_loss_and_gradients_of_zero_everywhere(
    tmp_path: Path, family: str, name: str
) -> None:
    model = write_tiny_llama(tmp_path) if family == "llama" else write_tiny_hybrid(tmp_path, family)
    policy = load_policy(ModelSettings(name=str(model), device="cpu"))
    objective = ObjectiveSettings.model_validate({"name": name, "entropy": 0.1})
    loss = policy_loss(NOTHING.batch, Measured(*policy.measure(NOTHING.batch)), objective)
    loss.value.backward()
    assert float(loss.value.detach()) == 0
    assert all(float(total.sum()) == 0 for total in (*loss.sums.values(), *loss.partial_sums.values()))
    gradients = [one.grad for one in policy.parameters if one.grad is not None]
    assert all(bool((gradient == 0).all()) for gradient in gradients)
    assert len(gradients) == len(policy.parameters)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_optimizer_state_is_put_together_from_any_number_of_parts(cuts: list[int], width: int) -> None:
    """However many ranks wrote it, and however many rows each of them had."""
    rows = sum(cuts)
    parameter = nn.Parameter(torch.zeros(rows, width))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.arange(1.0, rows * width + 1).view(rows, width)
    optimizer.step()
    whole = optimizer_part(optimizer, {"weight": parameter})
    parts: list[Part] = [{"weight": {"step": whole["weight"]["step"]}} for _ in cuts]
    for key in ("exp_avg", "exp_avg_sq"):
        pieces = whole["weight"][key].split([cut * width for cut in cuts])
        parts = [{"weight": {**part["weight"], key: one}} for part, one in zip(parts, pieces, strict=True)]
    other = torch.optim.AdamW([parameter])
    restore_optimizer(other, {"weight": parameter}, parts)
    assert other.state[parameter].keys() == optimizer.state[parameter].keys()
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(other.state[parameter][key], value)


def test_two_processes_learn_what_one_does_and_one_goes_on_from_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    alone, both = (run_of(tiny_model, tmp_path / name) for name in ("alone", "both"))
    expected = trained(alone, processes=1)
    trained(both, processes=2, steps=2)
    assert_same(alone, expected, both, trained(both, processes=1), by=1e-4)
    assert [line.get("ranks") for line in numbers(both)] == [2, 2, None]


@pytest.mark.parametrize("transfer", ["nccl", "cuda-ipc"])
def test_weights_of_several_processes_travel_as_files_alone(tmp_path: Path, transfer: str) -> None:
    rollouts = {"tasks": ["unused"], "transfer": transfer}
    run = GrpoSettings.model_validate(
        {"out": tmp_path, "steps": 1, "model": {"device": "cpu"}, "rollouts": rollouts}
    )
    with pytest.raises(InvalidInput, match=r"is for a trainer of one process.*set it to files"):
        train(run, quiet(), processes=2)
