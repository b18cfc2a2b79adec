"""One recorded model call: what the policy saw, what it sampled, and how likely it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.models.chat import FinishReason, Message, Sampling, ToolDefinition

Ids = NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)
Logprobs = NDArray[np.float32]
Versions = NDArray[np.int32]
Routing = NDArray[np.unsignedinteger[Any]]
"""[tokens, layers, experts]: which experts each token of a mixture of experts went to, in one byte or two.
Layers without experts are zeros. A token whose experts are not known is all zeros, which no other is: the
experts of a layer differ. (Where each token goes to one expert alone, a token that went to the first one in
every layer is taken for unknown.)"""


def concatenate_routing(parts: Sequence[tuple[int, Routing | None]]) -> Routing | None:
    """Concatenate the routing of consecutive token runs, given as (count, routing if known)."""
    known = [routing for _, routing in parts if routing is not None]
    if not known:
        return None
    shape = known[0].shape[1:]
    return np.concatenate(
        [
            np.zeros((count, *shape), np.uint8) if routing is None else routing.reshape(count, *shape)
            for count, routing in parts
        ]
    )


COUNTED = "sampled_tokens"
"""In `Completion.extra`: number of sampled tokens that an engine counted without reporting them."""

COUNTED_PROMPT = "prompt_tokens"
"""In `Completion.extra`: the prompt's length, if the engine counted tokens without reporting them."""

OUTAGE = "outage"
"""In `Completion.extra`, with any value: the engine failed, through no fault of the request."""

UNROUTED = "unrouted_tokens"
"""In `Completion.extra`: number of its tokens whose experts the engine should have reported and did not."""

REPLAYED = "replayed_from"
"""In `Completion.extra`: the session that sampled this completion, under the same id."""
RESUMED = "resumed"
"""In `Completion.extra`, with any value: an earlier attempt at the same session sampled it."""
HARNESS_VERSION = "harness_version"
"""In `Completion.extra`: the version of the harness that asked the model for it; absent if unknown."""
CONSTRAINT = "constraint"
"""In `Completion.extra`: the constraint on the answer, whose logprobs are then of a masked distribution."""
SUPERSEDED = "superseded_by_resume"
"""In `Completion.extra`, with any value: the attempt that ended the session never asked for this answer of an
earlier one."""
DIVERGED = "diverged"
"""In `Completion.extra`: the `Divergence` after which it was given, as JSON."""
LEFT = "seconds_left"
"""In `Completion.extra`: seconds left to the session when the answer had ended; absent without a limit."""
CHOICE = "choice"
"""In `Completion.extra`: index of the answer, if a request asked for several."""
STOP_SEQUENCE = "stop_sequence"
"""In `Completion.extra`: the stop string that ended the answer, if any."""

CACHED = "cached_tokens"
"""In `Completion.extra`: prompt tokens served from the engine's prefix cache, if reported."""
OMITTED = "omitted_"
"""Prefix of names in `Completion.extra`, followed by a kind: number of non-text parts replaced by
placeholders."""


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
    """Same length as `sampled_ids`; from the distribution that was sampled."""
    policy_versions: Versions
    """Same length as `sampled_ids`."""
    messages: tuple[Message, ...]
    """The whole request, canonical."""
    response: Message
    """The parsed `sampled_ids`."""
    finish_reason: FinishReason
    parent: str | None = None
    """The completion whose prompt + sampled ids are an exact prefix of `prompt_ids`, as the tree proves."""
    follows: str | None = None
    """The completion whose messages this request continues, whether or not its tokens are a prefix."""
    tools: tuple[ToolDefinition, ...] = ()
    dialect: str = ""
    asked: Sampling = Sampling()
    used: Sampling = Sampling()
    started_at: float = 0.0
    """Unix seconds when the request arrived."""
    first_token_at: float = 0.0
    ended_at: float = 0.0
    untrainable: str | None = None
    """Why this completion can never be trained (fail closed), or None."""
    extra: dict[str, str] = field(default_factory=dict)
    routing: Routing | None = None
    """Experts of the last tokens of prompt and answer without the final one, which was sampled but not
    computed. Covers as many tokens as the engine reported; None if it reported none."""

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens, even if the engine only counted them."""
        return len(self.sampled_ids) or int(self.extra.get(COUNTED, 0))

    @property
    def prompt_tokens(self) -> int:
        """Prompt length, even if the engine only counted it."""
        return len(self.prompt_ids) or int(self.extra.get(COUNTED_PROMPT, 0))

    @property
    def is_replayed(self) -> bool:
        """Whether it was sampled before its session, or before this attempt at it."""
        return REPLAYED in self.extra or RESUMED in self.extra

    @property
    def omitted(self) -> dict[str, int]:
        """Non-text parts that the model was not shown, by kind."""
        return {
            name.removeprefix(OMITTED): int(count)
            for name, count in self.extra.items()
            if name.startswith(OMITTED)
        }

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens served from the engine's prefix cache; 0 if not reported."""
        return int(self.extra.get(CACHED, 0))
