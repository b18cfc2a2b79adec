"""Lays rows out as batches: each whole and apart, or as trees in which rows that begin alike share tokens.

The gradient of a tree is that of training the rows apart: a shared token is trained once for each row that
trains it (see `Terms`), and what a token sees is exactly its own row up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import NDArray

from polar.errors import InvalidInput
from polar.models.completion import Ids, Routing, concatenate_routing
from polar.trajectory.packing.batch import Batch, Indices, Packing, PackingStats, Terms, TrainingRow

Key = tuple[int, bytes]
"""A token and, if known, its experts: with others its activations differ."""


@dataclass(slots=True, eq=False)
class TokenRun:
    """Consecutive tokens of a tree without a branch between them."""

    start: int
    """Depth of the first token."""
    ids: Ids
    routing: Routing | None = None
    """Experts of each token; None if unknown."""
    parent: TokenRun | None = None
    """The run that this one follows."""
    children: dict[Key, TokenRun] = field(default_factory=dict)
    """Children by first token."""
    ending: list[TrainingRow] = field(default_factory=list)
    """The rows that end with this run."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def key(self, at: int = 0) -> Key:
        return int(self.ids[at]), b"" if self.routing is None else self.routing[at].tobytes()

    def part(self, start: int, end: int | None = None) -> TokenRun:
        """A part of its tokens, detached from the tree."""
        routing = None if self.routing is None else self.routing[start:end]
        return TokenRun(self.start + start, self.ids[start:end], routing)


@dataclass(slots=True, eq=False)
class Piece:
    """Part of a tree that is packed together, in depth-first order."""

    runs: list[TokenRun] = field(default_factory=list)
    rows: list[tuple[TrainingRow, TokenRun]] = field(default_factory=list)
    """(row, its last run) pairs."""
    size: int = 0


def pack_sequences(rows: Iterable[TrainingRow], budget: int) -> Packing:
    """Pack rows separately by first-fit decreasing. Rows over the budget are named, not cut."""
    fitting, over_budget = _fitting(rows, budget)
    return _packing(list(map(_apart, fitting)), budget, over_budget)


def pack_alone(rows: Iterable[TrainingRow], budget: int) -> Packing:
    """Make each row a batch: for models with layers that would see other rows of a batch."""
    fitting, over_budget = _fitting(rows, budget)
    pieces = list(map(_apart, fitting))
    return _packing(pieces, budget, over_budget, bins=[[number] for number in range(len(pieces))])


def pack_trees(rows: Iterable[TrainingRow], budget: int) -> Packing:
    """Merge rows that share a prefix into trees.

    A tree over the budget is split at a branch, and the path to it is repeated in each part (counted in the
    stats). Rows over the budget are named, not cut.
    """
    fitting, over_budget = _fitting(rows, budget)
    root = TokenRun(0, np.empty(0, np.int32))
    for row in fitting:
        _insert(root, TokenRun(0, row.ids, row.routing)).ending.append(row)
    unique = 0
    pieces: list[Piece] = []
    for tree in root.children.values():
        tree.parent = None
        runs = list(_depth_first(tree))
        unique += sum(len(run.ids) for run in runs)
        pieces += _pieces(runs, budget)
    return _packing(pieces, budget, over_budget, sum(piece.size for piece in pieces) - unique)


def join(packings: Sequence[Packing]) -> Packing:
    """All their batches as one packing."""
    return Packing(
        tuple(batch for one in packings for batch in one.batches),
        tuple(name for one in packings for name in one.over_budget),
        PackingStats(*map(sum, zip(*(astuple(one.stats) for one in packings), strict=True))),
    )


def _fitting(rows: Iterable[TrainingRow], budget: int) -> tuple[Iterator[TrainingRow], list[str]]:
    """Yield the rows within the budget, and collect the names of the others."""
    if budget < 1:
        raise InvalidInput(f"a token budget of {budget} holds nothing")
    over_budget: list[str] = []

    def fitting() -> Iterator[TrainingRow]:
        for row in rows:
            if len(row.ids) > budget:
                over_budget.append(row.name)
            elif len(row.ids):
                yield row

    return fitting(), over_budget


def _apart(row: TrainingRow) -> Piece:
    run = TokenRun(0, row.ids, row.routing)
    return Piece([run], [(row, run)], len(row.ids))


def _insert(root: TokenRun, row: TokenRun) -> TokenRun:
    """Add the row to the tree; return its last run."""
    run, depth = root, 0
    while depth < len(row.ids):
        rest = row.part(depth)
        child = run.children.get(rest.key())
        if child is None:
            # A copy: a view would keep the whole row alive for its last tokens.
            routing = None if rest.routing is None else rest.routing.copy()
            child = TokenRun(depth, rest.ids.copy(), routing, run)
            run.children[rest.key()] = child
            return child
        shared = _shared_length(child, rest)
        if shared < len(child.ids):
            child = _split(child, shared)
        run, depth = child, depth + shared
    return run


def _split(run: TokenRun, at: int) -> TokenRun:
    """Move the run's first tokens to a new parent, and return that. Rows that end with the run still do."""
    assert run.parent is not None
    upper, lower = run.part(0, at), run.part(at)
    upper.parent, upper.children = run.parent, {lower.key(): run}
    run.parent.children[upper.key()] = upper
    run.start, run.ids, run.routing, run.parent = lower.start, lower.ids, lower.routing, upper
    return upper


