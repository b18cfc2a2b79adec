"""One model call: a prompt from the conversation, an answer from its source, a record whatever happens."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from polar.dialects.base import Answer
from polar.engines.base import ChatChunk, ContextOverflow, EngineError, ModelInfo, RequestUnfit, TokenChunk
from polar.gateway.abridgement import abridged
from polar.gateway.sampling import pinned
from polar.gateway.session import Session
from polar.gateway.source import Generation, Source
from polar.gateway.stop_strings import StopStrings
from polar.models.chat import ChatRequest, FinishReason, Message, Role, TokenLogprob, ToolCall, Usage
from polar.models.completion import CACHED, COUNTED, COUNTED_PROMPT, OMITTED, OUTAGE, Completion, Ids
from polar.rendering.base import MessageDelta

Send = Callable[[MessageDelta], Awaitable[None]]

_NO_IDS: Ids = np.empty(0, np.int32)
_NO_USAGE = Usage(0, 0)


class ModelCall:
    """A call from its admission to its record in the session's capture."""

    def __init__(
        self, session: Session, request: ChatRequest, dialect: str, ordinal: int = 0, choice: int = 0
    ) -> None:
        """`ordinal` is its place among the session's calls, `choice` among those of its request."""
        self.id = os.urandom(12).hex()
        self.started_at = time.time()
        self.session = session
        self._request = request
        self._dialect = dialect
        self._ordinal = ordinal
        self._choice = choice
        self._generation: Generation
        self._tokens = _Tokens()
        self._reply = _Reply()
        self._stop_sequence: str | None = None
        self._logprobs: list[TokenLogprob] = []

    async def prepare(self, source: Source, model: ModelInfo) -> None:
        """Find the prompt and settle the sampling; RequestRefused if it does not fit."""
        extension = self.session.find(self._request, model.max_context)
        self._generation = await source.begin(self._request, extension)
        grant = self.session.grant
        self._generation.settle(
            pinned(
                self._request.sampling,
                grant.sampling,
                sample=grant.sample,
                ordinal=self._ordinal,
                choice=self._choice,
                room=self._generation.room(self.session, model),
            )
        )

    async def run(self, send: Send) -> Answer:
        """Sample to the end, sending each delta as it becomes certain; recorded before the last one."""
        try:
            finish_reason, last = await self._sample_to_fit(send)
        except (asyncio.CancelledError, ConnectionError):
            self._record(FinishReason.CANCELLED)
            raise
        except Exception as error:
            self._record(FinishReason.ERROR, _of_failure(error))
            raise
        message, usage = self._record(finish_reason)
        # A retry may ask for the answer for a while; what it was made of is large, and is not kept for that.
        del self._generation, self._tokens, self._request
        if last:
            await send(last)
        return Answer(message, finish_reason, usage, self._stop_sequence, tuple(self._logprobs))

    async def _sample_to_fit(self, send: Send) -> tuple[FinishReason, MessageDelta]:
        try:
            return await self._sample(send)
        except ContextOverflow as overflow:
            if not self._generation.is_shortened_to_fit(overflow):
                raise
        return await self._sample(send)

    async def _sample(self, send: Send) -> tuple[FinishReason, MessageDelta]:
        """Why the completion ended, and the delta that was still held back then."""
        generation = self._generation
        stops = StopStrings(generation.sampling.stop if generation.leaves_stops else ())
        finish_reason: FinishReason | None = None
        delta = MessageDelta()
        async with aclosing(generation.chunks(self.id, self.session.grant.session_id)) as chunks:
            async for chunk in chunks:
                self._take_tokens(chunk)
                delta = self._take_delta(self._with_logprobs(chunk), stops)
                finish_reason = self._ended(chunk, stops)
                if finish_reason is not None:
                    break
                if delta:
                    await send(delta)
        if finish_reason is None:
            raise EngineError("the engine's tokens ended without a reason")
        if generation.leaves_stops:  # else there is nothing that was held back
            rest = generation.rest()
            shown = "" if stops.hit else stops.feed(rest.content) + stops.finish()
            delta = _joined(delta, self._reply.add(replace(rest, content=shown)))
        matched = stops.matched or chunk.stop_sequence
        # A turn may also end at a string of our own, of which the client knows nothing.
        self._stop_sequence = matched if matched in self._request.sampling.stop else None
        if finish_reason is FinishReason.STOP and self._reply.has_calls:
            finish_reason = FinishReason.TOOL_CALLS
        return finish_reason, delta

    def _take_tokens(self, chunk: ChatChunk) -> None:
        self.session.sampled_tokens += self._tokens.add(chunk)
        if chunk.prompt_ids is not None:
            self.session.refuse_long_prompt(len(chunk.prompt_ids))

    def _with_logprobs(self, chunk: ChatChunk) -> MessageDelta:
        if not self._request.logprobs or chunk.tokens is None:
            return chunk.delta
        spelt = self._generation.spelt(chunk.tokens)
        self._logprobs += spelt
        return replace(chunk.delta, logprobs=spelt)

    def _take_delta(self, delta: MessageDelta, stops: StopStrings) -> MessageDelta:
        if self._generation.leaves_stops and (shown := stops.feed(delta.content)) != delta.content:
            delta = replace(delta, content=shown)
        return self._reply.add(delta)

    def _ended(self, chunk: ChatChunk, stops: StopStrings) -> FinishReason | None:
        if stops.hit:
            return FinishReason.STOP
        if chunk.finish_reason is not None:
            return chunk.finish_reason
        # Several calls of a session draw on the same budget at once.
        is_spent = self.session.tokens_left == 0 or self.session.is_full(self._tokens.context)
        return FinishReason.LENGTH if is_spent else None

    def _record(
        self, finish_reason: FinishReason, extra: dict[str, str] | None = None
    ) -> tuple[Message, Usage]:
        tokens, message = self._tokens, self._reply.message
        prompt = self._generation.prompt(tokens.prompt_ids)
        usage = tokens.usage(len(prompt.ids), self._generation.reasoning_tokens)
        completion = Completion(
            id=self.id,
            index=self.session.next_index,
            prompt_ids=prompt.ids,
            sampled_ids=np.array(tokens.ids, np.int32),
            logprobs=np.array(tokens.logprobs, np.float32),
            policy_versions=np.array(tokens.versions, np.int32),
            messages=prompt.messages,
            response=message,
            finish_reason=finish_reason,
            follows=prompt.follows.completion_id if prompt.follows else None,
            tools=self._request.tools,
            dialect=self._dialect,
            asked=self._request.sampling,
            used=self._generation.sampling,
            started_at=self.started_at,
            first_token_at=tokens.first_at,
            ended_at=time.time(),
            untrainable=tokens.untrainable or (None if len(prompt.ids) else "the engine gave no prompt ids"),
            extra={
                **self._request.hints,
                **{f"{OMITTED}{kind}": str(count) for kind, count in self._request.omitted.items()},
                **self._generation.record,
                **tokens.counts,
                **(extra or {}),
            },
        )
        whole = finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
        if not whole and not tokens.first_at:
            completion = abridged(completion)
        self.session.record(completion, usage, is_whole=whole)
        return message, usage


