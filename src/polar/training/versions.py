"""How old sampled tokens are, in updates of the policy, also after a run was stopped and has gone on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Versions:
    """The version that the policy is at, and where those before it lie.

    A run that goes on gives its checkpoint's weights out again, under a new version. Counted by their number
    alone, tokens that these very weights have sampled would be as old as all that was lost since.
    """

    now: int
    kept: int | None = None
    """The version that the weights of the checkpoint had when it was written; None: the run began anew."""
    again: int = 0
    """The version that they were given out as when the run went on."""

    def at(self, version: int) -> Versions:
        """After an update."""
        return replace(self, now=version)

    def ages(self, sampled: NDArray[np.integer]) -> NDArray[np.integer]:
        """How many updates lie between each token's policy and that of now.

        One that was lost is as far away as it was ahead of the checkpoint.
        """
        if self.kept is None:
            return self.now - sampled
        before = self.again - np.abs(sampled - self.kept)
        return self.now - np.where(sampled < self.again, before, sampled)
