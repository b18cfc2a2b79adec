"""Answers from tokens: the prompt is rendered here, and what is sampled is parsed here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from polar.dialects.base import Refusal, RequestRefused
from polar.engines.base import ChatChunk, Engine, GenerateRequest, ModelInfo, TokenChunk
from polar.errors import InvalidInput
from polar.gateway.conversation import Extension
from polar.gateway.session import Session, context_overflow
from polar.gateway.source import AnswerGeneration, AnswerSource, Prompt
from polar.models.chat import ChatRequest, Message, Role, TokenLogprob, ToolChoice, ToolUse
from polar.models.completion import Ids
from polar.recordings.growth import Turn
from polar.rendering.base import MessageDelta, Renderer, Unrenderable
from polar.rendering.constraints import Constraint, constraint_of
from polar.rendering.tool_calls import FIRST_CALL_ENDS, limited

_SHORT = 1_000
"""Characters that are tokenised sooner than another thread would begin with them."""
_VERY_LONG = 250_000
"""Characters beyond which prompts are tokenised one at a time: that takes hundreds of bytes for each."""
_SAMPLES, _SAMPLE = 32, 1_000
"""How many parts of a very long prompt are looked at before all of it is, and the characters of each."""


class TokenSource(AnswerSource):
    def __init__(self, engine: Engine, renderer: Renderer, model: ModelInfo) -> None:
        self.engine = engine
        self.renderer = renderer
        self.model = model
        self._very_long = asyncio.Lock()

    async def begin(self, request: ChatRequest, extension: Extension) -> AnswerGeneration:
        constraint = _constraint(request, self.renderer)
        if request.is_begun and constraint is not None:
            raise RequestRefused(
                Refusal.MALFORMED,
                "An answer that is begun cannot be held to a format or a call: end with the user's message.",
                field="messages",
            )
        prompt = await self._prompt(request, extension)
        return _TokenGeneration(self, prompt, request, constraint)

    async def count(self, request: ChatRequest, extension: Extension) -> int | None:
        return len((await self._prompt(request, extension)).ids)

    async def _prompt(self, request: ChatRequest, extension: Extension) -> Prompt:
        unread = extension.new_messages if extension.turn is not None else request.messages
        if sum(len(message.content) for message in extension.new_messages) <= _SHORT:
            extended = extend(request, extension, self.renderer)
            if extended is not None:
                return extended
        # A long prompt takes many milliseconds to tokenise; other streams go on meanwhile.
        if sum(message.length for message in unread) <= _VERY_LONG:
            return await asyncio.to_thread(render, request, extension, self.renderer)
        async with self._very_long:
            await asyncio.to_thread(self._refuse_hopeless, unread)
            return await asyncio.to_thread(render, request, extension, self.renderer)

    def _refuse_hopeless(self, messages: Sequence[Message]) -> None:
        """RequestRefused if samples tell that the messages do not fit: all of them would take much memory."""
        text = "".join(message.content for message in messages)
        places = (random.randrange(len(text) + 1) for _ in range(_SAMPLES))
        sample = "\n".join(text[place : place + _SAMPLE] for place in places)
        ids = self.renderer.render((Message(Role.USER, sample),), ())
        if len(ids) * len(text) > 2 * self.model.max_context * len(sample):
            raise context_overflow(self.model.max_context)


class _TokenGeneration(AnswerGeneration):
    leaves_stops = True

    def __init__(
        self, source: TokenSource, prompt: Prompt, request: ChatRequest, constraint: Constraint | None
    ) -> None:
        self._engine = source.engine
        self._renderer = source.renderer
        self._model = source.model
        self._parser = limited(self._renderer.parser(), request.tool_choice)
        self._prompt = prompt
        self._constraint = constraint
        if constraint is None and _ends_at_first_call(request, self._renderer):
            self.own_stops = (FIRST_CALL_ENDS,)

    def room(self, session: Session) -> int:
        return session.room(len(self._prompt.ids), self._model.max_context)

    async def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        request = GenerateRequest(
            request_id,
            self._prompt.ids,
            self.sampling,
            self._renderer.stop_token_ids,
            self._constraint,
            session=session,
        )
        async with aclosing(self._engine.generate(request)) as chunks:
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
        """The logprobs of a constrained answer are those of a masked distribution."""
        return {"constraint": self._constraint.kind} if self._constraint else {}

    def prompt(self, told: Ids) -> Prompt:
        return self._prompt


def _nameless(delta: MessageDelta) -> MessageDelta:
    """A parser numbers the calls of one message; a session needs ids that do not come again."""
    if not delta.tool_calls:
        return delta
    return replace(delta, tool_calls=tuple(replace(call, id="") for call in delta.tool_calls))


def _constraint(request: ChatRequest, renderer: Renderer) -> Constraint | None:
    """What tool choice and output format hold the answer to; RequestRefused where the model's family cannot
    be held so."""
    if request.tool_choice == ToolChoice() and request.output is None:
        return None
    try:
        return constraint_of(request, renderer.form)
    except InvalidInput as error:
        field = "response_format" if request.output is not None else "tool_choice"
        raise RequestRefused(Refusal.MALFORMED, error.message, field=field) from None


def _ends_at_first_call(request: ChatRequest, renderer: Renderer) -> bool:
    choice = request.tool_choice
    may_call = choice.use is ToolUse.AUTO and bool(request.tools)
    return may_call and not choice.parallel and renderer.form.writes_calls


def extend(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt | None:
    """The conversation's ids and those of the new messages; None if there is none, or none to extend so."""
    turn = extension.turn
    if turn is None:
        return None
    new = _named(extension.new_messages, turn.messages[-1])
    bridge = _bridge(turn, new, renderer, is_begun=request.is_begun)
    if bridge is None:
        return None
    ids = np.concatenate([turn.prompt_ids(), turn.sampled_ids, np.array(bridge, np.int32)])
    return Prompt(ids, turn.messages + new, extension.follows)


