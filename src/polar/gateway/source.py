"""Where a call's answer comes from: tokens rendered and parsed here, or a chat that the engine renders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from polar.dialects.base import Refusal, RequestRefused
from polar.engines.base import ChatCall, ChatChunk, ContextOverflow, Engine, ModelInfo, TokenChunk
from polar.gateway.conversation import Extension
from polar.gateway.session import Session
from polar.models.chat import ChatRequest, Message, Sampling, TokenLogprob, ToolUse
from polar.models.completion import Ids
from polar.recordings.growth import Turn
from polar.rendering.base import MessageDelta


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the policy will condition on."""

    ids: Ids
    messages: tuple[Message, ...]
    """The whole request; what the policy sampled stands as it was sampled, not as it was echoed."""
    follows: Turn | None = None
    """The turn whose messages it continues, also where its tokens could not be extended."""


class AnswerGeneration(ABC):
    """One call's prompt on its way in, and its answer on its way out."""

    sampling: Sampling
    """What it samples with, once that is settled."""
    leaves_stops: bool
    """Whether stop strings still stand in the text, to be cut out of it."""
    own_stops: tuple[str, ...] = ()
    """Strings that end the turn, beside those the harness asked for."""
    untrainable_when_cut: str | None = None
    """Why an answer that is cut here, before the engine has ended it, cannot be trained; None: it can."""

    @abstractmethod
    def room(self, session: Session) -> int | None:
        """How many tokens may be sampled; None: as many as the engine has room for."""

    @abstractmethod
    def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        """The answer as it comes. Closing the iterator aborts it in the engine."""

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


class AnswerSource(ABC):
    """One way to have requests answered."""

    model: ModelInfo

    @abstractmethod
    async def begin(self, request: ChatRequest, extension: Extension) -> AnswerGeneration: ...

    @abstractmethod
    async def count(self, request: ChatRequest, extension: Extension) -> int | None:
        """How long the prompt would be; None if there is no way to know."""


class ChatSource(AnswerSource):
    """The engine renders and parses, and says which tokens it saw and sampled."""

    def __init__(self, engine: Engine, model: ModelInfo) -> None:
        self._engine = engine
        self.model = model

    async def begin(self, request: ChatRequest, extension: Extension) -> AnswerGeneration:
        if request.logprobs:
            raise RequestRefused(
                Refusal.MALFORMED,
                "logprobs are served only where the gateway renders prompts itself (engine.mode: tokens).",
                field="logprobs",
            )
        if request.is_begun:
            raise RequestRefused(
                Refusal.MALFORMED,
                "The last message is the assistant's: an answer can be begun only where the gateway renders "
                "prompts itself (engine.mode: tokens). End with a message of the user.",
                field="messages",
            )
        return _ChatGeneration(self._engine, self.model, request, extension)

    async def count(self, request: ChatRequest, extension: Extension) -> int | None:
        return await self._engine.count_tokens(request)


class _ChatGeneration(AnswerGeneration):
    leaves_stops = False
    untrainable_when_cut = "it was cut before the engine had counted its tokens"

    def __init__(self, engine: Engine, model: ModelInfo, request: ChatRequest, extension: Extension) -> None:
        self._engine = engine
        self._model = model
        self._request = request
        self._extension = extension

    def room(self, session: Session) -> int | None:
        follows = self._extension.follows
        return session.room_after(follows.completion_id if follows else None)

    async def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        for is_last_try in (False, True):
            call = ChatCall(request_id, self._request, self.sampling, session)
            try:
                async with aclosing(self._engine.chat(call)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except ContextOverflow as overflow:
                if is_last_try or not self._is_shortened_to_fit(overflow):
                    raise

    def _is_shortened_to_fit(self, overflow: ContextOverflow) -> bool:
        """Whether the prompt fits and only the answer's limit does not, which is lowered then: providers take
        a limit that runs over the context, some engines refuse it."""
        asked, prompt = self.sampling.max_tokens, overflow.prompt_tokens
        if asked is None or prompt is None or not 0 < self._model.max_context - prompt < asked:
            return False
        self.sampling = replace(self.sampling, max_tokens=self._model.max_context - prompt)
        return True

    @property
    def record(self) -> dict[str, str]:
        """As in tokens mode: the logprobs of a constrained answer are those of a masked distribution."""
        if self._request.output is not None:
            return {"constraint": "response_format"}
        is_bound = self._request.tool_choice.use is ToolUse.REQUIRED
        return {"constraint": "tool_choice"} if is_bound else {}

    def prompt(self, told: Ids) -> Prompt:
        turn, follows = self._extension.turn, self._extension.follows
        if turn is not None and 0 < turn.length == turn.common_prefix(told):
            # The engine's prompt begins with exactly what the policy saw and sampled in that turn.
            return Prompt(told, turn.messages + self._extension.new_messages, follows)
        return Prompt(told, self._request.messages, follows)
