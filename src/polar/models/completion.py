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


def joined_routing(parts: Sequence[tuple[int, Routing | None]]) -> Routing | None:
    """Of tokens that follow each other, given as how many they are and what is known of them."""
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
"""In `Completion.extra`: how many tokens an engine counted that it did not show."""

COUNTED_PROMPT = "prompt_tokens"
"""In `Completion.extra`: the prompt's length, where the engine counted it and did not show its tokens."""

OUTAGE = "outage"
"""In `Completion.extra`, with any value: the engine could not answer, through no fault of the request."""

UNROUTED = "unrouted_tokens"
"""In `Completion.extra`: of how many tokens that it added the engine was to tell the experts, and did not."""

REPLAYED = "replayed_from"
"""In `Completion.extra`: the session in which this very completion, under the same id, was sampled."""
RESUMED = "resumed"
"""In `Completion.extra`, with any value: an earlier attempt at the same session sampled it."""
CONSTRAINT = "constraint"
"""In `Completion.extra`: what the answer was held to, if to anything: its logprobs are of a masked
distribution."""
SUPERSEDED = "superseded_by_resume"
"""In `Completion.extra`, with any value: the attempt that ended the session never asked for this answer of an
earlier one."""
DIVERGED = "diverged"
"""In `Completion.extra`: the `Divergence` after which it was given, as JSON."""
LEFT = "seconds_left"
"""In `Completion.extra`: of the session's time, when the answer had ended; absent where it has no end."""
CHOICE = "choice"
"""In `Completion.extra`, where a request asked for several answers: which of them it is, from 0."""
STOP_SEQUENCE = "stop_sequence"
"""In `Completion.extra`: the stop string of the request that ended the answer, if one did."""

CACHED = "cached_tokens"
"""In `Completion.extra`: how much of the prompt the engine took from its prefix cache, where it says so."""
OMITTED = "omitted_"
"""Begins a name in `Completion.extra`, which ends with a kind: how many such parts of the request, no text,
the model was shown a placeholder for."""


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
    """Of the last tokens of prompt and answer, without the very last: that one was sampled and not computed.
    As many as the engine told of; None: of none."""

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled, also where the engine only counted them."""
        return len(self.sampled_ids) or int(self.extra.get(COUNTED, 0))

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt was, also where the engine only counted it."""
        return len(self.prompt_ids) or int(self.extra.get(COUNTED_PROMPT, 0))

    @property
    def is_replayed(self) -> bool:
        """Whether it was sampled before its session, or this attempt at it, began."""
        return REPLAYED in self.extra or RESUMED in self.extra

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
