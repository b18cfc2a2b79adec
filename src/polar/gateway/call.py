"""One model call: prompt ids from the conversation, tokens from the engine, a record whatever happens."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from polar.dialects.base import Answer
from polar.engines.base import Engine, EngineError, GenerateRequest, ModelInfo, TokenChunk
from polar.gateway.conversation import Extension, Turn
from polar.gateway.sampling import pinned
from polar.gateway.session import Session
from polar.gateway.stop_strings import StopStrings
from polar.models.chat import ChatRequest, FinishReason, Message, Role, Sampling, ToolCall, Usage
from polar.models.completion import Completion, Ids
from polar.rendering.base import MessageDelta, Renderer

Send = Callable[[MessageDelta], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request in tokens."""

    parent: Turn | None
    new_ids: Ids
    """What follows the parent's prompt and sampled ids; everything when there is no parent."""
    ids: list[int]
    """Every token the policy will condition on."""
    messages: tuple[Message, ...]
    """The whole request; what the policy sampled stands as it was sampled, not as it was echoed."""


def render(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt:
    """The exact ids of the conversation plus those of the new messages, or a first render."""
    turn = extension.turn
    if turn is not None:
        before = turn.prompt_ids()
        bridge = renderer.bridge(before.tolist(), turn.sampled_ids.tolist(), extension.new_messages)
        if bridge is not None:
            ids = [*before.tolist(), *turn.sampled_ids.tolist(), *bridge]
            messages = turn.messages + extension.new_messages
            return Prompt(turn, np.array(bridge, np.int32), ids, messages)
    ids = renderer.render(request.messages, request.tools)
    return Prompt(None, np.array(ids, np.int32), ids, request.messages)


class ModelCall:
    """A call from its admission to its record in the session's capture."""

    def __init__(self, session: Session, request: ChatRequest, dialect: str) -> None:
        self.id = secrets.token_hex(12)
        self.started_at = time.time()
        self._session = session
        self._request = request
        self._dialect = dialect
        self._ordinal = session.begin_call()
        self._prompt: Prompt
        self._used: Sampling
        self._tokens = _Tokens()
        self._reply = _Reply()
        self._stop_sequence: str | None = None

    async def prepare(self, renderer: Renderer, model: ModelInfo) -> None:
        """Render the prompt and settle the sampling; RequestRefused if it does not fit."""
        extension = self._session.conversations.find(self._request.messages, self._request.tools)
        # A long first prompt takes many milliseconds to tokenise; other streams go on meanwhile.
        self._prompt = await asyncio.to_thread(render, self._request, extension, renderer)
        grant = self._session.grant
        self._used = pinned(
            self._request.sampling,
            grant.sampling,
            sample=grant.sample,
            ordinal=self._ordinal,
            room=self._session.room(len(self._prompt.ids), model.max_context),
        )

    async def run(self, engine: Engine, renderer: Renderer, send: Send) -> Answer:
        """Sample to the end, sending each delta as it becomes certain; recorded before the last one."""
        try:
            finish_reason, last = await self._sample(engine, renderer, send)
        except (asyncio.CancelledError, ConnectionError):
            self._record(FinishReason.CANCELLED)
            raise
        except Exception as error:
            self._record(FinishReason.ERROR, {"error": f"{type(error).__name__}: {error}"[:1000]})
            raise
        self._record(finish_reason)
        if last:
            await send(last)
        usage = Usage(len(self._prompt.ids), len(self._tokens.ids), self._tokens.cached)
        return Answer(self._reply.message, finish_reason, usage, self._stop_sequence)

    async def _sample(
        self, engine: Engine, renderer: Renderer, send: Send
    ) -> tuple[FinishReason, MessageDelta]:
        """Why the completion ended, and the delta that was still held back then."""
        parser, stops = renderer.parser(), StopStrings(self._used.stop)
        finish_reason: FinishReason | None = None
        delta = MessageDelta()
        request = GenerateRequest(
            self.id,
            self._prompt.ids,
            self._used,
            renderer.stop_token_ids,
            session=self._session.grant.session_id,
        )
        async with aclosing(cast("AsyncGenerator[TokenChunk, None]", engine.generate(request))) as chunks:
            async for chunk in chunks:
                self._session.sampled_tokens += self._tokens.add(chunk)
                delta = parser.feed(chunk.ids)
                delta = self._reply.add(replace(delta, content=stops.feed(delta.content)))
                finish_reason = self._ended(chunk, stops)
                if finish_reason is not None:
                    break
                if delta:
                    await send(delta)
        if finish_reason is None:
            raise EngineError("the engine's tokens ended without a reason")
        rest = parser.finish()
        shown = "" if stops.hit else stops.feed(rest.content) + stops.finish()
        self._stop_sequence = stops.matched
        last = self._reply.add(replace(rest, content=shown))
        if finish_reason is FinishReason.STOP and self._reply.has_calls:
            finish_reason = FinishReason.TOOL_CALLS
        return finish_reason, _joined(delta, last)

    def _ended(self, chunk: TokenChunk, stops: StopStrings) -> FinishReason | None:
        if stops.hit:
            return FinishReason.STOP
        if chunk.finish_reason is not None:
            return chunk.finish_reason
        # Several calls of a session draw on the same budget at once.
        return FinishReason.LENGTH if self._session.tokens_left == 0 else None

    def _record(self, finish_reason: FinishReason, extra: dict[str, str] | None = None) -> None:
        prompt, tokens, message = self._prompt, self._tokens, self._reply.message
        sampled = np.array(tokens.ids, np.int32)
        completion = Completion(
            id=self.id,
            index=self._session.next_index,
            prompt_ids=np.array(prompt.ids, np.int32),
            sampled_ids=sampled,
            logprobs=np.array(tokens.logprobs, np.float32),
            policy_versions=np.array(tokens.versions, np.int32),
            messages=prompt.messages,
            response=message,
            finish_reason=finish_reason,
            parent=prompt.parent.completion_id if prompt.parent else None,
            tools=self._request.tools,
            dialect=self._dialect,
            asked=self._request.sampling,
            used=self._used,
            started_at=self.started_at,
            first_token_at=tokens.first_at,
            ended_at=time.time(),
            extra=extra or {},
        )
        whole = finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
        turn = Turn(self.id, prompt.parent, prompt.new_ids, sampled, (*prompt.messages, message))
        self._session.record(completion, turn if whole else None)


class _Tokens:
    """What the engine has sampled so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.cached = 0
        self.first_at = 0.0

    def add(self, chunk: TokenChunk) -> int:
        if len(chunk.ids) != len(chunk.logprobs):
            raise EngineError(
                f"the engine sent {len(chunk.ids)} token ids with {len(chunk.logprobs)} logprobs"
            )
        if chunk.ids and not self.ids:
            self.first_at = time.time()
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.policy_version] * len(chunk.ids)
        self.cached = max(self.cached, chunk.cached_tokens)
        return len(chunk.ids)


class _Reply:
    """The message as the client gets it; tool calls get ids that are unique in the session."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, delta: MessageDelta) -> MessageDelta:
        named = tuple(replace(call, id=f"call_{secrets.token_hex(12)}") for call in delta.tool_calls)
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._calls.extend(named)
        return replace(delta, tool_calls=named)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def message(self) -> Message:
        return Message(
            role=Role.ASSISTANT,
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )


def _joined(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    return MessageDelta(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
    )
