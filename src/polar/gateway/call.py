"""One model call: a prompt from the conversation, an answer from its source, a record whatever happens."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from polar.dialects.base import Answer
from polar.engines.base import ChatChunk, EngineError, RequestUnfit, TokenChunk
from polar.gateway.conversation import Extension
from polar.gateway.playback import Playback, ReplayEnded
from polar.gateway.reply import SampledMessage, SampledTokens, StopStrings
from polar.gateway.session import Session
from polar.gateway.source import AnswerGeneration, AnswerSource
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    Message,
    Role,
    Sampling,
    TokenLogprob,
    ToolChoice,
    ToolUse,
    Usage,
)
from polar.models.completion import (
    CHOICE,
    HARNESS_VERSION,
    LEFT,
    OMITTED,
    OUTAGE,
    STOP_SEQUENCE,
    Completion,
)
from polar.models.task import PrescribedCall, SamplingPin
from polar.rendering.base import MessageDelta

Send = Callable[[MessageDelta], None]

_SEED_BYTES = 4
_SEEDS = 256**4
"""What every engine's random generator takes."""
_SMALLEST_TOP_P = 1e-6
"""OpenAI allows 0, engines want more than 0; both then sample the likeliest token."""
_KEPT_CHARACTERS = 16 * 1024
"""How much of its messages is recorded, from the end; nothing else of it is long."""
MESSAGES_DROPPED = "messages_dropped"
"""In `Completion.extra`: how many of the first messages are left out of the record."""


