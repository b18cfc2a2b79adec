"""AReaL: a rollout workflow whose episodes are Polar sessions.

A row of the dataset carries its task. An episode is a batch with a row for each trace: mask, logprobs and
versions have the length of prompt and response together, and shorter rows are filled up on the right.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.bridges.packages import trainer_module
from polar.bridges.sequences import Aligned, aligned
from polar.bridges.sessions import ScoredSession, client_of_this_loop, one_session, task_of

_areal = trainer_module("areal.api.workflow_api", hint="install AReaL as its documentation says")


class PolarWorkflow(_areal.RolloutWorkflow):  # type: ignore[misc,name-defined]
    """Runs one session for each episode."""

    def __init__(self, temperature: float = 1.0) -> None:
        """The temperature is the trainer's: what logprobs are computed at."""
        self._temperature = temperature

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        return episode(await one_session(client_of_this_loop(), task_of(data), self._temperature))


def episode(session: ScoredSession) -> dict[str, Any] | None:
    """The session as tensors; None, which AReaL takes as rejected, where there is nothing to learn from."""
    import torch

    if not session.traces:
        return None
    rows = [aligned(trace) for trace in session.traces]
    return {
        "input_ids": torch.from_numpy(_filled(rows, "ids", 0)).to(torch.int32),
        "loss_mask": torch.from_numpy(_filled(rows, "mask", 0)).to(torch.int32),
        "logprobs": torch.from_numpy(_filled(rows, "logprobs", 0.0)),
        "versions": torch.from_numpy(_filled(rows, "versions", -1)),
        "attention_mask": torch.from_numpy(_attention(rows)),
        "rewards": torch.tensor([trace.reward for trace in session.traces], dtype=torch.float32),
    }


def _filled(rows: list[Aligned], name: str, filler: float) -> np.ndarray[Any, Any]:
    arrays = [getattr(row, name) for row in rows]
    whole = np.full((len(rows), max(map(len, arrays))), filler, arrays[0].dtype)
    for place, array in zip(whole, arrays, strict=True):
        place[: len(array)] = array
    return whole


def _attention(rows: list[Aligned]) -> np.ndarray[Any, Any]:
    lengths = np.array([len(row.ids) for row in rows])
    found: np.ndarray[Any, Any] = np.arange(lengths.max()) < lengths[:, None]
    return found
