"""Client of an engine that speaks vLLM's completions API with token ids in and out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from polar.engines.base import (
    ContextOverflow,
    Engine,
    EngineError,
    GenerateRequest,
    ModelInfo,
    TokenChunk,
)
from polar.errors import Unavailable
from polar.models.chat import FinishReason

ATTEMPTS = 5
FIRST_BACKOFF_SECONDS = 0.1
"""Doubles with each attempt: 1.5 s in all, enough for an engine's restart of its listener, short of
any harness's patience."""
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 1_800.0
"""A request may wait long in the engine's queue or through a weight update; a session's own budget
ends it earlier. This only frees connections whose peer vanished without a word."""

_BUSY = frozenset({429, 502, 503, 504})
"""Answers after which the same request may succeed: nothing was sampled."""
_OVERFLOW_WORDS = ("context length", "context_length", "max_model_len", "maximum model length")
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class EngineDown(EngineError, Unavailable):
    """The engine could not be reached or was too busy, and nothing was sampled."""


class VllmEngine(Engine):
    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.policy_version = 0
        """Stamped on tokens when the server does not name the version itself."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession | None = None
        self._model: str | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self._model is None:
            self._model = (await self.model_info()).name
        body = orjson.dumps(_request_body(request, self._model))
        async with self._post(body) as response:
            stream = _TokenStream(self.policy_version)
            try:
                async for event in _events(response):
                    chunk = stream.read(event)
                    if chunk is not None:
                        yield chunk
                yield stream.last()
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EngineError(
                    f"the engine at {self.url} broke off: {error or type(error).__name__}"
                ) from error

    async def model_info(self) -> ModelInfo:
        try:
            async with self._session().get(f"{self.url}/v1/models") as response:
                text = await response.read()
                if response.status != 200:
                    raise EngineDown(
                        f"the engine at {self.url} answers {response.status} to /v1/models: {_reason(text)}"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDown(f"the engine at {self.url} cannot be reached: {error}") from error
        try:
            document = orjson.loads(text)
            entry = document["data"][0]
            version = entry.get("policy_version", document.get("policy_version", self.policy_version))
            info = ModelInfo(str(entry["id"]), int(entry["max_model_len"]), int(version))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(
                f"the engine at {self.url} lists no model with a max_model_len",
                hint="is it vLLM or polar engine?",
            ) from error
        self._model = info.name
        return info

    async def tokenize(self, text: str) -> list[int] | None:
        body = {"prompt": text, "add_special_tokens": False}
        try:
            async with self._session().post(f"{self.url}/tokenize", json=body) as response:
                if response.status != 200:
                    return None
                return [int(id) for id in orjson.loads(await response.read())["tokens"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDown(f"the engine at {self.url} cannot be reached: {error}") from error
        except (ValueError, KeyError, TypeError):
            return None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    @asynccontextmanager
    async def _post(self, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """The open response of a generation; trouble before its first byte is tried again."""
        response = await self._connect(body)
        try:
            yield response
        finally:
            # Not release(): an unfinished body must close the connection, which aborts the request.
            response.close()

    async def _connect(self, body: bytes) -> aiohttp.ClientResponse:
        backoff = FIRST_BACKOFF_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = await self._session().post(
                    f"{self.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
                )
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                problem: EngineError = EngineDown(f"the engine at {self.url} cannot be reached: {error}")
            else:
                if response.status == 200:
                    return response
                problem = await _refusal(response, self.url)
                if not isinstance(problem, EngineDown):
                    raise problem
            if attempt == ATTEMPTS:
                raise problem
            await asyncio.sleep(backoff)
            backoff *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS
            )
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self._http


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
            raise EngineError(f"the engine failed: {_reason(orjson.dumps(event))}")
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


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]. Lines may be longer than any read buffer."""
    tail = b""
    async for piece in response.content.iter_any():
        *lines, tail = (tail + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                return
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError as error:
                raise EngineError(f"the engine's stream is not JSON: {error}") from error
            if not isinstance(event, dict):
                raise EngineError("the engine's stream holds an event that is no object")
            yield event


async def _refusal(response: aiohttp.ClientResponse, url: str) -> EngineError:
    try:
        reason = _reason(await response.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error)
    finally:
        response.close()
    if response.status == 400 and any(words in reason.lower() for words in _OVERFLOW_WORDS):
        return ContextOverflow(reason)
    if response.status in _BUSY:
        return EngineDown(f"the engine at {url} answers {response.status}: {reason}")
    return EngineError(f"the engine at {url} answers {response.status}: {reason}")


def _reason(body: bytes) -> str:
    """The message in an error body of any of the shapes seen, else its beginning."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode("utf-8", "replace").strip() or "no reason given"
    if isinstance(document, dict):
        error = document.get("error")
        inner = error if isinstance(error, dict) else document
        message = inner.get("message") or inner.get("detail") or (error if isinstance(error, str) else None)
        code = inner.get("code")
        if message:
            return f"{message} [{code}]" if isinstance(code, str) else str(message)
    return body[:300].decode("utf-8", "replace")
