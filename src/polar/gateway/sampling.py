"""What a completion samples with: the session's pins over the harness's wishes, inside the limits."""

from __future__ import annotations

import hashlib
import os

from polar.models.chat import Sampling
from polar.models.task import SamplingPin

_SEED_BYTES = 4
_SEEDS = 256**4
"""What every engine's random generator takes."""
_SMALLEST_TOP_P = 1e-6
"""OpenAI allows 0, engines want more than 0; both then sample the likeliest token."""


def pinned(
    asked: Sampling, pin: SamplingPin, *, sample: int, ordinal: int, room: int | None, choice: int = 0
) -> Sampling:
    """Every field set, so that no default of an engine applies and the completion can be replayed.

    `room` is how many tokens context and budget leave, None if only the engine knows; `ordinal` counts
    the session's calls, `choice` those of one request.
    """
    limits = [limit for limit in (asked.max_tokens, pin.max_tokens, room) if limit is not None]
    return Sampling(
        temperature=_first(pin.temperature, asked.temperature, 1.0),
        top_p=max(_first(pin.top_p, asked.top_p, 1.0), _SMALLEST_TOP_P),
        top_k=max(int(_first(pin.top_k, asked.top_k, 0)), 0),
        seed=_seed(asked, pin, sample, ordinal, choice),
        max_tokens=min(limits, default=None),
        stop=asked.stop,
        logit_bias=asked.logit_bias,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
    )


def _seed(asked: Sampling, pin: SamplingPin, sample: int, ordinal: int, choice: int) -> int:
    if pin.seed is not None:
        text = f"{pin.seed + sample}/{ordinal}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=_SEED_BYTES).digest(), "big")
    if asked.seed is not None:
        return (asked.seed + choice) % _SEEDS
    return int.from_bytes(os.urandom(_SEED_BYTES), "big")


def _first(pinned: float | None, asked: float | None, default: float) -> float:
    if pinned is not None:
        return pinned
    return default if asked is None else asked