def _shared_length(left: TokenRun, right: TokenRun) -> int:
    """Length of the common prefix, at least 1 as the first tokens are the same."""
    length = min(len(left.ids), len(right.ids))
    differs = left.ids[:length] != right.ids[:length]
    if left.routing is not None and right.routing is not None:
        differs |= (left.routing[:length] != right.routing[:length]).any((1, 2))
    first = int(differs.argmax())
    return first if differs[first] else length


def _depth_first(tree: TokenRun) -> Iterator[TokenRun]:
    stack = [tree]
    while stack:
        run = stack.pop()
        yield run
        stack.extend(reversed(run.children.values()))


def _pieces(runs: Iterable[TokenRun], budget: int) -> list[Piece]:
    """Split a tree into pieces of consecutive rows that fill the budget with the paths to them."""
    pieces = [Piece()]
    laid_out: set[int] = set()
    for run in runs:
        for row in run.ending:
            added = _path(run, laid_out)
            size = sum(len(one.ids) for one in added)
            if pieces[-1].size + size > budget:
                pieces.append(Piece())
                laid_out.clear()
                added, size = _path(run, laid_out), run.end
            piece = pieces[-1]
            piece.runs += added
            piece.rows.append((row, run))
            piece.size += size
            laid_out.update(id(one) for one in added)
    return pieces


def _path(last: TokenRun, laid_out: set[int]) -> list[TokenRun]:
    """The runs on the path to `last` that are not placed yet."""
    path: list[TokenRun] = []
    run: TokenRun | None = last
    while run is not None and id(run) not in laid_out:
        path.append(run)
        run = run.parent
    return path[::-1]


def _packing(
    pieces: Sequence[Piece],
    budget: int,
    over_budget: Sequence[str],
    repeated_tokens: int = 0,
    bins: Sequence[Sequence[int]] | None = None,
) -> Packing:
    """Pack the pieces into these bins, or by first-fit decreasing."""
    if bins is None:
        bins = first_fit_decreasing([piece.size for piece in pieces], budget)
    packed = sum(piece.size for piece in pieces)
    stats = PackingStats(
        rows=sum(len(piece.rows) for piece in pieces),
        row_tokens=sum(len(row.ids) for piece in pieces for row, _ in piece.rows),
        packed_tokens=packed,
        repeated_tokens=repeated_tokens,
        padding_tokens=len(bins) * budget - packed,
    )
    batches = tuple(_batch([pieces[index] for index in bin]) for bin in bins)
    return Packing(batches, tuple(over_budget), stats)


def _batch(pieces: Sequence[Piece]) -> Batch:
    runs = [run for piece in pieces for run in piece.runs]
    lengths = np.array([len(run.ids) for run in runs], np.int64)
    first = np.cumsum(lengths) - lengths
    parents, places = _number_runs(pieces)
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
        names=tuple(row.name for piece in pieces for row, _ in piece.rows),
        routing=concatenate_routing([(len(run.ids), run.routing) for run in runs]),
    )


def _number_runs(pieces: Sequence[Piece]) -> tuple[Indices, list[dict[int, int]]]:
    """The parent of each run by number (-1 for none), and the run numbers of each piece."""
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
    """The end of the last run below each run; children come after their parents."""
    found = ends.tolist()
    for run in range(len(found) - 1, -1, -1):
        parent = int(parents[run])
        if parent >= 0:
            found[parent] = max(found[parent], found[run])
    return np.array(found, np.int64)


def _terms(pieces: Sequence[Piece], places: Sequence[dict[int, int]], first: Indices) -> Terms:
    trained = [row.trained for piece in pieces for row, _ in piece.rows]
    targets = [
        _targets(row.trained.depths, last, numbers, first)
        for piece, numbers in zip(pieces, places, strict=True)
        for row, last in piece.rows
    ]
    counts = [len(one) for one in targets]
    return Terms(
        targets=np.concatenate(targets),
        rows=np.repeat(np.arange(len(counts)), counts),
        weights=np.concatenate([one.weights for one in trained]),
        advantages=np.concatenate([one.advantages for one in trained]),
        logprobs=np.concatenate([one.logprobs for one in trained]),
        versions=np.concatenate([one.versions for one in trained]),
    )


def _targets(depths: Indices, last: TokenRun, numbers: dict[int, int], first: Indices) -> Indices:
    """Positions of a row's trained tokens in the batch, walking up from its last run."""
    targets: NDArray[np.int64] = np.empty(len(depths), np.int64)
    left = len(depths)
    run: TokenRun | None = last
    while left and run is not None:
        begin = int(np.searchsorted(depths[:left], run.start))
        targets[begin:left] = depths[begin:left] - run.start + first[numbers[id(run)]]
        left, run = begin, run.parent
    return targets


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the items of each bin, by index; every size is at most the capacity.

    O(n log n): items are placed largest first, each into the first bin with room.
    """
    rooms = _Rooms(len(sizes), capacity)
    bins: list[list[int]] = []
    # Stable, so that equal sizes keep their order and the result depends on nothing else.
    for item in np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist():
        bin = rooms.take(sizes[item])
        if bin == len(bins):
            bins.append([])
        bins[bin].append(item)
    return bins


class _Rooms:
    """Free room per bin in a binary tree of maxima, which finds the first bin with enough."""

    def __init__(self, bins: int, capacity: int) -> None:
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._most = [capacity] * (2 * self._leaves)

    def take(self, size: int) -> int:
        """Take room in the first bin that has it."""
        most, node = self._most, 1
        while node < self._leaves:
            node *= 2
            node += most[node] < size
        most[node] -= size
        bin = node - self._leaves
        while node := node // 2:
            most[node] = max(most[2 * node], most[2 * node + 1])
        return bin
