"""Answers from a chat: the engine renders and parses, and says which tokens it saw and sampled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from polar.dialects.base import Refusal, RequestRefused
from polar.engines.base import ChatCall, ChatChunk, ContextOverflow, Engine, ModelInfo
from polar.gateway.conversation import Extension
from polar.gateway.prompt import Prompt
from polar.gateway.session import Session
from polar.gateway.source import Generation, Source
from polar.models.chat import ChatRequest, ToolUse
from polar.models.completion import Ids


class ChatSource(Source):
    def __init__(self, engine: Engine, model: ModelInfo) -> None:
        self._engine = engine
        self._model = model

    async def begin(self, request: ChatRequest, extension: Extension) -> Generation:
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
        return _ChatGeneration(self._engine, self._model, request, extension)

    async def count(self, request: ChatRequest, extension: Extension) -> int | None:
        return await self._engine.count_tokens(request)


class _ChatGeneration(Generation):
    leaves_stops = False

    def __init__(self, engine: Engine, model: ModelInfo, request: ChatRequest, extension: Extension) -> None:
        self._engine = engine
        self._model = model
        self._request = request
        self._extension = extension

    def room(self, session: Session, model: ModelInfo) -> int | None:
        follows = self._extension.follows
        return session.room_after(follows.completion_id if follows else None)

    def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        call = ChatCall(request_id, self._request, self.sampling, session)
        return self._engine.chat(call)

    def is_shortened_to_fit(self, overflow: ContextOverflow) -> bool:
        """Providers take a limit that runs over the context; some engines refuse it."""
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
