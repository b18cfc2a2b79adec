"""Captures as tests look at them: whole completions, and trees of completions that are all there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polar.models.completion import Completion
from polar.recordings.capture import parse_capture
from polar.recordings.growth import GrowingTree, has_ended
from polar.recordings.tree import TokenTree


def read_capture(path: Path) -> list[Completion]:
    """Every completion that was written, in order, each with its full prompt; none may be lost."""
    tree = parse_capture(path.read_bytes(), path)
    assert not tree.faults, tree.faults
    return list(tree.completions)


def grow(completions: Sequence[Completion]) -> TokenTree:
    """The tree of completions that are all there already."""
    tree = GrowingTree()
    turns = [
        tree.add(
            tree.prove(
                one.id,
                one.prompt_ids,
                one.sampled_ids,
                hints=(one.parent, one.follows),
                has_ended=has_ended(one.finish_reason),
            )
        )
        for one in completions
    ]
    parents = (turn.parent.completion_id if turn.parent else None for turn in turns)
    return TokenTree(
        tuple(replace(one, parent=parent) for one, parent in zip(completions, parents, strict=True)),
        tuple(turn.link for turn in turns),
    )
