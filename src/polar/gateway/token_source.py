"""Answers from tokens: the prompt is rendered here, and what is sampled is parsed here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from polar.dialects.base import Refusal, RequestRefused
from polar.engines.base import ChatChunk, Engine, GenerateRequest, ModelInfo, TokenChunk
from polar.gateway.conversation import Extension
from polar.gateway.guidance import Guidance, guidance_for
from polar.gateway.prompt import Prompt, extend, render
from polar.gateway.session import Session, context_overflow
from polar.gateway.source import Generation, Source
from polar.models.chat import ChatRequest, Message, Role, Sampling, TokenLogprob, ToolChoice
from polar.models.completion import Ids
from polar.rendering.base import MessageDelta, Renderer
from polar.rendering.tool_limits import limited

_SHORT = 1_000
"""Characters that are tokenised sooner than another thread would begin with them."""
_VERY_LONG = 250_000
"""Characters beyond which prompts are tokenised one at a time: that takes hundreds of bytes for each."""
_SAMPLES, _SAMPLE = 32, 1_000
"""How many parts of a very long prompt are looked at before all of it is, and the characters of each."""


class TokenSource(Source):
    def __init__(self, engine: Engine, renderer: Renderer, model: ModelInfo) -> None:
        self._engine = engine
        self._renderer = renderer
        self._max_context = model.max_context
        self._very_long = asyncio.Lock()

    async def begin(self, request: ChatRequest, extension: Extension) -> Generation:
        guidance = guidance_for(request, self._renderer)
        if request.is_begun and guidance.constraint is not None:
            raise RequestRefused(
                Refusal.MALFORMED,
                "An answer that is begun cannot be held to a format or a call: end with the user's message.",
                field="messages",
            )
        prompt = await self._prompt(request, extension)
        return _TokenGeneration(self._engine, self._renderer, prompt, guidance, request.tool_choice)

    async def count(self, request: ChatRequest, extension: Extension) -> int | None:
        return len((await self._prompt(request, extension)).ids)

    async def _prompt(self, request: ChatRequest, extension: Extension) -> Prompt:
        unread = extension.new_messages if extension.turn is not None else request.messages
        if sum(len(message.content) for message in extension.new_messages) <= _SHORT:
            extended = extend(request, extension, self._renderer)
            if extended is not None:
                return extended
        # A long prompt takes many milliseconds to tokenise; other streams go on meanwhile.
        if sum(message.length for message in unread) <= _VERY_LONG:
            return await asyncio.to_thread(render, request, extension, self._renderer)
        async with self._very_long:
            await asyncio.to_thread(self._refuse_hopeless, unread)
            return await asyncio.to_thread(render, request, extension, self._renderer)

    def _refuse_hopeless(self, messages: Sequence[Message]) -> None:
        """RequestRefused if samples tell that the messages do not fit: all of them would take much memory."""
        text = "".join(message.content for message in messages)
        places = (random.randrange(len(text) + 1) for _ in range(_SAMPLES))
        sample = "\n".join(text[place : place + _SAMPLE] for place in places)
        ids = self._renderer.render((Message(Role.USER, sample),), ())
        if len(ids) * len(text) > 2 * self._max_context * len(sample):
            raise context_overflow(self._max_context)


class _TokenGeneration(Generation):
    leaves_stops = True

    def __init__(
        self, engine: Engine, renderer: Renderer, prompt: Prompt, guidance: Guidance, choice: ToolChoice
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._parser = limited(renderer.parser(), choice)
        self._prompt = prompt
        self._guidance = guidance

    def room(self, session: Session, model: ModelInfo) -> int:
        return session.room(len(self._prompt.ids), model.max_context)

    def settle(self, sampling: Sampling) -> None:
        self.sampling = replace(sampling, stop=sampling.stop + self._guidance.stop)

    async def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        request = GenerateRequest(
            request_id,
            self._prompt.ids,
            self.sampling,
            self._renderer.stop_token_ids,
            self._guidance.constraint,
            session=session,
        )
        generated = self._engine.generate(request)
        async with aclosing(generated) as chunks:
            async for chunk in chunks:
                delta = _nameless(self._parser.feed(chunk.ids))
                yield ChatChunk(delta, chunk, finish_reason=chunk.finish_reason)

    def spelt(self, tokens: TokenChunk) -> tuple[TokenLogprob, ...]:
        return tuple(map(TokenLogprob, map(self._renderer.spelling, tokens.ids), tokens.logprobs))

    def rest(self) -> MessageDelta:
        return _nameless(self._parser.finish())

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    @property
    def record(self) -> dict[str, str]:
        return self._guidance.record

    def prompt(self, told: Ids) -> Prompt:
        return self._prompt


def _nameless(delta: MessageDelta) -> MessageDelta:
    """A parser numbers the calls of one message; a session needs ids that do not come again."""
    if not delta.tool_calls:
        return delta
    return replace(delta, tool_calls=tuple(replace(call, id="") for call in delta.tool_calls))