def calls_for(session: Session, request: ChatRequest, dialect: str) -> list[ModelCall]:
    """A call for each sample that the request asks for; RequestRefused if the session may not make them."""
    ordinals = session.begin_calls(request.choices)
    return [ModelCall(session, request, dialect, ordinal, choice) for choice, ordinal in enumerate(ordinals)]


def _of_failure(error: Exception) -> dict[str, str]:
    """What the record of a call that failed says of it."""
    is_outage = isinstance(error, EngineError) and not isinstance(error, RequestUnfit)
    return {"error": f"{type(error).__name__}: {error}"[:1000], **({OUTAGE: "yes"} if is_outage else {})}


class _Tokens:
    """What the engine has sampled so far."""

    def __init__(self) -> None:
        self.prompt_ids: Ids = _NO_IDS
        """As far as the engine has told them."""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.first_at = 0.0
        self.untrainable: str | None = None
        self._cached = 0
        self._counted: Usage | None = None

    def add(self, chunk: ChatChunk) -> int:
        """Take a chunk; how many tokens of it were sampled that are not counted yet."""
        if not self.first_at and (chunk.tokens or chunk.delta):
            self.first_at = time.time()
        if chunk.prompt_ids is not None:
            self.prompt_ids = chunk.prompt_ids
        self.untrainable = chunk.untrainable or self.untrainable
        self._counted = chunk.usage or self._counted
        if chunk.tokens is not None:
            return self._add(chunk.tokens)
        return chunk.usage.sampled_tokens if chunk.usage and not self.ids else 0

    def _add(self, tokens: TokenChunk) -> int:
        if len(tokens.ids) != len(tokens.logprobs):
            raise EngineError(
                f"the engine sent {len(tokens.ids)} token ids with {len(tokens.logprobs)} logprobs"
            )
        self.ids += tokens.ids
        self.logprobs += tokens.logprobs
        self.versions += [tokens.policy_version] * len(tokens.ids)
        self._cached = max(self._cached, tokens.cached_tokens)
        return len(tokens.ids)

    @property
    def context(self) -> int:
        """How long prompt and answer are by now, where the engine has told the prompt."""
        return len(self.prompt_ids) + len(self.ids)

    def usage(self, prompt_tokens: int, reasoning_tokens: int) -> Usage:
        """The counts of what was seen; the engine's own for what it does not show."""
        counted = self._counted or _NO_USAGE
        return Usage(
            prompt_tokens or counted.prompt_tokens,
            len(self.ids) or counted.sampled_tokens,
            max(self._cached, counted.cached_tokens),
            counted.reasoning_tokens or reasoning_tokens,
        )

    @property
    def counts(self) -> dict[str, str]:
        """What only the engine can count, for the record."""
        counted = self._counted or _NO_USAGE
        counts = {CACHED: max(self._cached, counted.cached_tokens)}
        if not self.ids:
            counts |= {COUNTED: counted.sampled_tokens, COUNTED_PROMPT: counted.prompt_tokens}
        return {name: str(count) for name, count in counts.items() if count}


class _Reply:
    """The message as the client gets it; tool calls get ids that are unique in the session."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, delta: MessageDelta) -> MessageDelta:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        if not delta.tool_calls:
            return delta
        named = tuple(
            call if call.id else replace(call, id=f"call_{os.urandom(12).hex()}") for call in delta.tool_calls
        )
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
        logprobs=first.logprobs + second.logprobs,
    )
