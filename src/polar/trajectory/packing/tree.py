"""Tree packing: rows that begin alike share the tokens they begin with, so each is computed once.

The gradient is that of training the rows apart: a shared token is trained once for each row that
trains it (see `Terms`), and what a token sees is exactly its own row up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from polar.models.completion import Ids
from polar.trajectory.packing.batch import Packing
from polar.trajectory.packing.layout import Piece, Placed, Run, check_budget, packing
from polar.trajectory.packing.rows import Row


def pack_trees(rows: Iterable[Row], budget: int) -> Packing:
    """The rows of a session, of a group, or of many: whatever shares a prefix becomes one tree.

    A tree over the budget is split where it branches, and the path to the branch is repeated in each
    part (counted in the stats). Rows longer than the budget are named, not cut.
    """
    check_budget(budget)
    root = Run(0, np.empty(0, np.int32))
    placed: list[Placed] = []
    over_budget: list[str] = []
    for row in rows:
        if len(row.ids) > budget:
            over_budget.append(row.name)
        elif len(row.ids):
            last = _insert(root, row.ids)
            last.ending.append(len(placed))
            placed.append(Placed(row.name, last, row.trained))
    unique = 0
    pieces: list[Piece] = []
    for tree in root.children.values():
        tree.parent = None
        runs = list(_depth_first(tree))
        unique += sum(len(run.ids) for run in runs)
        pieces += _pieces(runs, placed, budget)
    return packing(pieces, budget, unique, over_budget)


def _insert(root: Run, ids: Ids) -> Run:
    """The run that the row ends with, after adding what of it the tree did not have."""
    run, depth = root, 0
    while depth < len(ids):
        child = run.children.get(int(ids[depth]))
        if child is None:
            # A copy: a view would keep the whole row alive for its last tokens.
            child = Run(depth, ids[depth:].copy(), run)
            run.children[int(ids[depth])] = child
            return child
        shared = _shared(child.ids, ids[depth:])
        if shared < len(child.ids):
            child = _split(child, shared)
        run, depth = child, depth + shared
    return run


def _split(run: Run, at: int) -> Run:
    """Put the run's first tokens into one of their own above it, and return that.

    The run itself stays the lower part: rows that end with it still do.
    """
    assert run.parent is not None
    upper = Run(run.start, run.ids[:at], run.parent, {int(run.ids[at]): run})
    run.parent.children[int(run.ids[0])] = upper
    run.start, run.ids, run.parent = run.start + at, run.ids[at:], upper
    return upper


def _shared(left: Ids, right: Ids) -> int:
    """How many tokens both begin with; at least one is given of each."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _depth_first(tree: Run) -> Iterator[Run]:
    stack = [tree]
    while stack:
        run = stack.pop()
        yield run
        stack.extend(reversed(run.children.values()))


def _pieces(runs: Iterable[Run], placed: list[Placed], budget: int) -> list[Piece]:
    """Consecutive rows of a tree, as many together as the budget holds with the paths that lead to them."""
    pieces = [Piece()]
    laid_out: set[int] = set()
    for run in runs:
        for number in run.ending:
            added = _path(run, laid_out)
            size = sum(len(one.ids) for one in added)
            if pieces[-1].size + size > budget:
                pieces.append(Piece())
                laid_out.clear()
                added, size = _path(run, laid_out), run.end
            piece = pieces[-1]
            piece.runs += added
            piece.rows.append(placed[number])
            piece.size += size
            laid_out.update(id(one) for one in added)
    return pieces


def _path(last: Run, laid_out: set[int]) -> list[Run]:
    """The runs down to `last` that are not laid out yet."""
    path: list[Run] = []
    run: Run | None = last
    while run is not None and id(run) not in laid_out:
        path.append(run)
        run = run.parent
    return path[::-1]
