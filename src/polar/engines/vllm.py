"""Client of an engine that speaks vLLM's completions API with token ids in and out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from polar.engines.base import EngineError, GenerateRequest, ModelInfo, TokenChunk
from polar.engines.http import HttpEngine, reason_in
from polar.models.chat import FinishReason

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine(HttpEngine):
    requirement = "polar engine, or vLLM 0.10.2 or newer, which returns token ids and logprobs"

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key)
        self._model: str | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self._model is None:
            self._model = (await self.model_info()).name
        stream = _TokenStream(self.policy_version)
        body = _request_body(request, self._model)
        async with aclosing(self._events("/v1/completions", body)) as events:
            async for event in events:
                chunk = stream.read(event)
                if chunk is not None:
                    yield chunk
        yield stream.last()

    async def model_info(self) -> ModelInfo:
        document, self._model, context = await self._served_model()
        card = document["data"][0]
        version = card.get("policy_version", document.get("policy_version"))
        version = self.policy_version if version is None else int(version)
        mode = card.get("logprobs_mode")
        return ModelInfo(self._model, context, version, None if mode is None else str(mode))


class _TokenStream:
    """Turns the events of one response into chunks, refusing tokens without ids or logprobs."""

    def __init__(self, policy_version: int) -> None:
        self._version = policy_version
        self._held: TokenChunk | None = None
        self._tokens = 0
        self._reported: int | None = None

    def read(self, event: dict[str, Any]) -> TokenChunk | None:
        """The chunk to pass on now. The finishing one waits for the usage that follows it."""
        if event.get("error") or event.get("object") == "error":
            raise EngineError(f"the engine failed: {reason_in(orjson.dumps(event))}")
        self._version = int(event.get("policy_version", self._version))
        self._read_usage(event.get("usage"))
        choices = event.get("choices")
        if not choices:
            return None
        chunk = self._chunk(choices[0])
        self._tokens += len(chunk.ids)
        if chunk.finish_reason is not None:
            self._held = chunk
            return None
        return chunk if chunk.ids else None

    def last(self) -> TokenChunk:
        if self._held is None:
            raise EngineError("the engine's stream ended before the completion did")
        if self._reported is not None and self._reported != self._tokens:
            raise EngineError(
                f"the engine counts {self._reported} sampled tokens but sent {self._tokens} token ids"
            )
        return self._held

    def _read_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict) or self._held is None:
            return
        self._reported = usage.get("completion_tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._held = replace(self._held, cached_tokens=int(cached))

    def _chunk(self, choice: dict[str, Any]) -> TokenChunk:
        ids = choice.get("token_ids")
        if ids is None:
            if choice.get("text"):
                raise EngineError(
                    "the engine sent text without token ids", hint="it must support return_token_ids"
                )
            ids = []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(ids) != len(logprobs) or None in logprobs:
            raise EngineError(f"the engine sent {len(ids)} token ids with {len(logprobs)} usable logprobs")
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _FINISH:
            raise EngineError(f"the engine ended the completion with {reason!r}")
        return TokenChunk(ids, logprobs, self._version, _FINISH[reason] if reason is not None else None)


def _request_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    sampling = request.sampling
    wishes = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
    }
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": 1,
        "request_id": request.request_id,
        # vLLM fills what is left out from the model's generation_config: name the neutral values.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    } | {name: value for name, value in wishes.items() if value is not None}
