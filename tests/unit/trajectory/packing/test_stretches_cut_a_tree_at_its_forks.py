"""A batch is cut into stretches that lie side by side, each with the one that it follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.trajectory.packing.batch import (
    PADDING,
    Batch,
    Packing,
    TrainingRow,
    dense_mask,
    stretches,
    windows,
)
from polar.trajectory.packing.pack import pack_sequences, pack_trees
from tests.fakes.rows import row_lists

Pack = Callable[[list[TrainingRow], int], Packing]
packs = pytest.mark.parametrize("pack", [pack_sequences, pack_trees])


def batches(pack: Pack, rows: list[TrainingRow]) -> list[Batch]:
    return [batch.padded(len(batch) + 3) for batch in pack(rows, 40).batches]


@packs
@given(row_lists())
def test_each_token_but_padding_is_in_one_stretch(pack: Pack, rows: list[TrainingRow]) -> None:
    for batch in batches(pack, rows):
        found = stretches(batch)
        tokens = [
            token
            for start, length in zip(found.starts, found.lengths, strict=True)
            for token in range(start, start + length)
        ]
        assert tokens == np.flatnonzero(batch.segments != PADDING).tolist()


@packs
@given(row_lists())
def test_a_stretch_is_a_chain_that_follows_its_parents_last_token(
    pack: Pack, rows: list[TrainingRow]
) -> None:
    for batch in batches(pack, rows):
        found = stretches(batch)
        for start, length, parent, level in zip(
            found.starts, found.lengths, found.parents, found.levels, strict=True
        ):
            assert batch.predecessors[start + 1 : start + length].tolist() == list(
                range(start, start + length - 1)
            )
            if parent < 0:
                assert batch.predecessors[start] == -1
                assert level == 0
            else:
                assert batch.predecessors[start] == found.starts[parent] + found.lengths[parent] - 1
                assert level == found.levels[parent] + 1


@given(row_lists())
def test_stretches_end_only_where_rows_part(rows: list[TrainingRow]) -> None:
    for batch in batches(pack_trees, rows):
        parents = stretches(batch).parents
        followed = np.bincount(parents[parents >= 0])
        assert set(followed[followed > 0].tolist()).isdisjoint({1})


@packs
@given(row_lists(), st.integers(2, 5))
def test_a_window_is_what_a_token_sees_last(pack: Pack, rows: list[TrainingRow], width: int) -> None:
    for batch in batches(pack, rows):
        moved, seen = windows(batch, width)
        given_windows = dict(zip(moved.tolist(), seen.tolist(), strict=True))
        mask = dense_mask(batch)
        for token in np.flatnonzero(batch.segments != PADDING).tolist():
            before = np.flatnonzero(mask[token])[-width:].tolist()
            expected = [-1] * (width - len(before)) + before
            beside = [max(index, -1) for index in range(token - width + 1, token + 1)]
            assert given_windows.get(token, beside) == expected
        assert all(batch.segments[moved] != PADDING)
