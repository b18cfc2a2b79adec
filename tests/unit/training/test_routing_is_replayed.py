"""Tokens of a mixture of experts go to the experts that they were sampled with, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from polar.errors import InvalidInput
from polar.training.material import PolicyVersions, material
from polar.training.policy import TrainerPolicy, load_policy
from polar.training.routing import RoutingReplay, routers
from polar.training.settings import BatchSettings, ModelSettings, ObjectiveSettings
from polar.trajectory.learnable import Group
from polar.trajectory.packing.batch import Batch, Trained, TrainingRow
from polar.trajectory.packing.pack import pack_alone, pack_sequences, pack_trees
from tests.fakes.routing import routing_of
from tests.fakes.scripted_rollouts import sample, turns
from tests.fakes.tiny_hybrid import write_tiny_hybrid
from tests.fakes.tiny_moe import SMALL, NoisySampler, write_tiny_moe
from tests.fakes.trace_oracle import context

LAYERS, EXPERTS, CHOSEN = SMALL["num_hidden_layers"], SMALL["num_experts"], SMALL["num_experts_per_tok"]
FAMILIES = ("Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss", "DeepseekV3", "Glm4Moe")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_moe(tmp_path_factory.mktemp("moe"))


def row(name: str, sampler: NoisySampler, ids: list[int]) -> TrainingRow:
    logprobs, routing = sampler.score(ids)
    count = len(ids) - 1
    ones, versions = np.ones(count, np.float32), np.zeros(count, np.int32)
    trained = Trained(np.arange(1, len(ids)), ones, ones, logprobs.astype(np.float32), versions)
    return TrainingRow(name, np.array(ids, np.int32), trained, routing)


def rows_of(directory: Path, noise: float) -> list[TrainingRow]:
    """Three that begin alike."""
    sampler = NoisySampler(directory, noise)
    random = np.random.default_rng(0)
    shared = random.integers(0, SMALL["vocab_size"], 12).tolist()
    ends = [random.integers(0, SMALL["vocab_size"], 20).tolist() for _ in range(3)]
    return [row(str(at), sampler, shared + end) for at, end in enumerate(ends)]


def policy_of(directory: Path, **settings: Any) -> TrainerPolicy:
    return load_policy(ModelSettings(name=str(directory), device="cpu", **settings))


def apart(policy: TrainerPolicy, batches: tuple[Batch, ...]) -> float:
    """The mean difference of logprobs."""
    found = [np.abs(policy.logprobs(batch).numpy() - batch.terms.logprobs) for batch in batches]
    return float(np.concatenate(found).mean())


LAYOUTS = {"tree": pack_trees, "sequence": pack_sequences, "alone": pack_alone}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_routing_gives_the_logprobs_that_were_sampled_with(moe: Path, layout: str) -> None:
    batches = LAYOUTS[layout](rows_of(moe, noise=0.3), 128).batches
    assert apart(policy_of(moe), batches) < 1e-5
    assert apart(policy_of(moe, routing="own"), batches) > 1e-2


def test_a_model_with_linear_attention_replays_it_along_a_tree(tmp_path: Path) -> None:
    hybrid = write_tiny_hybrid(tmp_path, "Qwen3Next")
    batches = pack_trees(rows_of(hybrid, noise=0.3), 128).batches
    assert apart(policy_of(hybrid), batches) < 1e-5
    assert apart(policy_of(hybrid, routing="own"), batches) > 1e-2


def test_tokens_without_routing_take_the_routers_own(moe: Path) -> None:
    steady = NoisySampler(moe, noise=0.0)
    one = row("0", steady, list(range(20)))
    assert one.routing is not None
    one.routing[5:9] = 0
    (batch,) = pack_alone([one], 64).batches
    assert apart(policy_of(moe), (batch,)) < 1e-5


def test_the_router_learns_from_what_is_replayed(moe: Path) -> None:
    policy = policy_of(moe)
    (batch,) = pack_trees(rows_of(moe, noise=0.3), 128).batches
    policy.measure(batch)[0].sum().backward()
    gradients = [router.module.weight.grad for router in routers(policy.model)]
    assert len(gradients) == LAYERS
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_activations_that_are_computed_twice_are_routed_twice_alike(moe: Path) -> None:
    batch = pack_trees(rows_of(moe, noise=0.3), 128).batches[0]
    gradients = []
    for again in (False, True):
        policy = policy_of(moe, gradient_checkpointing=again)
        policy.measure(batch)[0].sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters])
    for once, twice in zip(*gradients, strict=True):
        torch.testing.assert_close(once, twice)


def test_the_reference_is_routed_as_the_policy_is(moe: Path) -> None:
    settings = ModelSettings(name=str(moe), device="cpu")
    policy = load_policy(settings, has_reference=True)
    (batch,) = pack_trees(rows_of(moe, noise=0.3), 128).batches
    ours = policy.logprobs(batch)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.05)
    torch.testing.assert_close(policy.reference_logprobs(batch), ours)


def test_rows_share_only_tokens_that_went_to_the_same_experts(moe: Path) -> None:
    first, second, _ = rows_of(moe, noise=0.3)
    assert first.routing is not None
    assert second.routing is not None
    assert (first.routing[:12] != second.routing[:12]).any()
    alike = replace(second, routing=np.concatenate([first.routing[:12], second.routing[12:]]))
    assert pack_trees([first, alike], 128).stats.packed_tokens == 12 + 20 + 20
    assert pack_trees([first, second], 128).stats.packed_tokens > 12 + 20 + 20


def test_a_token_that_goes_to_one_expert_of_two_bytes_is_replayed(tmp_path: Path) -> None:
    directory = write_tiny_moe(tmp_path, num_experts=300, num_experts_per_tok=1, moe_intermediate_size=4)
    one = row("0", NoisySampler(directory, noise=0.0), list(range(20)))
    assert one.routing is not None
    assert one.routing.dtype == np.uint16
    (batch,) = pack_alone([one], 64).batches
    assert apart(policy_of(directory), (batch,)) < 1e-5


def test_routing_of_another_model_is_refused(moe: Path, tiny_model: Path) -> None:
    (one, *_) = rows_of(moe, noise=0.0)
    assert one.routing is not None
    for routing in (one.routing[:, :2], one.routing + np.uint8(EXPERTS)):
        (batch,) = pack_alone([replace(one, routing=routing)], 128).batches
        with pytest.raises(InvalidInput, match="experts of each token were recorded"):
            policy_of(moe).logprobs(batch)
    (batch,) = pack_alone([one], 128).batches
    with pytest.raises(InvalidInput, match="no router"):
        policy_of(tiny_model).logprobs(batch)
    policy_of(tiny_model, routing="own").logprobs(batch)


def test_a_step_counts_tokens_whose_experts_nobody_told() -> None:
    calls = turns((1, 2, 3), [[10, 11], [13]])
    told = [replace(call, routing=routing_of(context(call))) for call in calls]
    half = [told[0], replace(told[1], routing=None)]
    nothing = turns((1, 2, 3), [[20, 21]])
    samples = tuple(
        sample(tuple(completions), reward, number=number)
        for number, (completions, reward) in enumerate([(told, 1.0), (half, 0.0), (nothing, 0.0)])
    )
    step = material([Group("task", samples)], ObjectiveSettings(), BatchSettings(), PolicyVersions(0))
    # The last token of the first answer, and the result of two tokens; the last of all needs none. Of the
    # session that nothing was told of, all five but the last.
    assert step.numbers["unrouted_tokens"] == 3 + 4
    (batch,) = step.packing.batches
    assert batch.routing is not None
    plain = material(
        [Group("task", (sample(calls, 1.0), sample(calls, 0.0, number=1)))],
        ObjectiveSettings(),
        BatchSettings(),
        PolicyVersions(0),
    )
    assert "unrouted_tokens" not in plain.numbers
    assert plain.packing.batches[0].routing is None


def _tiny(family: str) -> nn.Module:
    changes = {"head_dim": 4} if family == "DeepseekV3" else {}
    config = getattr(transformers, f"{family}Config")(
        **SMALL | changes,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        first_k_dense_replace=1,
        decoder_sparse_step=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.eval()


def _any_experts(count: int) -> Iterator[np.ndarray[Any, Any]]:
    random = np.random.default_rng(1)
    for _ in range(count):
        yield np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_of_every_family_take_what_is_replayed(family: str) -> None:
    model = _tiny(family)
    ids = torch.arange(10)[None]
    taken: dict[int, torch.Tensor] = {}
    for router in routers(model):
        router.module.register_forward_hook(
            lambda _m, _i, made, layer=router.layer: taken.__setitem__(layer, made[2])
        )
    replay = RoutingReplay([model])
    wanted = np.stack(list(_any_experts(10))).astype(np.uint8)
    replay.replay(wanted, LAYERS, torch.device("cpu"))
    with torch.no_grad():
        model(ids)
        assert taken
        for layer, experts in taken.items():
            assert experts.sort(-1).values.tolist() == np.sort(wanted[:, layer], -1).tolist()
        replay.replay(None, LAYERS, torch.device("cpu"))
        model(ids)
        assert any(
            experts.sort(-1).values.tolist() != np.sort(wanted[:, layer], -1).tolist()
            for layer, experts in taken.items()
        )


class SortingRouter(nn.Module):  # type: ignore[misc]
    """Chooses its experts in another way than by `torch.topk`."""

    top_k, num_experts = CHOSEN, EXPERTS

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = scores.argsort(-1, descending=True)[:, : self.top_k]
        return scores.gather(-1, chosen), chosen


def test_a_router_that_cannot_be_replayed_is_not_passed_over() -> None:
    model = nn.Sequential(nn.ModuleDict({"gate": SortingRouter()}))
    (router,) = routers(nn.ModuleDict({"layers": model}))
    replay = RoutingReplay([nn.ModuleDict({"layers": model})])
    scores = torch.rand(5, EXPERTS)
    replay.replay(None, 1, torch.device("cpu"))
    _, own = router.module(scores)
    replay.replay(np.ones((5, 1, CHOSEN), np.uint8), 1, torch.device("cpu"))
    with pytest.raises(InvalidInput, match="SortingRouter") as refused:
        router.module(scores)
    assert "model.routing" in (refused.value.hint or "")
    # One that goes by the token's id chooses what was recorded by itself.
    replay.replay(own.flip(-1).numpy().astype(np.uint8)[:, None], 1, torch.device("cpu"))
    assert router.module(scores)[1].tolist() == own.tolist()
