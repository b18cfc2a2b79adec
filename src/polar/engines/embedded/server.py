"""The embedded engine's HTTP server: the subset of vLLM's API that Polar's gateway uses.

Logprobs are those of the distribution sampled from (`processed_logprobs`, see sampler.py);
`/v1/models` says so, and the policy version stands at the root of every answer and chunk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from pydantic import BaseModel, ValidationError

from polar.config.settings import EngineSettings
from polar.engines.embedded.intake import Intake
from polar.engines.embedded.model import SlotModel, load, read_weights
from polar.engines.embedded.scheduler import Generation, Sampled, Scheduler
from polar.engines.embedded.wire import (
    BadRequest,
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    LoadWeightsBody,
    TokenizeBody,
    Tokens,
    WireAnswer,
    error_body,
)
from polar.engines.embedded.worker import Worker
from polar.errors import InvalidInput, Unavailable, explain
from polar.models.chat import FinishReason
from polar.models.policy import PauseMode
from polar.models.session import PROCESSED
from polar.telemetry.page import CONTENT_TYPE, PATH, MetricsPage
from polar.telemetry.readings import Readings, own_families

log = logging.getLogger(__name__)

_PAUSES = {"keep": PauseMode.KEEP, "wait": PauseMode.DRAIN, "abort": PauseMode.ABORT}
"""Pause modes by vLLM's names."""
MAX_BODY_BYTES = 64 * 1024 * 1024
B = TypeVar("B", bound=BaseModel)


