"""Random rows of few distinct tokens, so that many begin alike, and what is known of each token in them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from polar.models.trace import Trace
from polar.trajectory.packing.batch import TrainingRow, row


def trace(prompt: list[int], response: list[int], mask: list[int], seed: int = 0) -> Trace:
    draw = np.random.default_rng(seed)
    loss_mask = np.array(mask, np.uint8)
    return Trace(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        loss_mask=loss_mask,
        logprobs=(-draw.random(len(response)) * loss_mask).astype(np.float32),
        policy_versions=np.where(loss_mask, draw.integers(0, 5, len(response)), -1).astype(np.int32),
        reward=None,
        completion_ids=(),
    )


@st.composite
def row_lists(draw: st.DrawFn, *, max_rows: int = 8, vocabulary: int = 3) -> list[TrainingRow]:
    """Rows that extend one another, fork from one another, repeat one another, or share nothing."""
    made: list[TrainingRow] = []
    for index in range(draw(st.integers(1, max_rows))):
        start: list[int] = []
        if index > 0 and draw(st.booleans()):
            start = draw(st.sampled_from(made)).ids.tolist()
            start = start[: draw(st.integers(0, len(start)))]
        tail = draw(st.lists(st.integers(0, vocabulary - 1), min_size=0 if len(start) > 1 else 2, max_size=8))
        ids = [*start, *tail]
        prompt = draw(st.integers(1, len(ids) - 1))
        response = ids[prompt:]
        mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
        numbers = np.random.default_rng(draw(st.integers(0, 999)))
        made.append(
            row(
                f"row-{index}",
                trace(ids[:prompt], response, mask, seed=index),
                weights=numbers.uniform(0.1, 2, len(response)),
                advantages=numbers.normal(size=len(response)),
            )
        )
    return made
