"""Where a call's answer comes from: tokens rendered and parsed here, or a chat that the engine renders."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from polar.dialects.base import Refusal, RequestRefused
from polar.engines.base import (
    ChatCall,
    ChatChunk,
    ContextOverflow,
    GenerateRequest,
    ModelInfo,
    TokenChunk,
)
from polar.engines.pausable import PausableEngine
from polar.errors import InvalidInput
from polar.gateway.conversation import Extension
from polar.gateway.session import Session, context_overflow
from polar.models.chat import ChatRequest, Message, Role, Sampling, TokenLogprob, ToolChoice, ToolUse
from polar.models.completion import CONSTRAINT, Ids
from polar.recordings.growth import Turn
from polar.rendering.base import MessageDelta, RawParser, Renderer, ResponseParser, Unrenderable
from polar.rendering.constraints import Constraint, constraint_of
from polar.rendering.tool_calls import FIRST_CALL_ENDS, limited

_SHORT = 1_000
"""Characters that are tokenised sooner than another thread would begin with them."""
_LONG_PAST = 20_000
"""Tokens of a conversation beyond which an extension takes longer too: some templates look at all of it."""
_VERY_LONG = 250_000
"""Characters beyond which prompts are tokenised one at a time: that takes hundreds of bytes for each."""
_SAMPLES, _SAMPLE = 32, 1_000
"""How many parts of a very long prompt are looked at before all of it is, and the characters of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the policy will condition on."""

    ids: Ids
    messages: tuple[Message, ...]
    """The whole request; what the policy sampled stands as it was sampled, not as it was echoed."""
    recorded: int = 0
    """How many of its first tokens are those of the turn that it extends."""


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
    routed_from: int | None = None
    """The first token of the prompt whose experts the engine is to tell; None: it does not tell them."""

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


class TokenSource(AnswerSource):
    """The prompt is rendered here, and what is sampled is parsed here."""

    def __init__(self, engine: PausableEngine, renderer: Renderer, model: ModelInfo) -> None:
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
        if _is_soon_extended(extension):
            extended = extend(request, extension, self.renderer)
            if extended is not None:
                return extended
            extension = replace(extension, turn=None)
        unread = extension.new_messages if extension.turn is not None else request.messages
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


def _is_soon_extended(extension: Extension) -> bool:
    turn, new = extension.turn, extension.new_messages
    if turn is None or turn.length > _LONG_PAST:
        return False
    return sum(len(message.content) for message in new) <= _SHORT


class _TokenGeneration(AnswerGeneration):
    leaves_stops = True

    def __init__(
        self, source: TokenSource, prompt: Prompt, request: ChatRequest, constraint: Constraint | None
    ) -> None:
        self._engine = source.engine
        self._renderer = source.renderer
        self._model = source.model
        self._parser: ResponseParser = RawParser(self._renderer)
        if request.raw is None:
            self._parser = limited(self._renderer.parser(request.tools, prompt.ids), request.tool_choice)
        self._prompt = prompt
        self._constraint = constraint
        if self._model.records_routing:
            # The last token of the turn before was sampled, and is only now computed.
            self.routed_from = max(prompt.recorded - 1, 0)
        if constraint is None and _ends_at_first_call(request, self._renderer):
            self.own_stops = (FIRST_CALL_ENDS,)

    def room(self, session: Session) -> int | None:
        return session.room(len(self._prompt.ids), self._model.max_context)

    async def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        request = GenerateRequest(
            request_id,
            self._prompt.ids,
            self.sampling,
            self._renderer.stop_token_ids,
            self._constraint,
            session=session,
            routed_from=self.routed_from or 0,
        )
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                delta = self._parser.feed(chunk.ids)
                yield ChatChunk(delta, chunk, finish_reason=chunk.finish_reason)

    def spelt(self, tokens: TokenChunk) -> tuple[TokenLogprob, ...]:
        return tuple(map(TokenLogprob, map(self._renderer.spelling, tokens.ids), tokens.logprobs))

    def rest(self) -> MessageDelta:
        return self._parser.finish()

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    @property
    def record(self) -> dict[str, str]:
        """The logprobs of a constrained answer are those of a masked distribution."""
        return {CONSTRAINT: self._constraint.kind} if self._constraint else {}

    def prompt(self, told: Ids) -> Prompt:
        return self._prompt


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
    bridge = _bridge(request, turn, new, renderer)
    if bridge is None:
        return None
    ids = np.concatenate([turn.prompt_ids(), turn.sampled_ids, np.array(bridge, np.int32)])
    return Prompt(ids, turn.messages + new, turn.length)


def render(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt:
    """As `extend`, or a first render where that is not possible."""
    if request.raw is not None:
        return _raw_prompt(request, request.raw, renderer)
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
    return Prompt(ids, request.messages)


def _raw_prompt(request: ChatRequest, raw: str | tuple[int, ...], renderer: Renderer) -> Prompt:
    if isinstance(raw, str):
        ids, messages = renderer.raw.ids(raw), request.messages
    else:
        unknown = next((id for id in raw if not renderer.raw.has(id)), None)
        if unknown is not None:
            raise _wrong_prompt(f"{unknown} is no token of this model")
        spelt = b"".join(map(renderer.spelling, raw)).decode(errors="replace")
        ids, messages = list(raw), (Message(Role.USER, spelt),)
    if not ids:
        raise _wrong_prompt("must hold at least one token")
    return Prompt(np.array(ids, np.int32), messages)


def _wrong_prompt(why: str) -> RequestRefused:
    return RequestRefused(Refusal.MALFORMED, f"prompt: {why}", field="prompt")


def _bridge(
    request: ChatRequest, turn: Turn, new: tuple[Message, ...], renderer: Renderer
) -> list[int] | None:
    """What follows a turn's ids so that the model answers, or goes on with the answer that is begun."""
    begun = new[-1:] if request.is_begun else ()
    if request.is_begun and not begun:
        # The answer's beginning is what the model sampled last: it goes on, unless it had ended there.
        has_ended = len(turn.sampled_ids) and turn.sampled_ids[-1] in renderer.stop_token_ids
        return None if has_ended else []
    bridge = renderer.bridge(
        turn.prompt_ids(),
        turn.sampled_ids,
        new[: len(new) - len(begun)],
        history=turn.messages,
        tools=request.tools,
    )
    return None if bridge is None else bridge + [id for each in begun for id in _opened(each, renderer)]


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


