"""How old sampled tokens are, in updates of the policy, those counted that a stop lost or engines missed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Versions:
    """The version that engines sample with, and where the trainer's policy and those before it lie.

    A run that goes on gives its checkpoint's weights out again, under a new version. Counted by their number
    alone, tokens that these very weights have sampled would be as old as all that was lost since. Engines
    that could take no weights for a while miss updates, which no number stands for.
    """

    now: int
    kept: int | None = None
    """The version up to which the weights given out as `again` were counted before; None: nothing was lost
    or missed."""
    again: int = 0
    """The version under which a resumed run gave its weights out; every update since has one of its own."""
    ahead: int = 0
    """Updates that no engine has been given yet."""

    @property
    def reached(self) -> int:
        """The version that the trainer's policy would have, had engines been given every update."""
        return self.now + self.ahead

    def learnt(self) -> Versions:
        """After an update."""
        return replace(self, ahead=self.ahead + 1)

    def at(self, version: int) -> Versions:
        """After engines were given the weights; those that could not take them stay where they are."""
        if version == self.now:
            return self
        if self.ahead > 1:
            return Versions(version, kept=self.reached, again=version)
        return replace(self, now=version, ahead=0)

    def ages(self, sampled: NDArray[np.integer]) -> NDArray[np.integer]:
        """How many updates lie between each token's policy and the trainer's.

        One that was lost is as far away as it was ahead of the checkpoint.
        """
        if self.kept is None:
            return self.reached - sampled
        before = self.again - np.abs(sampled - self.kept)
        return self.reached - np.where(sampled < self.again, before, sampled)