class ModelCall:
    """A call from its admission to its record in the session's capture."""

    def __init__(
        self,
        session: Session,
        source: AnswerSource,
        request: ChatRequest,
        dialect: str,
        ordinal: int = 0,
        choice: int = 0,
    ) -> None:
        """`ordinal` is its place among the session's calls, `choice` among those of its request."""
        self.id = os.urandom(12).hex()
        self.started_at = time.time()
        self.session = session
        self._source = source
        self._request = request
        self._dialect = dialect
        self._ordinal = ordinal
        self._choice = choice
        self._extension: Extension
        self._generation: AnswerGeneration
        self._replayed: Completion | None = None
        self._divergence: dict[str, str] = {}
        self._said: tuple[Message, ...] = ()
        """The request's new messages as the client sent them, where recorded ones may stand for them."""
        self._tokens = SampledTokens()
        self._reply = SampledMessage()
        self._stop_sequence: str | None = None
        self._logprobs: list[TokenLogprob] = []

    async def prepare(self) -> None:
        """Find the prompt and settle the sampling; RequestRefused if it does not fit."""
        grant, request = self.session.grant, self._request
        extension = self._extension = self.session.find(request, self._source.model.max_context)
        self._request = request = prescribed(request, grant.sampling.calls)
        if grant.playback is not None:
            self._said = request.messages[len(request.messages) - len(extension.new_messages) :]
            self._request = replace(request, messages=extension.messages)
        generation = self._generation = await self._source.begin(self._request, extension)
        if grant.playback is not None and await self._is_replayed(grant.playback):
            return
        sampling = pinned(
            self._request.sampling,
            grant.sampling,
            sample=grant.sample,
            ordinal=self._ordinal,
            choice=self._choice,
            room=generation.room(self.session),
        )
        if generation.own_stops:
            sampling = replace(sampling, stop=sampling.stop + generation.own_stops)
        generation.sampling = sampling

    async def run(self, send: Send) -> Answer:
        """Sample to the end, sending each delta as it becomes certain; recorded before the last one."""
        if self._replayed is not None:
            return self._give(self._replayed, send)
        try:
            finish_reason, last = await self._sample(send)
        except asyncio.CancelledError:
            self._record(FinishReason.CANCELLED)
            raise
        except Exception as error:
            self._record(FinishReason.ERROR, _of_failure(error))
            raise
        message, usage = self._record(finish_reason)
        # A retry may ask for the answer for a while; what it was made of is large, and is not kept for that.
        del self._extension, self._generation, self._tokens, self._request
        if last:
            send(last)
        return Answer(message, finish_reason, usage, self._stop_sequence, tuple(self._logprobs))

    async def _is_replayed(self, playback: Playback) -> bool:
        """Whether the recording answers this call, which then takes that completion's id."""
        try:
            self._replayed = await playback.answer(
                self._request,
                self._extension,
                self._generation,
                self._source.begin,
                call=self._ordinal,
                choice=self._choice,
            )
        except ReplayEnded as ended:
            raise self.session.end_replay(ended) from None
        if self._replayed is None:
            self._divergence = playback.note(self._ordinal)
            return False
        self.id = self._replayed.id
        return True

    def _give(self, recorded: Completion, send: Send) -> Answer:
        """Give a recorded answer, which is recorded once more."""
        now = time.time()
        completion = replace(
            recorded,
            index=self.session.recorded,
            dialect=self._dialect,
            started_at=self.started_at,
            first_token_at=now,
            ended_at=now,
        )
        message, ids = completion.response, completion.sampled_ids.tolist()
        usage = Usage(
            completion.prompt_tokens, completion.sampled_tokens, waited_seconds=now - self.started_at
        )
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._request.logprobs and ids:
            logprobs = self._generation.spelt(TokenChunk(ids, completion.logprobs.tolist(), 0))
        self.session.count_given(completion)
        self.session.record(completion, usage, is_whole=self._request.raw is None, said=self._said)
        send(MessageDelta(message.content, message.reasoning or "", message.tool_calls, logprobs))
        stop_sequence = completion.extra.get(STOP_SEQUENCE)
        del self._extension, self._generation, self._tokens, self._request, self._replayed
        return Answer(message, completion.finish_reason, usage, stop_sequence, logprobs)

    async def _sample(self, send: Send) -> tuple[FinishReason, MessageDelta]:
        """Why the completion ended, and the delta that was still held back then."""
        generation = self._generation
        stops = StopStrings(generation.sampling.stop if generation.leaves_stops else ())
        finish_reason: FinishReason | None = None
        delta = MessageDelta()
        async with aclosing(generation.chunks(self.id, self.session.grant.session_id)) as chunks:
            async for chunk in chunks:
                delta = self._take(chunk, stops)
                finish_reason = self._ended(chunk, stops)
                if finish_reason is not None:
                    break
                if delta:
                    send(delta)
        if finish_reason is None:
            raise EngineError("the engine's tokens ended without a reason")
        if chunk.finish_reason is None:
            self._tokens.untrainable = self._tokens.untrainable or generation.untrainable_when_cut
        if generation.leaves_stops:  # else there is nothing that was held back
            rest = generation.rest()
            shown = "" if stops.hit else stops.feed(rest.content) + stops.finish()
            delta += self._reply.add(replace(rest, content=shown))
        matched = stops.matched or chunk.stop_sequence
        # A turn may also end at a string of our own, of which the client knows nothing.
        self._stop_sequence = matched if matched in self._request.sampling.stop else None
        if finish_reason is FinishReason.STOP and self._reply.has_calls:
            finish_reason = FinishReason.TOOL_CALLS
        return finish_reason, delta

    def _take(self, chunk: ChatChunk, stops: StopStrings) -> MessageDelta:
        """Count and keep what has come; returns what the client may see of it."""
        self.session.sampled_tokens += self._tokens.add(chunk)
        if chunk.prompt_ids is not None:
            self.session.refuse_long_prompt(len(chunk.prompt_ids))
        delta = chunk.delta
        if self._request.logprobs and chunk.tokens is not None:
            spelt = self._generation.spelt(chunk.tokens)
            self._logprobs += spelt
            delta = replace(delta, logprobs=spelt)
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
        prompt, follows = self._generation.prompt(tokens.prompt_ids), self._extension.follows
        ended_at, left = time.time(), self.session.clock.left
        version = self.session.grant.harness_version
        reasoning = self._generation.reasoning_tokens
        usage = tokens.usage(len(prompt.ids), reasoning, started_at=self.started_at, ended_at=ended_at)
        completion = Completion(
            id=self.id,
            index=self.session.recorded,
            prompt_ids=prompt.ids,
            sampled_ids=np.array(tokens.ids, np.int32),
            logprobs=np.array(tokens.logprobs, np.float32),
            policy_versions=np.array(tokens.versions, np.int32),
            messages=prompt.messages,
            response=message,
            finish_reason=finish_reason,
            follows=follows.completion_id if follows else None,
            tools=self._request.tools,
            dialect=self._dialect,
            asked=self._request.sampling,
            used=self._generation.sampling,
            started_at=self.started_at,
            first_token_at=tokens.first_at,
            ended_at=ended_at,
            untrainable=tokens.untrainable or (None if len(prompt.ids) else "the engine gave no prompt ids"),
            extra={
                **self._request.hints,
                **{f"{OMITTED}{kind}": str(count) for kind, count in self._request.omitted.items()},
                **self._generation.record,
                **({CHOICE: str(self._choice)} if self._request.choices > 1 else {}),
                **({STOP_SEQUENCE: self._stop_sequence} if self._stop_sequence else {}),
                **tokens.counts,
                **tokens.unrouted(len(prompt.ids), self._generation.routed_from),
                **({LEFT: f"{left:.3f}"} if left is not None else {}),
                **({HARNESS_VERSION: version} if version is not None else {}),
                **self._divergence,
                **(extra or {}),
            },
            routing=tokens.routing,
        )
        whole = finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
        if not whole and not tokens.first_at:
            completion = abridged(completion)
        # A text without turns is no conversation: what continues it is found by its tokens.
        is_whole = whole and self._request.raw is None
        self.session.record(completion, usage, is_whole=is_whole, said=self._said)
        return message, usage


