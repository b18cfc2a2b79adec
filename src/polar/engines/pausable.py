"""An engine whose policy can be replaced under way: whoever asks it sees only a slower answer.

While it is paused, new generations wait here, before the engine. Those that a pause breaks off are
continued afterwards from their exact tokens, so that one completion may carry two policy versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import numpy as np

from polar.engines.base import (
    ChatCall,
    ChatChunk,
    Engine,
    GenerateRequest,
    Mode,
    ModelInfo,
    TokenChunk,
    WeightUpdate,
)
from polar.models.chat import ChatRequest, FinishReason
from polar.models.policy import PauseMode


class _BrokenOff(Exception):
    """A pause ended a generation that is to be continued."""


class PausableEngine(Engine):
    """Another engine, behind a door that a pause closes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._breaks_off = False
        self._in_flight = 0
        """Generations that can be broken off."""
        self._landed = asyncio.Event()
        self._waits: set[asyncio.Timeout] = set()
        """Of those generations that wait for their next token."""

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.constraint is not None:
            # A grammar begins with the first token: this one cannot be continued.
            await self._opened()
            async with aclosing(self._asked(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        sampled: list[int] = []
        while True:
            await self._opened()
            try:
                async with aclosing(self._breakable(_continued(request, sampled))) as chunks:
                    async for chunk in chunks:
                        sampled += chunk.ids
                        yield chunk
                return
            except _BrokenOff:
                if reason := _ended(request, sampled):
                    version = (await self._engine.model_info()).policy_version
                    yield TokenChunk([], [], version, reason)
                    return

    async def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        await self._opened()
        answer = cast("AsyncGenerator[ChatChunk, None]", self._engine.chat(call))
        async with aclosing(answer) as chunks:
            async for chunk in chunks:
                yield chunk

    async def score(self, ids: list[int]) -> list[float]:
        await self._opened()
        return await self._engine.score(ids)

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
        await self._engine.update_weights(update)

    async def model_info(self) -> ModelInfo:
        return await self._engine.model_info()

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        await self._engine.check(mode)

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        return await self._engine.count_tokens(chat)

    async def tokenize(self, text: str) -> list[int] | None:
        return await self._engine.tokenize(text)

    async def close(self) -> None:
        await self._engine.close()

    async def _opened(self) -> None:
        # Closed again before a waiter has run, it is to wait on.
        while not self._open.is_set():
            await self._open.wait()

    def _asked(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return cast("AsyncGenerator[TokenChunk, None]", self._engine.generate(request))

    async def _breakable(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """What the engine samples; _BrokenOff, at the next token, once a pause breaks it off."""
        self._in_flight += 1
        try:
            async with aclosing(self._asked(request)) as chunks:
                while True:
                    if self._breaks_off:
                        raise _BrokenOff
                    try:
                        chunk = await self._next(chunks)
                    except StopAsyncIteration:
                        return
                    yield chunk
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._landed.set()

    async def _next(self, chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    return await anext(chunks)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if wait.expired():
                raise _BrokenOff from None
            raise

    async def _break_off(self) -> None:
        self._breaks_off = True
        try:
            for wait in tuple(self._waits):
                wait.reschedule(asyncio.get_running_loop().time())
            while self._in_flight:
                self._landed.clear()
                await self._landed.wait()
        finally:
            self._breaks_off = False


def _continued(request: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    """The request for what is left, after the tokens that it has brought already."""
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
    )


def _ended(request: GenerateRequest, sampled: list[int]) -> FinishReason | None:
    """Why nothing is left to sample, where the pause came between the last token and its reason."""
    if sampled and sampled[-1] in request.stop_token_ids:
        return FinishReason.STOP
    limit = request.sampling.max_tokens
    return FinishReason.LENGTH if limit is not None and len(sampled) >= limit else None
