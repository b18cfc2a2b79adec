"""Client of any OpenAI-compatible chat endpoint: text only, so what it says is recorded and never trained."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from polar.engines import chat_wire
from polar.engines.base import (
    ChatCall,
    ChatChunk,
    EngineError,
    GenerateRequest,
    Mode,
    ModelInfo,
    TokenChunk,
)
from polar.engines.http import HttpEngine, NotAccepted, Question
from polar.errors import InvalidInput

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 128_000
"""The context length reported to harnesses if neither the endpoint nor `engine.max_context` gives one."""

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""Default values of parameters that some endpoints reject, even at the default."""
_OPTIONAL = (
    "max_tokens",
    "seed",
    "top_k",
    "top_p",
    "temperature",
    "parallel_tool_calls",
    "stream_options",
    "stream",
)
"""Parameters that an endpoint may reject and remain usable."""


class OpenAIEngine(HttpEngine):
    modes = frozenset({Mode.CHAT})
    requirement = "an engine that returns token ids: openai gives text only"

    def __init__(
        self, url: str, api_key: str | None = None, *, model: str | None = None, **settings: Any
    ) -> None:
        super().__init__(url, api_key, **settings)
        self._model = model or ""
        self._refused: set[str] = set()
        """Parameters that this endpoint rejects."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        raise EngineError("an openai engine takes no tokens", hint="set engine.mode to chat")

    async def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        while True:
            try:
                async with aclosing(self._answer(call, self._question)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except NotAccepted as error:
                self._do_without(error, self._body(call))

    async def model_info(self) -> ModelInfo:
        """The model as listed by the endpoint, else as configured."""
        status, answer = await self._ask("GET", "/v1/models")
        cards = _cards(answer) if status == 200 else {}
        if not self._model and len(cards) != 1:
            known = f"one of {', '.join(sorted(cards)[:20])}" if cards else "as the endpoint calls it"
            raise InvalidInput(f"the engine at {self.url} needs a model", hint=f"name it: --model, {known}")
        self._model = self._model or next(iter(cards))
        listed = cards.get(self._model, {}).get("max_model_len")
        context = self._max_context or (listed if isinstance(listed, int) else DEFAULT_CONTEXT)
        return ModelInfo(self._model, context, self.policy_version)

    async def check(self, mode: Mode = Mode.TOKENS) -> None:
        """Request one token, so that a wrong URL, key or model fails before any session."""
        if mode is Mode.TOKENS:
            raise InvalidInput("an openai engine gives text only", hint="set engine.mode to chat or auto")
        try:
            await self._try_chat()
        except NotAccepted as error:
            raise EngineError(
                f"the engine at {self.url} cannot be used: {error}",
                hint="it must be an OpenAI-compatible endpoint with /v1/chat/completions;"
                " is engine.api_key right?",
            ) from error

    async def _question(self, call: ChatCall) -> Question[ChatChunk]:
        await self._served_name()
        reader = chat_wire.ChatReader(self.url, int, call.sampling.stop, has_tokens=False)
        return Question(chat_wire.PATH, self._body(call), reader)

    def _body(self, call: ChatCall) -> dict[str, Any]:
        stream = call.chat.stream and "stream" not in self._refused
        body = chat_wire.request_body(call, self._model, stream=stream)
        if "max_tokens" in self._refused and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return {
            name: value
            for name, value in body.items()
            if name not in self._refused and _NEUTRAL.get(name) != value
        }

    def _do_without(self, error: NotAccepted, body: dict[str, Any]) -> None:
        """Stop sending the parameter that the endpoint rejects; raise if it is not ours."""
        blamed = next((name for name in _OPTIONAL if name in body and name in error.message), None)
        if blamed is None:
            raise error
        log.warning("the engine at %s does without %s from now on: %s", self.url, blamed, error.message)
        self._refused.add(blamed)


def _cards(answer: bytes) -> dict[str, dict[str, Any]]:
    """Parse a server's list of models; empty if it is not one."""
    try:
        return {card["id"]: card for card in orjson.loads(answer)["data"]}
    except (ValueError, KeyError, TypeError):
        return {}
