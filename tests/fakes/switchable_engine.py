"""An engine that answers with one token, can be switched off, and can hold its answers back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from polar.engines.base import (
    Engine,
    EngineDown,
    EngineError,
    GenerateRequest,
    Mode,
    ModelInfo,
    TokenChunk,
    WeightUpdate,
)
from polar.models.chat import FinishReason
from polar.models.policy import PauseMode


class SwitchableEngine(Engine):
    def __init__(
        self,
        name: str = "small",
        max_context: int = 512,
        policy_version: int = 0,
        logprobs_mode: str | None = None,
    ) -> None:
        self.info = ModelInfo(name, max_context, policy_version, logprobs_mode)
        self.is_on = True
        self.lacks: str | None = None
        """What the check finds missing."""
        self.breaks_after: int | None = None
        """Tokens after which a generation fails."""
        self.gate: asyncio.Event | None = None
        """Waited for before the last token."""
        self.sessions: list[str] = []
        self.open = 0
        self.ids = [1, 2]
        self.probed = asyncio.Event()
        self.closed = False
        self.is_paused = False
        self.refuses_weights = False
        self.loading: asyncio.Event | None = None
        """Waited for before weights are changed."""
        self.checking: asyncio.Event | None = None
        """Waited for in a check."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.sessions.append(request.session)
        if not self.is_on:
            raise EngineDown("switched off")
        if self.breaks_after == 0:
            raise EngineDown("lost before the first token")
        self.open += 1
        try:
            yield TokenChunk([7], [-1.0], self.info.policy_version)
            if self.breaks_after == 1:
                raise EngineError("lost after the first token")
            if self.gate is not None:
                await self.gate.wait()
            yield TokenChunk([2], [-1.0], self.info.policy_version, FinishReason.STOP)
        finally:
            self.open -= 1

    async def model_info(self) -> ModelInfo:
        self.probed.set()
        if not self.is_on:
            raise EngineDown("switched off")
        return self.info

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        if not self.is_on:
            raise EngineDown("switched off")
        if self.lacks:
            raise EngineError(self.lacks)
        if self.checking is not None:
            await self.checking.wait()

    async def tokenize(self, text: str) -> list[int] | None:
        return self.ids

    async def pause(self, mode: PauseMode) -> None:
        if not self.is_on:
            raise EngineDown("switched off")
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def update_weights(self, update: WeightUpdate) -> None:
        if not self.is_on:
            raise EngineDown("switched off")
        if self.refuses_weights:
            raise EngineError("no such weights")
        if self.loading is not None:
            await self.loading.wait()
        self.info = replace(self.info, policy_version=update.version)

    async def close(self) -> None:
        self.closed = True


class CachingEngine(SwitchableEngine):
    """Keeps the prefixes of its latest sessions, and counts how often it finds one."""

    def __init__(self, cached: int) -> None:
        super().__init__()
        self._cached = cached
        self._cache: list[str] = []
        self.hits = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.hits += request.session in self._cache
        others = [session for session in self._cache if session != request.session]
        self._cache = [*others[1 - self._cached :], request.session]
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class Step(Enum):
    """How far an engine is with an update."""

    RUNNING = auto()
    PAUSED = auto()
    LOADING = auto()
    LOADED = auto()
    RESUMING = auto()
    RESUMED = auto()


class ReadingEngine(SwitchableEngine):
    """Loads what is there and whole; something may happen at one step."""

    happens_at: Step | None = None

    async def happens(self) -> None:
        """What happens there, once."""

    async def pause(self, mode: PauseMode) -> None:
        await self._reached(Step.RUNNING)
        await super().pause(mode)
        await self._reached(Step.PAUSED)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._reached(Step.LOADING)
        if update.path is not None and (Path(update.path) / "weights").read_text() != "whole":
            raise EngineError("the weights are damaged")
        await super().update_weights(update)
        await self._reached(Step.LOADED)

    async def resume(self) -> None:
        await self._reached(Step.RESUMING)
        await super().resume()
        await self._reached(Step.RESUMED)

    async def die(self) -> None:
        """Its process ends, and is started again with the weights it began with."""
        self.is_paused, self.info = False, replace(self.info, policy_version=0)
        raise EngineDown("the engine is gone")

    async def _reached(self, step: Step) -> None:
        if step is self.happens_at:
            self.happens_at = None
            await self.happens()
