"""Keeps traces within a trainer's lengths, by whole turns and with exact context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from polar.models.trace import Segment


class Overlong(StrEnum):
    """What becomes of a trace that is too long."""

    SPLIT = "split"
    """A turn that makes the response too long begins a trace of its own, after its whole context."""
    TRUNCATE = "truncate"
    """The trace ends with the last turn that fits."""
    DROP = "drop"
    """The whole trace is left out."""


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """How long a trace may be; None: as long as it is."""

    max_tokens: int | None = None
    """Prompt and response together: what the model must hold. No split can keep a turn that ends beyond
    it, because the policy saw everything before that turn."""
    max_response_tokens: int | None = None
    """From the first trained token to the last."""
    on_overlong: Overlong = Overlong.SPLIT

    def fit(
        self, segments: Sequence[Segment], ends: Sequence[int], chain: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """A chain's traces as lists of its segments, and the segments that fit into none.

        `ends` says for every segment of the forest how many tokens its path has up to its end.
        """
        pieces: list[list[int]] = []
        left_out: list[int] = []
        start = 0
        for place, index in enumerate(chain):
            begin = ends[index] - len(segments[index].ids)
            if self._exceeds(self.max_tokens, ends[index]):
                left_out += chain[place:]
                break
            if pieces and not self._exceeds(self.max_response_tokens, ends[index] - start):
                pieces[-1].append(index)
            elif pieces and self.on_overlong is not Overlong.SPLIT:
                left_out += chain[place:]
                break
            elif self._exceeds(self.max_response_tokens, len(segments[index].ids)):
                left_out.append(index)
            else:
                pieces.append([index])
                start = begin
        if left_out and self.on_overlong is Overlong.DROP:
            return [], list(chain)
        return pieces, left_out

    @staticmethod
    def _exceeds(limit: int | None, length: int) -> bool:
        return limit is not None and length > limit
