"""Whatever rows are packed, each trained token is there once a row, in its own context and place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import InvalidInput
from polar.models.chat import FinishReason
from polar.models.completion import Completion
from polar.trajectory.packing.batch import PADDING, Batch, Packing, TrainingRow, blocks, dense_mask, row, rows
from polar.trajectory.packing.pack import first_fit_decreasing, pack_sequences, pack_trees
from polar.trajectory.per_request import PerRequest
from tests.captures import grow
from tests.fakes.rows import row_lists, trace
from tests.fakes.sessions import completion

Pack = Callable[[list[TrainingRow], int], Packing]
packs = pytest.mark.parametrize("pack", [pack_sequences, pack_trees])
budgets = st.integers(4, 60)


def context(batch: Batch, token: int) -> list[int]:
    """The ids that a token sees, itself included, in the order of their positions."""
    seen = np.flatnonzero(dense_mask(batch)[token])
    assert batch.positions[seen].tolist() == list(range(len(seen)))
    return [int(id) for id in batch.ids[seen]]


@packs
@given(row_lists(), budgets)
def test_a_trained_token_sees_exactly_its_row_up_to_it(
    pack: Pack, given: list[TrainingRow], budget: int
) -> None:
    by_name = {row.name: row for row in given}
    for batch in pack(given, budget).batches:
        depths = batch.positions[batch.terms.targets]
        for number, name in enumerate(batch.names):
            own = batch.terms.rows == number
            row = by_name[name]
            assert depths[own].tolist() == row.trained.depths.tolist()
            for target, depth in zip(batch.terms.targets[own], depths[own], strict=True):
                assert context(batch, target) == row.ids[: depth + 1].tolist()


@packs
@given(row_lists(), budgets)
def test_each_row_is_in_one_batch_or_named(pack: Pack, given: list[TrainingRow], budget: int) -> None:
    packing = pack(given, budget)
    packed = [name for batch in packing.batches for name in batch.names]
    assert Counter([*packed, *packing.over_budget]) == Counter(row.name for row in given)
    assert set(packing.over_budget) == {row.name for row in given if len(row.ids) > budget}
    assert all(len(batch) <= budget for batch in packing.batches)
    assert packing.stats.padding_tokens == sum(budget - len(batch) for batch in packing.batches)


@packs
@given(row_lists(), budgets)
def test_terms_carry_the_numbers_of_their_tokens(pack: Pack, given: list[TrainingRow], budget: int) -> None:
    by_name = {row.name: row for row in given}
    for batch in pack(given, budget).batches:
        for number, name in enumerate(batch.names):
            own, trained = batch.terms.rows == number, by_name[name].trained
            for field in ("weights", "advantages", "logprobs", "versions"):
                assert np.array_equal(getattr(batch.terms, field)[own], getattr(trained, field)), field
        assert batch.weights.sum() == pytest.approx(batch.terms.weights.sum(), rel=1e-5)


@packs
@given(row_lists(), budgets)
def test_logits_come_from_the_token_before(pack: Pack, given: list[TrainingRow], budget: int) -> None:
    for batch in pack(given, budget).batches:
        for source, target, label in zip(batch.sources, batch.terms.targets, batch.labels, strict=True):
            assert context(batch, source) == context(batch, target)[:-1]
            assert label == batch.ids[target]
        roots = batch.predecessors < 0
        assert (batch.positions[roots] == 0).all()
        assert roots.sum() == len(set(batch.segments.tolist()))


@given(row_lists(), budgets)
def test_a_tree_holds_each_distinct_prefix_once(given: list[TrainingRow], budget: int) -> None:
    packing = pack_trees(given, budget)
    packed = [row for row in given if row.name not in packing.over_budget]
    prefixes = {tuple(row.ids[:end].tolist()) for row in packed for end in range(1, len(row.ids) + 1)}
    assert packing.stats.unique_tokens == len(prefixes)
    assert packing.stats.packed_tokens == sum(len(batch) for batch in packing.batches)
    assert packing.stats.row_tokens == sum(len(row.ids) for row in packed)
    assert packing.stats.repeated_tokens >= 0
    roomy = pack_trees(given, 10_000).stats
    assert roomy.repeated_tokens == 0


@given(row_lists(), budgets, st.integers(1, 9))
def test_blocks_are_those_of_the_dense_mask(given: list[TrainingRow], budget: int, block: int) -> None:
    for batch in pack_trees(given, budget).batches:
        dense = dense_mask(batch)
        partial, full = blocks(torch.as_tensor(batch.ends), block)
        for query in range(len(partial)):
            for key in range(len(partial)):
                square = dense[query * block :, key * block :][:block, :block]
                assert full[query, key] == (square.all() and query != key)
                assert (partial | full)[query, key] == square.any()


@given(row_lists(), st.integers(0, 9))
def test_padding_sees_only_itself(given: list[TrainingRow], count: int) -> None:
    (batch,) = pack_trees(given, 10_000).batches
    padded = batch.padded(len(batch) + count, id=9)
    mask = dense_mask(padded)
    assert np.array_equal(mask[: len(batch), : len(batch)], dense_mask(batch))
    assert np.array_equal(mask[len(batch) :], np.eye(len(padded), dtype=bool)[len(batch) :])
    assert (padded.segments[len(batch) :] == PADDING).all()
    assert (padded.ids[len(batch) :] == 9).all()
    with pytest.raises(InvalidInput):
        batch.padded(len(batch) - 1)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_bins_are_those_of_first_fit_decreasing(sizes: list[int]) -> None:
    rooms: list[int] = []
    expected: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        bin = next((bin for bin, room in enumerate(rooms) if room >= sizes[item]), len(rooms))
        if bin == len(rooms):
            rooms.append(50)
            expected.append([])
        rooms[bin] -= sizes[item]
        expected[bin].append(item)
    assert first_fit_decreasing(sizes, 50) == expected


def test_a_tree_over_the_budget_is_split_at_its_branches_and_repeats_the_path() -> None:
    shared = list(range(10, 20))
    given = [row(f"sample-{n}", trace(shared, [n, 5, 6], [1, 1, 1])) for n in range(4)]
    packing = pack_trees(given, 16)
    assert [batch.names for batch in packing.batches] == [("sample-0", "sample-1"), ("sample-2", "sample-3")]
    assert [len(batch) for batch in packing.batches] == [16, 16]
    assert packing.stats.unique_tokens == 22
    assert packing.stats.repeated_tokens == 10
    assert packing.stats.ratio == 52 / 32


def test_ten_turns_of_a_session_are_computed_once() -> None:
    completions: list[Completion] = []
    ids: list[int] = []
    for turn in range(10):
        prompt = [*ids, *range(100 * turn, 100 * turn + 20)]
        completions.append(completion(turn, prompt, [7, 8, 9], parent=f"c{turn - 1}" if turn else None))
        ids = [*prompt, 7, 8, 9]
    side = completion(10, [1, 2], [3], finish_reason=FinishReason.CANCELLED)
    trajectory = PerRequest(PerRequest.Options()).build(grow([*completions, side]))
    packing = pack_trees(rows("s", trajectory, advantages=[float(n) for n in range(10)]), 1000)
    (batch,) = packing.batches
    assert batch.ids.tolist() == ids, "what is left out of training is not computed either"
    assert batch.names == tuple(f"s/{turn}" for turn in range(10))
    assert batch.labels.tolist() == [7, 8, 9] * 10
    assert batch.terms.advantages.tolist() == [float(n) for n in range(10) for _ in range(3)]
    assert packing.stats.ratio == pytest.approx(5.5)


def test_the_samples_of_a_group_share_their_prompt() -> None:
    prompt = list(range(100))
    samples = []
    for sample in range(4):
        first = completion(0, prompt, [200 + sample, 201])
        context = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
        second = completion(1, [*context, 300], [400, 401], parent="c0")
        samples.append(PerRequest(PerRequest.Options()).build(grow([first, second])))
    group = (
        one
        for sample, trajectory in enumerate(samples)
        for one in rows(f"s{sample}", trajectory, weights=[0.5, 0.25], advantages=[sample, sample])
    )
    packing = pack_trees(group, 1000)
    (batch,) = packing.batches
    assert len(batch) == 100 + 4 * 5
    assert batch.names == tuple(f"s{sample}/{trace}" for sample in range(4) for trace in range(2))
    assert batch.terms.advantages.tolist() == [sample for sample in range(4) for _ in range(4)]
    assert batch.terms.weights.tolist() == [0.5, 0.5, 0.25, 0.25] * 4
    assert packing.stats.ratio == (4 * 102 + 4 * 105) / 120


def test_a_token_trained_by_two_rows_has_both_weights() -> None:
    given = [
        row("good", trace([1, 2], [3, 4], [1, 1]), weights=0.5, advantages=1.0),
        row("bad", trace([1, 2], [3, 5], [1, 1]), weights=2.0, advantages=-1.0),
    ]
    (batch,) = pack_trees(given, 100).batches
    assert batch.ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.weights.tolist() == [0, 0, 2.5, 0.5, 2.0]
    assert batch.terms.targets.tolist() == [2, 3, 2, 4]
    assert batch.terms.advantages.tolist() == [1, 1, -1, -1]


def test_bad_numbers_name_their_trace() -> None:
    plain = trace([1], [2, 3], [1, 1])
    with pytest.raises(InvalidInput, match=r"trace t: weights of shape \(3,\) for 2 response tokens"):
        row("t", plain, weights=[1.0, 2.0, 3.0])
    with pytest.raises(InvalidInput, match="trace t: advantages must be finite"):
        row("t", plain, advantages=float("nan"))
    with pytest.raises(InvalidInput, match="trace t: its first token is trained"):
        row("t", trace([], [2], [1]))
    with pytest.raises(InvalidInput, match="budget of 0"):
        pack_trees([], 0)


def test_ten_thousand_rows_are_packed_without_comparing_each_to_each_bin() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 10_000).tolist()
    bins = first_fit_decreasing(sizes, 1000)
    assert sorted(item for bin in bins for item in bin) == list(range(10_000))
    assert len(bins) <= 1.03 * sum(sizes) / 1000
