"""How far the trainer's logprobs of recorded tokens are from those that the engine sampled them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polar.engines.base import Engine
from polar.recordings.recording import Recording
from polar.training.policy import load_policy
from polar.training.settings import ModelSettings
from polar.trajectory.learnable import is_off_distribution
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import TrainingRow, row
from polar.trajectory.packing.pack import pack_trees
from polar.trajectory.prefix_merging import PrefixMerging


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """Differences of logprobs, in one precision of the trainer."""

    precision: str
    tokens: int
    mean: float
    p99: float
    max: float
    ratio: float
    """Mean distance of the importance ratio from 1: what truncated importance sampling corrects."""


def versions(recordings: Sequence[Recording]) -> dict[int, int]:
    """Policy version → tokens sampled with it."""
    found = np.concatenate([c.policy_versions for one in recordings for c in one.completions])
    numbers, counts = np.unique(found, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def compared(recordings: Sequence[Recording], version: int, temperature: float) -> list[TrainingRow]:
    """All tokens of one policy version that were sampled at this temperature with nothing cut."""
    return [found for one in recordings for found in _rows(one, version, temperature)]


async def rescored(rows: Sequence[TrainingRow], engine: Engine) -> list[TrainingRow]:
    """The rows with the logprobs that the engine gives their tokens when it is shown them, at temperature 1.

    For sessions that were sampled by something else, as those that a script played.
    """
    found = []
    for one in rows:
        scores = np.array(await engine.score(one.ids.tolist()), np.float32)
        trained = replace(one.trained, logprobs=scores[one.trained.depths])
        found.append(replace(one, trained=trained))
    return found


def compare(
    rows: Sequence[TrainingRow], model: ModelSettings, precision: str, budget: int, temperature: float
) -> Faithfulness:
    """The rows' logprobs with those that the trainer computes in this precision."""
    policy = load_policy(
        model.model_copy(update={"precision": precision}), temperature=temperature, most_tokens=budget
    )
    differences: list[NDArray[np.float64]] = []
    packing = pack_trees(rows, budget)
    if packing.over_budget:
        raise SystemExit(f"{len(packing.over_budget)} traces are longer than --budget {budget}: raise it")
    for batch in packing.batches:
        ours = policy.logprobs(batch).double().cpu().numpy()
        differences.append(ours - batch.terms.logprobs)
    found = np.concatenate(differences) if differences else np.zeros(0)
    if not len(found):
        raise SystemExit(f"no token was sampled at temperature {temperature:g}, uncut, with these weights")
    apart = np.abs(found)
    return Faithfulness(
        precision,
        len(found),
        float(apart.mean()),
        float(np.percentile(apart, 99)),
        float(apart.max()),
        float(np.abs(np.expm1(found)).mean()),
    )


def _rows(recording: Recording, version: int, temperature: float) -> list[TrainingRow]:
    trajectory = PrefixMerging(PrefixMerging.Options()).build(recording.tree)
    found = []
    for index, ref in enumerate(trajectory.traces):
        trace = materialise(trajectory, ref)
        is_compared = (trace.loss_mask == 1) & (trace.policy_versions == version)
        is_compared &= ~is_off_distribution(trace, recording, temperature)
        kept = replace(trace, loss_mask=is_compared.astype(np.uint8))
        found.append(row(f"{recording.result.session_id}/{index}", kept))
    return [one for one in found if len(one.trained.depths)]
