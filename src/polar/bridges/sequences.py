"""A trace as one sequence in which everything has the length of prompt and response together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polar.models.completion import Ids, Logprobs, Versions
from polar.models.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """All arrays have one length; over the prompt the mask is 0, logprobs are 0.0 and versions -1."""

    ids: Ids
    mask: NDArray[np.uint8]
    logprobs: Logprobs
    versions: Versions

    def up_to_the_last_trained(self) -> Aligned:
        """Without the tokens at the end that are not trained: nothing that is trained stands after them."""
        end = int(np.flatnonzero(self.mask)[-1]) + 1
        return Aligned(self.ids[:end], self.mask[:end], self.logprobs[:end], self.versions[:end])


def aligned(trace: Trace) -> Aligned:
    prompt = len(trace.prompt_ids)
    return Aligned(
        np.concatenate([trace.prompt_ids, trace.response_ids]),
        np.concatenate([np.zeros(prompt, np.uint8), trace.loss_mask]),
        np.concatenate([np.zeros(prompt, np.float32), trace.logprobs]),
        np.concatenate([np.full(prompt, -1, np.int32), trace.policy_versions]),
    )
