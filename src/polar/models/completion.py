"""One recorded model call: what the policy saw, what it sampled, and how likely it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polar.models.chat import FinishReason, Message, Sampling, ToolDefinition

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Versions = NDArray[np.int32]


COUNTED = "sampled_tokens"
"""In `Completion.extra`: how many tokens an engine counted that it did not show."""

COUNTED_PROMPT = "prompt_tokens"
"""In `Completion.extra`: the prompt's length, where the engine counted it and did not show its tokens."""

OUTAGE = "outage"
"""In `Completion.extra`, with any value: the engine could not answer, through no fault of the request."""

CACHED = "cached_tokens"
"""In `Completion.extra`: how much of the prompt the engine took from its prefix cache, where it says so."""
OMITTED = "omitted_"
"""Begins a name in `Completion.extra`, which ends with a kind: how many such parts of the request, no text,
the model was shown a placeholder for."""


class CompletionKind(StrEnum):
    GENERATION = "generation"
    AUXILIARY = "auxiliary"
    """A side call (title, summary, quota probe): recorded, not trained unless asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion of a session, complete in itself: `prompt_ids` is the whole context."""

    id: str
    index: int
    """Position in the session's capture, from 0, in the order the calls ended."""
    prompt_ids: Ids
    """Every token the policy conditioned on when it sampled `sampled_ids[0]`."""
    sampled_ids: Ids
    logprobs: Logprobs
    """Same length as `sampled_ids`; of the distribution the engine sampled from."""
    policy_versions: Versions
    """Same length as `sampled_ids`."""
    messages: tuple[Message, ...]
    """The whole request, canonical."""
    response: Message
    """What `sampled_ids` parse to."""
    finish_reason: FinishReason
    parent: str | None = None
    """The completion whose prompt + sampled ids are an exact prefix of `prompt_ids`, as the tree proves."""
    follows: str | None = None
    """The completion whose messages this request continues, whether or not its tokens are a prefix."""
    tools: tuple[ToolDefinition, ...] = ()
    dialect: str = ""
    kind: CompletionKind = CompletionKind.GENERATION
    asked: Sampling = Sampling()
    used: Sampling = Sampling()
    started_at: float = 0.0
    """Unix seconds when the request arrived."""
    first_token_at: float = 0.0
    ended_at: float = 0.0
    untrainable: str | None = None
    """Why this completion can never be trained (fail closed), or None."""
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled, also where the engine only counted them."""
        return len(self.sampled_ids) or int(self.extra.get(COUNTED, 0))

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt was, also where the engine only counted it."""
        return len(self.prompt_ids) or int(self.extra.get(COUNTED_PROMPT, 0))

    @property
    def omitted(self) -> dict[str, int]:
        """Images and the like that the request held and the model was not shown, by kind."""
        return {
            name.removeprefix(OMITTED): int(count)
            for name, count in self.extra.items()
            if name.startswith(OMITTED)
        }

    @property
    def cached_tokens(self) -> int:
        """How much of the prompt came from the engine's prefix cache; 0 where it does not say."""
        return int(self.extra.get(CACHED, 0))
