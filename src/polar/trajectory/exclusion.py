"""Why sampled tokens are left out of training; each one left out is counted by one of these names."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from polar.models.chat import FinishReason
from polar.models.completion import Completion, CompletionKind


class Exclusion(StrEnum):
    AUXILIARY = "auxiliary"
    """A side call of the harness."""
    CANCELLED = "cancelled"
    """The client went away before the answer was whole."""
    ENGINE_ERROR = "engine_error"
    """The engine failed in the middle of the answer."""
    UNTRAINABLE = "untrainable"
    """The recording says so (no token ids or logprobs came from the engine)."""
    INVALID_LOGPROBS = "invalid_logprobs"
    """Logprobs or versions are missing, of another length, not finite or above zero."""


LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed zero by rounding in the engine's log-softmax, not by more."""


def exclusion(completion: Completion) -> Exclusion | None:
    """The reason to leave this completion out, or None if it is trainable."""
    if completion.untrainable is not None:
        return Exclusion.UNTRAINABLE
    if completion.finish_reason is FinishReason.CANCELLED:
        return Exclusion.CANCELLED
    if completion.finish_reason is FinishReason.ERROR:
        return Exclusion.ENGINE_ERROR
    if completion.kind is CompletionKind.AUXILIARY:
        return Exclusion.AUXILIARY
    count = len(completion.sampled_ids)
    if len(completion.logprobs) != count or len(completion.policy_versions) != count:
        return Exclusion.INVALID_LOGPROBS
    if not np.isfinite(completion.logprobs).all() or (completion.logprobs > LOGPROB_TOLERANCE).any():
        return Exclusion.INVALID_LOGPROBS
    return None
