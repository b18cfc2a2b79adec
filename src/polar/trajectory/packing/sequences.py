"""Sequence packing: each row whole and apart, as many to a batch as its token budget holds, or one."""

from __future__ import annotations

from collections.abc import Iterable

from polar.trajectory.packing.batch import Packing
from polar.trajectory.packing.layout import Piece, Placed, Run, check_budget, packing
from polar.trajectory.packing.rows import Row


def pack_sequences(rows: Iterable[Row], budget: int) -> Packing:
    """By first-fit decreasing. Rows longer than the budget are named, not cut."""
    pieces, over_budget = _pieces(rows, budget)
    return packing(pieces, budget, sum(piece.size for piece in pieces), over_budget)


def pack_alone(rows: Iterable[Row], budget: int) -> Packing:
    """Each row is a batch: for models with layers that no mask keeps from seeing other rows."""
    pieces, over_budget = _pieces(rows, budget)
    bins = [[number] for number in range(len(pieces))]
    return packing(pieces, budget, sum(piece.size for piece in pieces), over_budget, bins)


def _pieces(rows: Iterable[Row], budget: int) -> tuple[list[Piece], list[str]]:
    check_budget(budget)
    pieces: list[Piece] = []
    over_budget: list[str] = []
    for row in rows:
        if len(row.ids) > budget:
            over_budget.append(row.name)
        elif len(row.ids):
            run = Run(0, row.ids)
            pieces.append(Piece([run], [Placed(row.name, run, row.trained)], len(row.ids)))
    return pieces, over_budget
