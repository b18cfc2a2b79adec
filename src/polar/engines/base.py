"""The engine interface: tokens in, tokens and logprobs out, as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from polar.errors import PolarError, Unavailable
from polar.models.chat import ChatRequest, FinishReason, Sampling, Usage
from polar.models.completion import Ids, Routing
from polar.models.policy import PauseMode
from polar.rendering.base import MessageDelta
from polar.rendering.constraints import Constraint
from polar.telemetry.readings import Readings

HALF_REPLACED = 2**31 - 1
"""Stands for the version during an update, while only some weights are replaced. Nobody asks for it, so the
next update always loads."""


class Mode(StrEnum):
    """The renderer of prompts."""

    TOKENS = "tokens"
    """The gateway: exact ids go in, and history is never tokenised again."""
    CHAT = "chat"
    """The engine: messages go in, and it reports their ids."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, already rendered to tokens."""

    request_id: str
    prompt_ids: Ids | list[int]
    """A long conversation's ids are sent as an array, never as a list of numbers."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    session: str = ""
    """The session of the request. Requests of one session share a prefix, so they go to the same replica."""
    routed_from: int = 0
    """Position of the first prompt token whose experts the engine should return; earlier ones are recorded
    already."""

    @property
    def is_guided(self) -> bool:
        """Whether tokens are drawn from other logits than the model's own."""
        return self.constraint is not None or self.sampling.is_reshaped


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens since the last chunk. `ids` has every sampled token, including the end-of-turn token; len(ids)
    == len(logprobs)."""

    ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache, where the engine says so (first chunk)."""
    routing: Routing | None = field(default=None, compare=False)
    """Set on the last chunk if the engine records routing; see `Completion.routing`."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One generation whose prompt the engine renders itself (chat mode)."""

    request_id: str
    chat: ChatRequest
    sampling: Sampling
    """The sampling parameters of the chat, with pins and limits applied."""
    session: str = ""


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """Output of a chat-mode engine since the last chunk: the message as it parsed it, and the tokens."""

    delta: MessageDelta = field(default_factory=MessageDelta)
    tokens: TokenChunk | None = None
    """None where the engine gives text only; such a completion is recorded and never trainable."""
    prompt_ids: Ids | None = None
    """Set on the first chunk, if reported: the ids of the prompt."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    usage: Usage | None = None
    """Set on the last chunk, if the engine counts tokens without reporting them."""
    stop_sequence: str | None = None
    """Set on the last chunk: the stop sequence that ended it, if any."""
    untrainable: str | None = None
    """Why the tokens so far can never be trained: ids or logprobs are missing or do not match."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that an engine serves, as it reports it."""

    name: str
    max_context: int
    policy_version: int
    logprobs_mode: str | None = None
    """Distribution of the logprobs. `processed_logprobs` is the one sampled from, after temperature (SGLang's
    are before truncation, and truncated tokens are never trained); `raw_logprobs` is the model's own. None if
    the engine neither reports nor shows it to `check`."""
    renderer: str | None = None
    """The renderer of its prompts in tokens mode; None if the engine renders them."""
    records_routing: bool = False
    """Whether it reports the experts of each token."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights to sample with from now on."""

    version: int
    path: str | None = None
    """A path on the engine's machine: a model directory, an adapter directory, or one safetensors file, which
    may be in shared memory. None: the initial weights."""

    @property
    def is_adapter(self) -> bool:
        """Whether the path is a LoRA adapter's directory, if visible from this machine."""
        return self.path is not None and (Path(self.path) / "adapter_config.json").is_file()


class EngineError(PolarError):
    """The engine could not answer."""


class EngineDown(EngineError, Unavailable):
    """The engine could not be reached or was too busy, and nothing it sampled was passed on."""


class RequestUnfit(EngineError):
    """The engine works, but cannot serve this request."""


class ContextOverflow(RequestUnfit):
    """The prompt, or prompt plus max_tokens, does not fit the model's context."""

    def __init__(self, message: str, *, prompt_tokens: int | None = None) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        """Prompt length, if the engine reports it."""


class Unconstrainable(RequestUnfit):
    """The engine cannot enforce the requested constraint; the message says why, for the client."""


class Engine(ABC):
    """One inference backend, reached over the network or not."""

    modes: ClassVar[frozenset[Mode]] = frozenset(Mode)
    """The modes it supports."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the sampled tokens. Closing the iterator aborts the request in the engine."""

    def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        """Like `generate`, but the engine applies the chat template and parses the answer."""
        raise EngineError(f"{type(self).__name__} has no chat mode", hint="set engine.mode to tokens")

    async def score(self, ids: list[int]) -> list[float]:
        """The logprob of each token given those before it, at temperature 1 without truncation; 0.0 for the
        first."""
        raise EngineError(f"{type(self).__name__} cannot score tokens")

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Return the served model; raise EngineError if the engine is not up."""

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        """Check at start-up that the engine supports what Polar needs; raise EngineError if not."""
        return

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        """Return the length of the engine's prompt for a chat; None if unknown."""
        return None

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the engine's token ids of a text, including control tokens; None if unknown."""
        return None

    async def readings(self) -> dict[str, Readings | None]:
        """Return its metrics pages by URL: None if unreachable, empty if it has no URL."""
        return {}

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling, and return once it has stopped. New requests wait. Pausing twice has no further
        effect. An engine that cannot freeze finishes what it has begun."""
        return

    async def resume(self) -> None:
        """Resume sampling; does nothing without a pause."""
        return

    async def update_weights(self, update: WeightUpdate) -> None:
        """Replace the weights during a pause; tokens sampled later carry the new version. On EngineError the
        old weights and their version remain."""
        raise EngineError(
            f"{type(self).__name__} cannot change its weights",
            hint="use an engine that can, or start over with another data_dir",
        )

    def must_drain(self, update: WeightUpdate) -> bool:
        """Whether running requests keep their old weights, and so must end before an update."""
        return False

    @abstractmethod
    async def close(self) -> None:
        """Release connections."""
