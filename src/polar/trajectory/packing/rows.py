"""A trace as one row of tokens, with what the loss does with each trained one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polar.errors import InvalidInput
from polar.models.completion import Ids, Logprobs, Versions
from polar.models.trace import Trace, Trajectory
from polar.trajectory.materialise import materialise

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The trained tokens of a row, in order; all arrays have one length."""

    depths: Indices
    """Where in the row each stands; never 0, since the first token is predicted from nothing."""
    weights: Floats
    """What the token's loss is multiplied with: any normalisation is expressed here."""
    advantages: Floats
    logprobs: Logprobs
    """As sampled: of the policy that the importance ratio is taken against."""
    versions: Versions


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What packing takes."""

    name: str
    ids: Ids
    trained: Trained


def row(name: str, trace: Trace, weights: ArrayLike = 1.0, advantages: ArrayLike = 0.0) -> Row:
    """The trace as a row; weights and advantages are one number, or one for each response token."""
    at = np.flatnonzero(trace.loss_mask)
    depths = at + len(trace.prompt_ids)
    if len(depths) and depths[0] == 0:
        raise InvalidInput(
            f"trace {name}: its first token is trained, but there is nothing to predict it from"
        )
    return Row(
        name,
        np.concatenate([trace.prompt_ids, trace.response_ids]),
        Trained(
            depths,
            _for_each(name, "weights", weights, len(trace.response_ids))[at],
            _for_each(name, "advantages", advantages, len(trace.response_ids))[at],
            trace.logprobs[at],
            trace.policy_versions[at],
        ),
    )


def rows(
    name: str,
    trajectory: Trajectory,
    weights: Sequence[ArrayLike] | None = None,
    advantages: Sequence[ArrayLike] | None = None,
) -> Iterator[Row]:
    """A row for each trace, made one at a time: only one repeats the history they share at any moment.

    Weights and advantages are those of `row`, one entry a trace. Rows are named NAME/0, NAME/1, ….
    """
    for index, ref in enumerate(trajectory.traces):
        yield row(
            f"{name}/{index}",
            materialise(trajectory, ref),
            1.0 if weights is None else weights[index],
            0.0 if advantages is None else advantages[index],
        )


def _for_each(name: str, what: str, given: ArrayLike, length: int) -> Floats:
    values = np.asarray(given, np.float32)
    if values.shape not in ((), (length,)):
        raise InvalidInput(f"trace {name}: {what} of shape {values.shape} for {length} response tokens")
    if not np.isfinite(values).all():
        raise InvalidInput(f"trace {name}: {what} must be finite")
    return np.broadcast_to(values, (length,))
