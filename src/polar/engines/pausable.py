"""An engine whose policy can be replaced during generations: callers only see a slower answer.

While it is paused, new generations wait here, before the engine. Those that a pause breaks off are
continued afterwards from their exact tokens, so that one completion may carry two policy versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polar.engines.base import (
    ChatCall,
    ChatChunk,
    Engine,
    GenerateRequest,
    ModelInfo,
    TokenChunk,
    WeightUpdate,
)
from polar.models.chat import ChatRequest, FinishReason
from polar.models.policy import PauseMode


@dataclass(slots=True, eq=False)
class _Pausable:
    """A generation that a pause may interrupt."""

    waiter: asyncio.Task[Any] | None = None
    """The task that waits for its next token, if any."""
    is_broken_off: bool = False
    is_interrupted: bool = False
    """Whether the waiter was cancelled by the pause."""

    def break_off(self) -> None:
        self.is_broken_off = True
        # Whoever is busy with the last token finds out when asking for the next.
        if self.waiter is not None:
            self.is_interrupted = self.waiter.cancel()


class PausableEngine:
    """An engine as model calls see it; a pause holds calls back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: set[_Pausable] = set()
        self._finished = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the sampled tokens, across pauses. Closing the iterator aborts the request in the engine."""
        sampled: list[int] = []
        while True:
            await self._wait_until_open()
            with self._track(request) as call:
                try:
                    async with aclosing(self._engine.generate(_continuation(request, sampled))) as chunks:
                        call.waiter = asyncio.current_task()
                        async for chunk in chunks:
                            call.waiter = None
                            sampled += chunk.ids
                            yield chunk
                            if chunk.finish_reason is not None:
                                return
                            if call.is_broken_off:
                                break
                            call.waiter = asyncio.current_task()
                        else:
                            return
                except asyncio.CancelledError:
                    if not call.is_interrupted or _is_cancelled_besides():
                        raise
            if reason := _finish_reason(request, sampled):
                yield TokenChunk([], [], (await self._engine.model_info()).policy_version, reason)
                return

    async def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        """Begin a chat as soon as the door is open; a pause lets it end."""
        await self._wait_until_open()
        return self._engine.chat(call)

    async def pause(self, mode: PauseMode) -> None:
        self._open.clear()
        try:
            if mode is PauseMode.ABORT:
                await self._break_off()
                # Others may share the engine, and are to break off what is theirs themselves.
                mode = PauseMode.DRAIN
            await self._engine.pause(mode)
        except BaseException:
            self._open.set()
            raise

    async def resume(self) -> None:
        await self._engine.resume()
        self._open.set()

    async def update_weights(self, update: WeightUpdate) -> None:
        if not self._engine.must_drain(update):
            await self._engine.update_weights(update)
            return
        was_paused = self.is_paused
        self._open.clear()
        try:
            await self._break_off()
            # What cannot be continued is sampled to its end; nothing new begins.
            await self._engine.resume()
            await self._engine.pause(PauseMode.DRAIN)
            await self._engine.update_weights(update)
        finally:
            if not was_paused:
                await self.resume()

    async def model_info(self) -> ModelInfo:
        return await self._engine.model_info()

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        return await self._engine.count_tokens(chat)

    async def _wait_until_open(self) -> None:
        # Closed again before a waiter has run, it is to wait on.
        while not self._open.is_set():
            await self._open.wait()

    @contextmanager
    def _track(self, request: GenerateRequest) -> Iterator[_Pausable]:
        call = _Pausable()
        # A grammar begins with the first token, and penalties count from it: these cannot be continued.
        if request.constraint is None and not request.sampling.is_penalised:
            self._in_flight.add(call)
        try:
            yield call
        finally:
            self._in_flight.discard(call)
            self._finished.set()

    async def _break_off(self) -> None:
        """Interrupt all generations that can be continued, and return when they have ended."""
        for call in self._in_flight:
            call.break_off()
        while self._in_flight:
            self._finished.clear()
            await self._finished.wait()


def _is_cancelled_besides() -> bool:
    """Whether the interrupted task was also cancelled by someone else."""
    task = asyncio.current_task()
    return task is not None and task.uncancel() > 0


def _continuation(request: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    """The request for the rest, after the tokens sampled so far."""
    if not sampled:
        return request
    sampling = request.sampling
    left = None if sampling.max_tokens is None else sampling.max_tokens - len(sampled)
    # The same seed would draw the same numbers again that the first tokens were drawn with.
    seed = None if sampling.seed is None else (sampling.seed + len(sampled)) % 2**63
    return replace(
        request,
        request_id=f"{request.request_id}-{len(sampled)}",
        prompt_ids=np.concatenate([np.asarray(request.prompt_ids, np.int32), np.asarray(sampled, np.int32)]),
        sampling=replace(sampling, max_tokens=left, seed=seed),
        # Of what stands before, the experts may be computed anew, and not be those that it was sampled with.
        routed_from=len(request.prompt_ids) + len(sampled) - 1,
    )


def _finish_reason(request: GenerateRequest, sampled: list[int]) -> FinishReason | None:
    """The finish reason, if the pause fell between the last token and its reason."""
    if sampled and sampled[-1] in request.stop_token_ids:
        return FinishReason.STOP
    limit = request.sampling.max_tokens
    return FinishReason.LENGTH if limit is not None and len(sampled) >= limit else None
