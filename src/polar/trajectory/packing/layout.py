"""Runs of tokens that hang on each other, laid out as the flat arrays of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polar.errors import InvalidInput
from polar.models.completion import Ids
from polar.trajectory.packing.batch import Batch, Packing, PackingStats, Terms
from polar.trajectory.packing.bins import first_fit_decreasing
from polar.trajectory.packing.rows import Indices, Trained


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive tokens of a tree without a branch between them."""

    start: int
    """Depth of the first token."""
    ids: Ids
    parent: Run | None = None
    """The run after whose last token this one stands."""
    children: dict[int, Run] = field(default_factory=dict)
    """By their first token."""
    ending: list[int] = field(default_factory=list)
    """The rows, by number, whose last token is the run's last."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A row that is to be laid out: the run it ends with, and what of it is trained."""

    name: str
    last: Run
    trained: Trained


@dataclass(slots=True, eq=False)
class Piece:
    """Part of a tree that is laid out together, in depth-first order."""

    runs: list[Run] = field(default_factory=list)
    rows: list[Placed] = field(default_factory=list)
    size: int = 0


def packing(
    pieces: Sequence[Piece],
    budget: int,
    unique_tokens: int,
    over_budget: Sequence[str] = (),
    bins: Sequence[Sequence[int]] | None = None,
) -> Packing:
    """The pieces in the given bins, else in as few batches as first-fit decreasing finds.

    None is larger than the budget.
    """
    if bins is None:
        bins = first_fit_decreasing([piece.size for piece in pieces], budget)
    packed = sum(piece.size for piece in pieces)
    placed = [placed for piece in pieces for placed in piece.rows]
    stats = PackingStats(
        rows=len(placed),
        row_tokens=sum(row.last.end for row in placed),
        packed_tokens=packed,
        repeated_tokens=packed - unique_tokens,
        padding_tokens=len(bins) * budget - packed,
    )
    batches = tuple(_batch([pieces[index] for index in bin]) for bin in bins)
    return Packing(batches, tuple(over_budget), stats)


def check_budget(budget: int) -> None:
    if budget < 1:
        raise InvalidInput(f"a token budget of {budget} holds nothing")


def _batch(pieces: Sequence[Piece]) -> Batch:
    runs = [run for piece in pieces for run in piece.runs]
    lengths = np.array([len(run.ids) for run in runs], np.int64)
    first = np.cumsum(lengths) - lengths
    parents, places = _hung(pieces)
    size = int(lengths.sum())
    # Within a run each token follows the one before it; a run's first follows its parent's last.
    predecessors = np.arange(-1, size - 1, dtype=np.int32)
    predecessors[first] = np.where(parents < 0, -1, (first + lengths - 1)[parents])
    starts = np.array([run.start for run in runs], np.int64)
    return Batch(
        ids=np.concatenate([run.ids for run in runs]).astype(np.int32, copy=False),
        positions=(np.arange(size) + np.repeat(starts - first, lengths)).astype(np.int32),
        segments=np.repeat(np.cumsum(parents < 0) - 1, lengths).astype(np.int32),
        predecessors=predecessors,
        ends=np.repeat(_ends(parents, first + lengths), lengths).astype(np.int32),
        terms=_terms(pieces, places, first),
        names=tuple(row.name for piece in pieces for row in piece.rows),
    )


def _hung(pieces: Sequence[Piece]) -> tuple[Indices, list[dict[int, int]]]:
    """Each run's parent by its number in the batch (-1: none), and for each piece the numbers of its runs."""
    parents: list[int] = []
    places: list[dict[int, int]] = []
    for piece in pieces:
        # By piece: two pieces of one tree in one batch repeat runs.
        numbers: dict[int, int] = {}
        for run in piece.runs:
            numbers[id(run)] = len(parents)
            parents.append(-1 if run.parent is None else numbers[id(run.parent)])
        places.append(numbers)
    return np.array(parents, np.int64), places


def _ends(parents: Indices, ends: Indices) -> Indices:
    """Where the last run below each run ends; children stand after their parents."""
    found = ends.tolist()
    for run in range(len(found) - 1, -1, -1):
        parent = int(parents[run])
        if parent >= 0:
            found[parent] = max(found[parent], found[run])
    return np.array(found, np.int64)


def _terms(pieces: Sequence[Piece], places: Sequence[dict[int, int]], first: Indices) -> Terms:
    targets: list[Indices] = []
    trained: list[Trained] = []
    for piece, numbers in zip(pieces, places, strict=True):
        for row in piece.rows:
            targets.append(_targets(row, numbers, first))
            trained.append(row.trained)
    counts = [len(one) for one in targets]
    return Terms(
        targets=np.concatenate(targets),
        rows=np.repeat(np.arange(len(counts)), counts),
        weights=np.concatenate([one.weights for one in trained]),
        advantages=np.concatenate([one.advantages for one in trained]),
        logprobs=np.concatenate([one.logprobs for one in trained]),
        versions=np.concatenate([one.versions for one in trained]),
    )


def _targets(row: Placed, numbers: dict[int, int], first: Indices) -> Indices:
    """Where in the batch the row's trained tokens stand: from its last run upwards, as far as any is."""
    depths = row.trained.depths
    targets: NDArray[np.int64] = np.empty(len(depths), np.int64)
    left = len(depths)
    run: Run | None = row.last
    while left and run is not None:
        begin = int(np.searchsorted(depths[:left], run.start))
        targets[begin:left] = depths[begin:left] - run.start + first[numbers[id(run)]]
        left, run = begin, run.parent
    return targets