def render(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt:
    """As `extend`, or a first render where that is not possible."""
    extended = extend(request, extension, renderer)
    if extended is not None:
        return extended
    messages, begun = request.messages, list[int]()
    if request.is_begun:
        messages, begun = messages[:-1], _opened(messages[-1], renderer)
    try:
        ids = np.array(renderer.render(messages, request.tools) + begun, np.int32)
    except Unrenderable as error:
        raise RequestRefused(Refusal.MALFORMED, str(error), field="messages") from None
    return Prompt(ids, request.messages, extension.follows)


def _bridge(turn: Turn, new: tuple[Message, ...], renderer: Renderer, *, is_begun: bool) -> list[int] | None:
    """What follows a turn's ids so that the model answers, or goes on with the answer that is begun."""
    if not is_begun:
        return renderer.bridge(turn.prompt_ids(), turn.sampled_ids, new)
    if not new:
        # The answer's beginning is what the model sampled last: it goes on, unless it had ended there.
        has_ended = len(turn.sampled_ids) and turn.sampled_ids[-1] in renderer.stop_token_ids
        return None if has_ended else []
    bridge = renderer.bridge(turn.prompt_ids(), turn.sampled_ids, new[:-1])
    return None if bridge is None else bridge + _opened(new[-1], renderer)


def _opened(begun: Message, renderer: Renderer) -> list[int]:
    """The ids of an answer's beginning that the client gives."""
    is_text = not begun.tool_calls and not begun.reasoning
    ids = renderer.opened(begun.content) if is_text else None
    if ids is None:
        what = "by this model's template" if is_text else "with thoughts or calls"
        raise RequestRefused(
            Refusal.MALFORMED,
            f"The last message is the assistant's, and an answer cannot be begun {what}: "
            "end with a message of the user, or with text of the assistant alone.",
            field="messages",
        )
    return ids


def _named(messages: Sequence[Message], sampled: Message) -> tuple[Message, ...]:
    """Results with the name of the tool they come from: some templates show it, few dialects carry it."""
    names = {call.id: call.name for call in sampled.tool_calls}
    return tuple(
        replace(message, name=names[message.tool_call_id])
        if message.role is Role.TOOL and message.name is None and message.tool_call_id in names
        else message
        for message in messages
    )