class EmbeddedServer:
    """Serves one loaded model: `async with EmbeddedServer(model) as server: server.url`."""

    def __init__(self, model: SlotModel, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.model = model
        self.scheduler = Scheduler(model)
        self._intake = Intake(model)
        self.worker: Worker
        self._socket = listen(host, port)
        self._host = host
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.router.add_get("/health", self._health)
        app.router.add_get(PATH, self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_post("/load_weights", self._load_weights)
        self._page = MetricsPage()
        self._page.add(self._families)
        self._loading = asyncio.Lock()
        self._loaded: tuple[int, Path | None] = (0, None)
        """The version of the weights, and where they come from."""
        # A client that goes away cancels its handler, and with it the generation.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=log,
            access_log_class=_RequestLines,
            shutdown_timeout=1.0,
        )

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    async def __aenter__(self) -> EmbeddedServer:
        self.worker = Worker(self.scheduler)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self.worker.stop()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.worker.is_alive else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._page.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _families(self) -> Iterable[Metric]:
        scheduler, is_paused = self.scheduler, self.worker.is_paused
        return families(scheduler.readings, policy_version=scheduler.policy_version, is_paused=is_paused)

    async def _models(self, _request: web.Request) -> web.Response:
        card = {
            "id": self.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "polar",
            "root": self.model.name,
            "parent": None,
            "max_model_len": self.model.context,
            "policy_version": self.scheduler.policy_version,
            "logprobs_mode": PROCESSED,
        }
        return _json({"object": "list", "data": [card]})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = _PAUSES.get(request.query.get("mode", "abort"))
        if mode is None:
            raise BadRequest(f"mode: must be one of {', '.join(_PAUSES)}", "mode")
        await self.worker.pause(mode)
        return _json({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        await self.worker.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, _request: web.Request) -> web.Response:
        return _json({"is_paused": self.worker.is_paused})

    async def _load_weights(self, request: web.Request) -> web.Response:
        """An extension of vLLM's API: replaces weights and version between two tokens."""
        body = await _parse(request, LoadWeightsBody)
        path = Path(body.path) if body.path is not None else None
        async with self._loading:
            # Several gateways may share this engine, and each passes the update on.
            if (body.version, path) != self._loaded:
                weights, base = self.model.weights, self.model.directory
                try:
                    policy = await asyncio.to_thread(read_weights, body.version, path, base, weights)
                except InvalidInput as error:
                    raise BadRequest(f"path: {error.message}", "path") from None
                await self.worker.use(policy)
                self._loaded = body.version, path
                log.info("policy version %d from %s", body.version, path or base)
        return _json({"policy_version": self.scheduler.policy_version})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _parse(request, TokenizeBody)
        self._intake.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("prompt: give either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await self._intake.render(body.messages, body.tools, body.add_generation_prompt)
        else:
            ids = await self._intake.encode(body.prompt or "", body.add_special_tokens)
        return _json(
            {"count": len(ids), "max_model_len": self.model.context, "tokens": ids, "token_strs": None}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _parse(request, CompletionBody)
        self._intake.check_model(body.model)
        if body.stream and body.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs: not available when stream=True", "prompt_logprobs")
        prompt = await self._intake.prompt(body.prompt)
        asked = await self._intake.generation(body, prompt, body.max_tokens)
        if body.prompt_logprobs is not None:
            asked = replace(asked, scores_prompt=True)
        return await self._answer(request, body, asked, CompletionAnswer, "cmpl")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _parse(request, ChatBody)
        self._intake.check_model(body.model)
        prompt = await self._intake.render(body.messages, body.tools, add_generation_prompt=True)
        asked = await self._intake.generation(body, prompt, body.max_completion_tokens or body.max_tokens)
        return await self._answer(request, body, asked, ChatAnswer, "chatcmpl")

    async def _answer(
        self,
        request: web.Request,
        body: CompletionBody | ChatBody,
        asked: Generation,
        kind: type[WireAnswer],
        prefix: str,
    ) -> web.StreamResponse:
        answer = kind(
            id=f"{prefix}-{uuid.uuid4().hex}",
            model=self.model.name,
            prompt_ids=asked.prompt_ids,
            returns_ids=bool(body.return_token_ids),
            # Of a completion it is a number, which may be 0.
            returns_logprobs=body.logprobs is not None and body.logprobs is not False,
        )
        async with aclosing(self.worker.generate(asked)) as tokens:
            if body.stream:
                return await _stream(request, self._chunks(answer, tokens, has_usage=body.wants_usage_chunk))
            sampled = [token async for batch in _raise_failures(tokens) for token in batch]
        usage = answer.usage(len(sampled), sampled[-1].cached_tokens)
        return _json(answer.whole(self._tokens(sampled, asked.prompt_ids)) | {"usage": usage})

    async def _chunks(
        self, answer: WireAnswer, tokens: AsyncIterator[list[Sampled]], *, has_usage: bool
    ) -> AsyncIterator[dict[str, Any]]:
        cached, count = 0, 0
        async for sampled in _raise_failures(tokens):
            for chunk in answer.chunks(self._tokens(sampled, answer.prompt_ids), is_first=count == 0):
                yield chunk
            cached, count = sampled[0].cached_tokens, count + len(sampled)
        if has_usage:
            yield answer.last_chunk(self.scheduler.policy_version, answer.usage(count, cached))

    def _tokens(self, sampled: list[Sampled], prompt: list[int]) -> Tokens:
        def text(id: int) -> str:
            return self.model.text_tokenizer.decode([id], skip_special_tokens=False)

        scores = sampled[0].prompt_logprobs
        entries: list[dict[str, Any] | None] | None = None
        if scores is not None:
            entries = [None]
            for id, logprob in zip(prompt[1:], scores, strict=True):
                entries.append({str(id): {"logprob": logprob, "rank": None, "decoded_token": text(id)}})
        return Tokens(
            ids=[token.token_id for token in sampled],
            texts=[text(token.token_id) for token in sampled],
            logprobs=[token.logprob for token in sampled],
            text="".join(token.text for token in sampled),
            policy_version=sampled[-1].policy_version,
            finish_reason=sampled[-1].finish_reason,
            stop_reason=sampled[-1].stop_reason,
            prompt_logprobs=entries,
        )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; Unavailable in one line where that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port {port} on {host} is in use", hint="choose another, or 0 for any free one"
            ) from None
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


async def _raise_failures(tokens: AsyncIterator[list[Sampled]]) -> AsyncIterator[list[Sampled]]:
    async for batch in tokens:
        if batch[0].finish_reason is FinishReason.ERROR:
            raise BadRequest("the engine failed while it computed this request", status=500)
        yield batch


async def _stream(request: web.Request, chunks: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    """Server-sent events; headers leave at once, before the first token."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    try:
        async for chunk in chunks:
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    except BadRequest as error:
        await response.write(b"data: " + orjson.dumps(error_body(error)) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


class _RequestLines(AbstractAccessLogger):
    """Logs every request at level debug."""

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.DEBUG)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.debug("%s %s: %d in %.3f s", request.method, request.path, response.status, time)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _json(error_body(error), status=error.status)
    except web.HTTPException as error:
        return _json(error_body(BadRequest(error.reason, status=error.status)), status=error.status)
    except ConnectionError:
        # The client disconnected during a stream.
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _json(error_body(BadRequest("internal error of the engine", status=500)), status=500)


async def _parse(request: web.Request, body: type[B]) -> B:
    try:
        document = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: not JSON: {error}") from None
    try:
        return body.model_validate(document)
    except ValidationError as error:
        where = error.errors(include_url=False)[0]["loc"]
        raise BadRequest(explain(error), str(where[0]) if where else None) from None


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def families(readings: Readings, *, policy_version: int, is_paused: bool) -> Iterable[Metric]:
    yield from own_families(readings)
    yield GaugeMetricFamily(
        "polar_engine_policy_version", "The version of the weights it samples with.", value=policy_version
    )
    yield GaugeMetricFamily(
        "polar_engine_paused", "1 while it computes nothing because it was asked to.", value=is_paused
    )


def serve(settings: EngineSettings, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Load the configured model and serve it until SIGINT or SIGTERM; `ready` gets the URL."""
    listen(host, port).close()
    asyncio.run(_serve(load(settings), host, port, ready))


async def _serve(model: SlotModel, host: str, port: int, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with EmbeddedServer(model, host=host, port=port) as server:
        log.info("serving at %s", server.url)
        ready(server.url)
        await stop.wait()
        log.info("asked to end")
