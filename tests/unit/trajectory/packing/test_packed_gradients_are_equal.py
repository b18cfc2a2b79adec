"""Training a packed batch gives the gradient of training each of its traces apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM

from polar.trajectory.packing.batch import Batch, Packing, TrainingRow, block_mask, dense_mask, mask_mod
from polar.trajectory.packing.pack import pack_sequences, pack_trees
from tests.fakes.rows import row_lists
from tests.fakes.tiny_llama import write_tiny_llama

TOLERANCE = 1e-4
Pack = Callable[[list[TrainingRow], int], Packing]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    directory: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    yield AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.set_num_threads(before)


def clipped_loss(logprobs: Any, sampled: Any, advantages: Any, weights: Any) -> Any:
    """PPO's: not linear in the advantage, so terms that were added up wrongly would show."""
    ratio = (logprobs - sampled).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(weights * surrogate).sum()


def apart(model: Any, rows: list[TrainingRow]) -> list[Any]:
    """The gradients of every row computed by itself."""
    model.zero_grad()
    for row in rows:
        ids = torch.as_tensor(row.ids).long()
        logprobs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        at = torch.as_tensor(row.trained.depths)
        taken = logprobs[at - 1, ids[at]]
        trained = row.trained
        clipped_loss(
            taken, *map(torch.as_tensor, (trained.logprobs, trained.advantages, trained.weights))
        ).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def packed(model: Any, batches: tuple[Batch, ...]) -> list[Any]:
    """The gradients of the batches, as a trainer would compute them."""
    model.zero_grad()
    for batch in batches:
        logprobs = (
            model(
                torch.as_tensor(batch.ids)[None].long(),
                position_ids=torch.as_tensor(batch.positions)[None].long(),
                attention_mask=torch.as_tensor(dense_mask(batch))[None, None],
                use_cache=False,
            )
            .logits[0]
            .log_softmax(-1)
        )
        taken = logprobs[torch.as_tensor(batch.sources), torch.as_tensor(batch.labels).long()]
        terms = batch.terms
        clipped_loss(
            taken, *map(torch.as_tensor, (terms.logprobs, terms.advantages, terms.weights))
        ).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest difference, relative to the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in one)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) / max(largest, 1e-12)


@pytest.mark.parametrize("pack", [pack_sequences, pack_trees])
@settings(max_examples=25)
@given(rows=row_lists(max_rows=6, vocabulary=40) | row_lists(max_rows=6))
def test_packed_gradients_are_those_of_the_traces_apart(
    model: Any, pack: Pack, rows: list[TrainingRow]
) -> None:
    packing = pack(rows, 40)
    kept = [row for row in rows if row.name not in packing.over_budget and len(row.trained.depths)]
    if kept:
        assert difference(apart(model, kept), packed(model, packing.batches)) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=10)
@given(rows=row_lists(max_rows=6))
def test_flex_attention_takes_the_block_mask(rows: list[TrainingRow]) -> None:
    """Forward only: torch has no backward of FlexAttention on a CPU."""
    torch.manual_seed(0)
    batch = pack_trees(rows, 10_000).batches[0]
    query, key, value = torch.randn(3, 1, 2, len(batch), 16).unbind()
    made = flex_attention(query, key, value, block_mask=block_mask(batch))
    dense = torch.as_tensor(dense_mask(batch))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    assert float((made - expected).abs().max()) <= TOLERANCE


@settings(max_examples=10)
@given(rows=row_lists(max_rows=6))
def test_the_block_mask_is_the_one_that_torch_makes_of_the_dense_mask(rows: list[TrainingRow]) -> None:
    batch = pack_trees(rows, 10_000).batches[0].padded(64)
    ours = block_mask(batch, block=8)
    theirs = create_block_mask(mask_mod(batch), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=8)
    for whole in (True, False):
        assert torch.equal(_blocks(ours, whole), _blocks(theirs, whole))


def _blocks(mask: Any, whole: bool) -> Any:
    """[query blocks, key blocks] as the mask lists them."""
    counts, indices = (
        (mask.full_kv_num_blocks, mask.full_kv_indices) if whole else (mask.kv_num_blocks, mask.kv_indices)
    )
    listed = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for query, count in enumerate(counts[0, 0]):
        listed[query, indices[0, 0, query, :count].long()] = True
    return listed
