"""Why sampled tokens are left out of training; each one left out is counted by one of these names."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polar.models.chat import FinishReason
from polar.models.completion import Completion, CompletionKind, Logprobs


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
    RETRY_SUPERSEDED = "retry_superseded"
    """The same prompt was answered again, and the conversation went on with the other answer."""
    REALIGNED = "realigned"
    """The conversation went on with the same answer in other tokens (drift: realign)."""
    OVER_LENGTH = "over_length"
    """The turn does not fit the length limit together with what the policy saw before it."""
    UNCREDITED = "uncredited"
    """Not of the main conversation, which alone is credited (credit: main)."""


LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed zero by rounding in the engine's log-softmax, not by more."""


def sound(logprobs: Logprobs) -> NDArray[np.bool_]:
    """Which values can be logprobs at all: finite, and not above zero by more than rounding."""
    return np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)


def exclusion(completion: Completion) -> Exclusion | None:
    """The reason in the completion itself to leave it out, or None if it is trainable."""
    if completion.untrainable is not None:
        return Exclusion.UNTRAINABLE
    if completion.finish_reason is FinishReason.CANCELLED:
        return Exclusion.CANCELLED
    if completion.finish_reason is FinishReason.ERROR:
        return Exclusion.ENGINE_ERROR
    if completion.kind is CompletionKind.AUXILIARY:
        return Exclusion.AUXILIARY
    if logprob_problem(completion) is not None:
        return Exclusion.INVALID_LOGPROBS
    return None


def logprob_problem(completion: Completion) -> str | None:
    """What is wrong with the numbers that go with the sampled ids, in words; None if nothing is."""
    count, logprobs = len(completion.sampled_ids), completion.logprobs
    for name, length in (("logprobs", len(logprobs)), ("policy versions", len(completion.policy_versions))):
        if length != count:
            return f"{count} sampled tokens but {length} {name}"
    found = sound(logprobs)
    if found.all():
        return None
    first = int(np.argmin(found))
    return f"the logprob of token {first} is {logprobs[first]:g}"