class ChatSource(AnswerSource):
    """The engine renders and parses, and says which tokens it saw and sampled."""

    def __init__(self, engine: PausableEngine, model: ModelInfo) -> None:
        self._engine = engine
        self.model = model

    async def begin(self, request: ChatRequest, extension: Extension) -> AnswerGeneration:
        if request.logprobs:
            raise RequestRefused(
                Refusal.MALFORMED,
                "logprobs are served only where the gateway renders prompts itself (engine.mode: tokens).",
                field="logprobs",
            )
        if request.raw is not None:
            raise RequestRefused(
                Refusal.MALFORMED,
                "A text is continued as it is only where the gateway knows the model's tokens "
                "(engine.mode: tokens): ask in a chat.",
                field="prompt",
            )
        if request.tool_choice.arguments is not None:
            raise RequestRefused(
                Refusal.MALFORMED,
                "A task prescribes calls (sampling.calls) only where the gateway renders prompts itself "
                "(engine.mode: tokens).",
                field="tool_choice",
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

    def __init__(
        self, engine: PausableEngine, model: ModelInfo, request: ChatRequest, extension: Extension
    ) -> None:
        self._engine = engine
        self._model = model
        self._request = request
        self._extension = extension

    def room(self, session: Session) -> int | None:
        # Of the prompt only the turn that it follows is known.
        follows = self._extension.follows
        return session.room(session.context_of(follows.completion_id) if follows else 0)

    async def chunks(self, request_id: str, session: str) -> AsyncGenerator[ChatChunk, None]:
        for is_last_try in (False, True):
            call = ChatCall(request_id, self._request, self.sampling, session)
            try:
                async with aclosing(await self._engine.chat(call)) as chunks:
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
            return {CONSTRAINT: "response_format"}
        is_bound = self._request.tool_choice.use is ToolUse.REQUIRED
        return {CONSTRAINT: "tool_choice"} if is_bound else {}

    def prompt(self, told: Ids) -> Prompt:
        turn = self._extension.turn
        if turn is not None and 0 < turn.length == turn.common_prefix(told):
            # The engine's prompt begins with exactly what the policy saw and sampled in that turn.
            return Prompt(told, turn.messages + self._extension.new_messages)
        return Prompt(told, self._request.messages)
