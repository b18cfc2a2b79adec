"""What the gateway needs of an inference backend: tokens in, tokens and logprobs out, as a stream."""

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
"""The version of weights of which some may be old and others new. Nobody asks for it, so they are loaded
again, whichever are wanted."""


class Mode(StrEnum):
    """Who renders the prompt."""

    TOKENS = "tokens"
    """The gateway: exact ids go in, and no history is tokenised twice."""
    CHAT = "chat"
    """The engine: messages go in; it says what ids it made of them."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, already rendered to tokens."""

    request_id: str
    prompt_ids: Ids | list[int]
    """An array of a long conversation is written to the wire as it is, never as a list of numbers."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    session: str = ""
    """Whose request it is: requests of one session share a prefix, and so belong on one replica."""
    routed_from: int = 0
    """The first token of the prompt whose experts are wanted, from an engine that records them; those before
    it are recorded already."""

    @property
    def is_guided(self) -> bool:
        """Whether tokens are drawn from other logits than the model's own."""
        return self.constraint is not None or self.sampling.is_reshaped


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What an engine produced since the last chunk.

    `ids` holds every sampled token, the end-of-turn token included; len(ids) == len(logprobs).
    """

    ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache, where the engine says so (first chunk)."""
    routing: Routing | None = field(default=None, compare=False)
    """On the last chunk, of an engine that records it: as in `Completion.routing`."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One generation whose prompt the engine renders itself (chat mode)."""

    request_id: str
    chat: ChatRequest
    sampling: Sampling
    """What to sample with: what the chat asks for, with pins and limits applied."""
    session: str = ""


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """What a chat-mode engine produced since the last chunk: the message as it parsed it, and the tokens."""

    delta: MessageDelta = field(default_factory=MessageDelta)
    tokens: TokenChunk | None = None
    """None where the engine gives text only; such a completion is recorded and never trainable."""
    prompt_ids: Ids | None = None
    """On the first chunk: what the policy conditioned on, where the engine says so."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    usage: Usage | None = None
    """On the last chunk, where the engine counts tokens that it does not show."""
    stop_sequence: str | None = None
    """On the last chunk: which of the request's stop sequences ended it, if one did."""
    untrainable: str | None = None
    """Why the tokens so far can never be trained: ids or logprobs are missing or do not match."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine says of the model it serves."""

    name: str
    max_context: int
    policy_version: int
    logprobs_mode: str | None = None
    """Of which distribution the logprobs are: `processed_logprobs` is the one sampled from, after temperature
    (SGLang's are before cuts, and tokens that were cut are never trained); `raw_logprobs` the model's own,
    before it; None: the engine neither says so nor shows it to `check`."""
    renderer: str | None = None
    """What renders its prompts in tokens mode; None: the engine itself."""
    records_routing: bool = False
    """Whether it tells which experts each token went to."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights to sample with from now on."""

    version: int
    path: str | None = None
    """As the engine's machine sees it: a model's directory, an adapter's, or one safetensors file, which may
    lie in shared memory. None: the weights that the engine was started with."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is a directory with a LoRA adapter, as far as can be seen from here."""
        return self.path is not None and (Path(self.path) / "adapter_config.json").is_file()


class EngineError(PolarError):
    """The engine could not answer."""


class EngineDown(EngineError, Unavailable):
    """The engine could not be reached or was too busy, and nothing it sampled was passed on."""


class RequestUnfit(EngineError):
    """The engine is well, and cannot serve this request."""


class ContextOverflow(RequestUnfit):
    """The prompt, or prompt plus max_tokens, does not fit the model's context."""

    def __init__(self, message: str, *, prompt_tokens: int | None = None) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        """How long the prompt is, where the engine says so."""


class Unconstrainable(RequestUnfit):
    """The engine cannot hold a completion to what was asked; the message says why and is for the client."""


class Engine(ABC):
    """One inference backend, reached over the network or not."""

    modes: ClassVar[frozenset[Mode]] = frozenset(Mode)
    """The ways it can be asked."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the sampled tokens. Closing the iterator aborts the request in the engine."""

    def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        """As `generate`, but the engine applies the chat template and parses the answer."""
        raise EngineError(f"{type(self).__name__} has no chat mode", hint="set engine.mode to tokens")

    async def score(self, ids: list[int]) -> list[float]:
        """The logprob of each token after those before it; the first token has none and gets 0.0.

        At temperature 1 with nothing cut: what no engine lets one choose for tokens that it does not sample.
        """
        raise EngineError(f"{type(self).__name__} cannot score tokens")

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """The served model; raises EngineError while the engine is not up."""

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        """Find out at start-up whether the engine can do what Polar needs; EngineError says what it lacks."""
        return

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        """How long the engine's prompt for a chat would be; None if it cannot say."""
        return None

    async def tokenize(self, text: str) -> list[int] | None:
        """The engine's own ids of a text, control tokens recognised; None if it cannot say."""
        return None

    async def readings(self) -> dict[str, Readings | None]:
        """What it says of its load and caches, by URL; None: it cannot be reached. Empty: it has no URL."""
        return {}

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; return once that is so. What comes meanwhile waits.

        Pausing again changes nothing. An engine that cannot freeze goes on with what it has begun.
        """
        return

    async def resume(self) -> None:
        """Go on; nothing changes if there is no pause."""
        return

    async def update_weights(self, update: WeightUpdate) -> None:
        """Replace the weights, during a pause. Every token sampled later carries the new version.

        All or nothing: EngineError leaves the old weights and their version.
        """
        raise EngineError(
            f"{type(self).__name__} cannot change its weights",
            hint="go on with an engine that can, or begin anew with another data_dir",
        )

    def begins_anew(self, update: WeightUpdate) -> bool:
        """Whether a request keeps the weights that it began with: those under way must then end first."""
        return False

    @abstractmethod
    async def close(self) -> None:
        """Release connections."""
