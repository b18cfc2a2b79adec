"""An engine that answers with one token, can be switched off, and can hold its answers back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

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
