"""Where a call's answer comes from: tokens rendered and parsed here, or a chat that the engine renders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from polar.engines.base import ChatChunk, ContextOverflow, ModelInfo, TokenChunk
from polar.gateway.conversation import Extension
from polar.gateway.prompt import Prompt
from polar.gateway.session import Session
from polar.models.chat import ChatRequest, Sampling, TokenLogprob
from polar.models.completion import Ids
from polar.rendering.base import MessageDelta


class Generation(ABC):
    """One call's prompt on its way in, and its answer on its way out."""

    sampling: Sampling
    """What it samples with, once that is settled."""
    leaves_stops: bool
    """Whether stop strings still stand in the text, to be cut out of it."""

    @abstractmethod
    def room(self, session: Session, model: ModelInfo) -> int | None:
        """How many tokens may be sampled; None: as many as the engine has room for."""

    def settle(self, sampling: Sampling) -> None:
        """Take what the session's pins and the room leave of the request's wishes."""
        self.sampling = sampling

    @abstractmethod
    def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        """The answer as it comes. Closing the iterator aborts it in the engine."""

    def is_shortened_to_fit(self, overflow: ContextOverflow) -> bool:
        """Whether the prompt fits and only the answer's limit did not, which is lowered then."""
        return False

    def spelt(self, tokens: TokenChunk) -> tuple[TokenLogprob, ...]:
        """Sampled tokens as a client that asks for logprobs sees them."""
        raise NotImplementedError("requests for logprobs are refused here")

    def rest(self) -> MessageDelta:
        """What is still held back of the message when no more chunks are taken."""
        return MessageDelta()

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the model thought in, as far as they are told apart here."""
        return 0

    @property
    def record(self) -> dict[str, str]:
        """What a reader of the recording must know besides."""
        return {}

    @abstractmethod
    def prompt(self, told: Ids) -> Prompt:
        """What the policy conditioned on; `told` is what the engine has said of that, if anything."""


class Source(ABC):
    """One way to have requests answered."""

    @abstractmethod
    async def begin(self, request: ChatRequest, extension: Extension) -> Generation: ...

    @abstractmethod
    async def count(self, request: ChatRequest, extension: Extension) -> int | None:
        """How long the prompt would be; None if there is no way to know."""
