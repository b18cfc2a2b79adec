"""Packed, models with linear attention have the gradients of their traces alone, computed by transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import flex_attention as flex_integration
from transformers.models.qwen3_5 import modeling_qwen3_5

from polar.training import policy as policies
from polar.training.policy import TrainerPolicy, block_attention, load_policy
from polar.training.ranks import Ranks
from polar.training.settings import ModelSettings
from polar.trajectory.packing.batch import Batch, Packing, TrainingRow, row
from polar.trajectory.packing.pack import pack_alone, pack_sequences, pack_trees
from tests.fakes.rows import row_lists, trace
from tests.fakes.tiny_hybrid import FAMILIES, SHAPE, write_tiny_hybrid

Pack = Callable[[list[TrainingRow], int], Packing]
packs = pytest.mark.parametrize("pack", [pack_sequences, pack_trees])
EXACT = 1e-10


def load(directory: Path, *, is_packed: bool = True, **model: Any) -> TrainerPolicy:
    asked = {"name": str(directory), "device": "cpu", "precision": "float64", **model}
    return load_policy(ModelSettings.model_validate(asked), is_packed=is_packed)


@pytest.fixture(scope="module")
def packed(tiny_hybrid: Path) -> TrainerPolicy:
    return load(tiny_hybrid)


@pytest.fixture(scope="module")
def plain(tiny_hybrid: Path) -> TrainerPolicy:
    """The model as transformers computes it."""
    return load(tiny_hybrid, is_packed=False)


def row_of(name: str, ids: Sequence[int]) -> TrainingRow:
    weights = np.random.default_rng(len(ids)).normal(size=len(ids) - 1)
    return row(name, trace(list(ids[:1]), list(ids[1:]), [1] * (len(ids) - 1)), weights=weights)


def rows_of(cuts: Sequence[tuple[int, int]], length: int = 100) -> list[TrainingRow]:
    """Rows that begin with so many tokens of one, and go on with so many of their own."""
    random = np.random.default_rng(0)
    shared = random.integers(0, SHAPE["vocab_size"], length).tolist()
    return [
        row_of(str(number), [*shared[:cut], *random.integers(0, SHAPE["vocab_size"], own).tolist()])
        for number, (cut, own) in enumerate(cuts)
    ]


def gradient(policy: TrainerPolicy, batches: Sequence[Batch]) -> list[Any]:
    policy.model.zero_grad()
    for batch in batches:
        logprobs, entropy = policy.measure(batch)
        weights = torch.as_tensor(batch.terms.weights)
        (weights * (logprobs + 0.1 * entropy)).sum().backward()
    return [parameter.grad.clone() for parameter in policy.parameters]


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest difference, relative to the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in one)
    assert largest > 1e-3
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) / largest


def apart(packed: TrainerPolicy, plain: TrainerPolicy, pack: Pack, rows: list[TrainingRow]) -> float:
    alone = gradient(plain, pack_alone(rows, 10_000).batches)
    batches = [batch.padded(len(batch) + 5) for batch in pack(rows, 250).batches]
    return difference(alone, gradient(packed, batches))


def chain(rows: list[TrainingRow], times: int) -> list[TrainingRow]:
    """The same forest with each token so many times, so that stretches are longer than a chunk."""
    return [row_of(one.name, np.repeat(one.ids, times).tolist()) for one in rows]


@packs
@settings(max_examples=12)
@given(
    rows=row_lists(max_rows=6, vocabulary=40) | row_lists(max_rows=6), times=st.sampled_from([1, 1, 2, 15])
)
def test_random_forests_have_the_gradients_of_their_traces(
    packed: TrainerPolicy, plain: TrainerPolicy, pack: Pack, rows: list[TrainingRow], times: int
) -> None:
    assert apart(packed, plain, pack, chain(rows, times)) <= EXACT


FORESTS = {
    "one_trace": [(100, 30)],
    "many_roots": [(0, length) for length in (2, 70, 3, 64, 65, 1 + 128, 5)],
    "a_deep_chain_of_single_tokens": [(cut, 1) for cut in range(1, 25)],
    "forks_around_the_end_of_a_chunk": [(cut, 3) for cut in (61, 62, 63, 64, 65, 66)],
    "rows_that_end_where_others_go_on": [(40, 0), (70, 0), (100, 0), (70, 9), (40, 80)],
    "siblings_of_all_lengths": [(10, own) for own in (1, 1, 2, 40, 70, 140)],
}


@packs
@pytest.mark.parametrize("forest", FORESTS)
def test_forests_of_every_shape_have_the_gradients_of_their_traces(
    packed: TrainerPolicy, plain: TrainerPolicy, pack: Pack, forest: str
) -> None:
    assert apart(packed, plain, pack, rows_of(FORESTS[forest])) <= EXACT


MIXED = [(60, 2), (60, 30), (3, 70), (2, 1), (0, 20), (61, 9)]


@packs
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_such_layers_has_them(tmp_path: Path, pack: Pack, family: str) -> None:
    directory = write_tiny_hybrid(tmp_path, family)
    assert apart(load(directory), load(directory, is_packed=False), pack, rows_of(MIXED)) <= EXACT


def test_activations_that_are_computed_again_follow_the_same_tree(
    tiny_hybrid: Path, plain: TrainerPolicy
) -> None:
    again = load(tiny_hybrid, gradient_checkpointing=True)
    assert apart(again, plain, pack_trees, rows_of(MIXED)) <= EXACT


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_full_attention_take_block_masks_in_between(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; forward only and not compiled, since a CPU has no backward of FlexAttention."""
    monkeypatch.setattr(
        flex_integration,
        "compile_friendly_flex_attention",
        lambda *inputs, training, **options: flex_attention(*inputs, **options),
    )
    directory = write_tiny_hybrid(tmp_path, family)
    attention = block_attention(AutoConfig.from_pretrained(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention)
    own = ModelSettings(name=str(directory))
    blocks = TrainerPolicy(model, directory, own, torch.device("cpu"), Ranks(), most_tokens=512)
    (batch,) = pack_trees(rows_of(MIXED), 1_000).batches
    dense = load(directory, precision="float32")
    torch.testing.assert_close(blocks.logprobs(batch), dense.logprobs(batch), rtol=1e-4, atol=1e-4)


def test_compiled_layers_follow_the_tree(tiny_hybrid: Path, plain: TrainerPolicy) -> None:
    """Compiled, functions are looked up anew: what replaces them has to stay out of that."""
    policy = load(tiny_hybrid, precision="float32")
    for layer in policy.model.model.layers:
        layer.compile(backend="eager")
    assert apart(policy, plain, pack_trees, rows_of(MIXED)) <= 1e-4


def test_adapters_of_such_layers_follow_the_tree(tiny_hybrid: Path) -> None:
    found = []
    for is_packed, pack in ((False, pack_alone), (True, pack_trees)):
        torch.manual_seed(0)
        policy = load(tiny_hybrid, is_packed=is_packed, lora={"rank": 2})
        found.append(gradient(policy, pack(rows_of(MIXED), 10_000).batches))
    assert difference(*found) <= EXACT


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_lower_precisions_round_trees_as_they_round_traces(
    tiny_hybrid: Path, plain: TrainerPolicy, precision: str
) -> None:
    exact = gradient(plain, pack_alone(rows_of(MIXED), 10_000).batches)
    alone = load(tiny_hybrid, is_packed=False, precision=precision)
    tree = load(tiny_hybrid, precision=precision)
    rounded = difference(exact, gradient(alone, pack_alone(rows_of(MIXED), 10_000).batches))
    assert apart(tree, plain, pack_trees, rows_of(MIXED)) <= 3 * rounded


def test_the_reference_follows_the_tree_as_the_policy_does(tiny_hybrid: Path) -> None:
    policy = load_policy(ModelSettings(name=str(tiny_hybrid), device="cpu"), has_reference=True)
    (batch,) = pack_trees(rows_of(MIXED), 1_000).batches
    ours = policy.logprobs(batch)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.05)
    torch.testing.assert_close(policy.reference_logprobs(batch), ours)


def test_kernels_are_given_sequences_of_any_length(
    tiny_hybrid: Path, plain: TrainerPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash-linear-attention takes them: joined, with where each begins and ends."""
    rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def kernel(*inputs: Any, initial_state: Any, cu_seqlens: Any, **kwargs: Any) -> tuple[Any, Any]:
        if cu_seqlens is None:
            return tuple(rule(*inputs, initial_state=initial_state, **kwargs))
        made, states = [], []
        gates = {name: kwargs.pop(name) for name in ("g", "beta")}
        for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            output, state = rule(
                *(one[:, begin:end] for one in inputs),
                **{name: gate[:, begin:end] for name, gate in gates.items()},
                initial_state=None if initial_state is None else initial_state[number, None],
                **kwargs,
            )
            made.append(output)
            states.append(state)
        joined.append(len(states))
        return torch.cat(made, 1), torch.cat(states) if kwargs["output_final_state"] else None

    joined: list[int] = []
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernel)
    monkeypatch.setattr(policies, "has_kernels", lambda *_: True)
    for pack in (pack_sequences, pack_trees):
        assert apart(load(tiny_hybrid), plain, pack, rows_of(MIXED)) <= EXACT
    assert max(joined) > 2
