"""Client of an engine that speaks vLLM's completions API with token ids in and out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from polar.engines import chat_wire
from polar.engines.base import ChatCall, ChatChunk, EngineError, GenerateRequest, ModelInfo, TokenChunk
from polar.engines.guidance import guided, token_biases
from polar.engines.http import HttpEngine, NotAccepted, reason_in
from polar.models.chat import ChatRequest, FinishReason
from polar.rendering.constraints import Constraint

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine(HttpEngine):
    requirement = "polar engine, or vLLM 0.10.2 or newer, which returns token ids and logprobs"
    chat_requirement = (
        "polar engine, or vLLM 0.10.2 or newer with a chat template, reached directly: a router may strip ids"
    )

    _model: str | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        stream = _TokenStream(self.policy_version)
        body = _request_body(request, await self._served_name())
        with guided(request):
            async with aclosing(self._events("/v1/completions", body)) as events:
                async for event in events:
                    chunk = stream.read(event)
                    if chunk is not None:
                        yield chunk
        yield stream.last()

    async def chat(self, call: ChatCall) -> AsyncGenerator[ChatChunk, None]:
        reader = chat_wire.ChatReader(call.chat.sampling, self.policy_version)
        body = _chat_body(call, await self._served_name())
        async with aclosing(chat_wire.chunks(self._events(chat_wire.PATH, body), reader)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def count_tokens(self, chat: ChatRequest) -> int | None:
        body = chat_wire.prompt_body(chat, await self._served_name())
        status, answer = await self._ask("POST", "/tokenize", body)
        return chat_wire.token_count(answer) if status == 200 else None

    async def score(self, ids: list[int]) -> list[float]:
        body = {
            "model": await self._served_name(),
            "prompt": ids,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "stream": False,
        }
        async with aclosing(self._events("/v1/completions", body)) as answers:
            async for answer in answers:
                return _prompt_logprobs(answer, ids)
        raise EngineError(f"the engine at {self.url} did not answer")

    async def _served_name(self) -> str:
        if self._model is None:
            self._model = (await self.model_info()).name
        return self._model

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
            raise self._failure(event)
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

    def _failure(self, event: dict[str, Any]) -> EngineError:
        """A grammar is compiled only after the stream has begun, and refused inside it."""
        error, reason = event.get("error"), reason_in(orjson.dumps(event))
        code = (error if isinstance(error, dict) else event).get("code")
        if code == 400 and self._tokens == 0:
            return NotAccepted(f"the engine does not accept the request: {reason}", reason=reason)
        return EngineError(f"the engine failed: {reason}")

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


def _prompt_logprobs(answer: dict[str, Any], ids: list[int]) -> list[float]:
    """Of each entry, what it says of the prompt's own token; the likeliest others may stand beside it."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        found = [float(entry[str(id)]["logprob"]) for entry, id in zip(entries[1:], ids[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"the engine sent no usable prompt_logprobs: {error!r}") from error
    return [0.0, *found]


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
        "logit_bias": token_biases(request),
        "structured_outputs": _structured(request.constraint),
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


def _chat_body(call: ChatCall, model: str) -> dict[str, Any]:
    return chat_wire.request_body(call, model, stream=call.chat.stream) | {
        "return_token_ids": True,
        "logprobs": True,
        "request_id": call.request_id,
        # As above.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _structured(constraint: Constraint | None) -> dict[str, str] | None:
    if constraint is None:
        return None
    if constraint.json_schema is not None:
        return {"json": constraint.json_schema}
    return {"structural_tag": constraint.structural_tag or ""}