def _of_failure(error: Exception) -> dict[str, str]:
    """What the record of a call that failed says of it."""
    is_outage = isinstance(error, EngineError) and not isinstance(error, RequestUnfit)
    return {"error": f"{type(error).__name__}: {error}"[:1000], **({OUTAGE: "yes"} if is_outage else {})}


def prescribed(request: ChatRequest, calls: Sequence[PrescribedCall]) -> ChatRequest:
    """The request with the call that its answer has to be, if the task prescribes one.

    What the harness asks of the answer's form, and the tools that it offers, come before the task.
    """
    answers = sum(message.role is Role.ASSISTANT for message in request.messages)
    is_free = request.tool_choice.use is ToolUse.AUTO and request.output is None and not request.is_begun
    if not is_free or answers >= len(calls):
        return request
    call = calls[answers]
    if call.tool not in {tool.name for tool in request.tools}:
        return request
    choice = ToolChoice(ToolUse.REQUIRED, (call.tool,), parallel=False, arguments=call.arguments)
    return replace(request, tool_choice=choice)


def pinned(
    asked: Sampling, pin: SamplingPin, *, sample: int, ordinal: int, room: int | None, choice: int = 0
) -> Sampling:
    """Every field set, so that no default of an engine applies and the completion can be replayed.

    `room` is how many tokens context and budget leave, None if only the engine knows; `ordinal` counts
    the session's calls, `choice` those of one request.
    """
    limits = [limit for limit in (asked.max_tokens, pin.max_tokens, room) if limit is not None]
    return Sampling(
        temperature=_first(pin.temperature, asked.temperature, 1.0),
        top_p=max(_first(pin.top_p, asked.top_p, 1.0), _SMALLEST_TOP_P),
        top_k=max(int(_first(pin.top_k, asked.top_k, 0)), 0),
        seed=_seed(asked, pin, sample, ordinal, choice),
        max_tokens=min(limits, default=None),
        stop=asked.stop,
        logit_bias=asked.logit_bias,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
    )


def _seed(asked: Sampling, pin: SamplingPin, sample: int, ordinal: int, choice: int) -> int:
    if pin.seed is not None:
        text = f"{pin.seed + sample}/{ordinal}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=_SEED_BYTES).digest(), "big")
    if asked.seed is not None:
        return (asked.seed + choice) % _SEEDS
    return int.from_bytes(os.urandom(_SEED_BYTES), "big")


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def abridged(completion: Completion) -> Completion:
    """A call that failed before its first token, with the end of its last messages only: enough to see what
    it was, whatever it sent."""
    kept = _last(completion.messages)
    return replace(
        completion,
        prompt_ids=completion.prompt_ids[:0],
        messages=kept,
        tools=(),
        asked=replace(completion.asked, stop=(), logit_bias=()),
        used=replace(completion.used, stop=(), logit_bias=()),
        extra={**completion.extra, MESSAGES_DROPPED: str(len(completion.messages) - len(kept))},
    )


def _last(messages: Sequence[Message]) -> tuple[Message, ...]:
    kept: list[Message] = []
    room = _KEPT_CHARACTERS
    for message in reversed(messages):
        if message.length > room:
            kept.append(Message(message.role, message.content[-room:]))
            break
        kept.append(message)
        room -= message.length
    return tuple(reversed(kept))
