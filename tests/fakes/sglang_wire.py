"""A server that speaks SGLang's native wire from a script of events, for the engine client's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fakes import character_chat
from tests.fakes.vllm_wire import likeliest


@dataclass
class SglangWire:
    """Answers the n-th generation with the n-th entry; the last one repeats.

    An entry is a list of events (dicts are sent as JSON, strings as they are, an asyncio.Event is
    waited for, a ConnectionError drops the connection), or a pair of a status and an error body.
    """

    answers: Sequence[Any]
    is_old: bool = False
    """Whether the addresses that inform have the names they had on older servers."""
    is_incremental: bool = False
    weight_version: str = "default"
    logits: Sequence[float] | None = None
    """Of what may follow any prompt: then it tells the likeliest where it is asked to."""
    counts_temperature: bool = True
    """Unless SGLANG_RETURN_ORIGINAL_LOGPROB is set."""
    knows_token_ids: bool = True
    """Whether it is new enough to return ids with a chat."""
    ids_name: str = "token_ids"
    """Where they come back: versions differ."""
    orders: list[tuple[str, Any]] = field(default_factory=list)
    refuses_weights: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    aborted: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """The rids of requests that were aborted by name."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    ports: set[int] = field(default_factory=set)
    """Of the clients' ends of the connections that generations came on."""
    url: str = ""

    path: str = "small"
    """Of its weights, by which it also calls itself."""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.path, "max_model_len": 512}]})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self.path, "tokenizer_path": "small", "weight_version": self.weight_version}
        )

    async def server_info(self, request: web.Request) -> web.Response:
        name = "incremental_streaming_output"
        return web.json_response({"context_length": None, "api_key": "sk-secret", name: self.is_incremental})

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        return web.json_response({"tokens": [ord(letter) for letter in prompt], "count": len(prompt)})

    async def order(self, request: web.Request) -> web.Response:
        """Pauses, resumptions and updates, taken down as they come."""
        body = await request.json()
        self.orders.append((request.path, body))
        if request.path != "/update_weights_from_disk":
            return web.json_response({"message": "done"})
        if self.refuses_weights is not None:
            return web.json_response({"success": False, "message": self.refuses_weights}, status=400)
        self.weight_version, self.path = body["weight_version"], body["model_path"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.put_nowait((await request.json())["rid"])
        return web.Response()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """SGLang's chat: ids in one piece only, each under the name that its flag has."""
        body = await request.json()
        answer = self.answers[min(len(self.bodies), len(self.answers) - 1)]
        self.bodies.append(body)
        self.arrived.set()
        for flag in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if body.get(flag) and body.get("stream"):
                message = f"{flag} is not supported with streaming on /v1/chat/completions."
                return web.json_response({"object": "error", "message": message, "code": 400}, status=400)
        if isinstance(answer, asyncio.Event):
            try:
                await answer.wait()
            except asyncio.CancelledError:
                self.disconnected.set()
                raise
        if isinstance(answer, tuple):
            status, problem = answer
            return web.json_response(problem, status=status)
        document = character_chat.document(answer, body)
        (choice,) = document["choices"]
        prompt, sampled = document.pop("prompt_token_ids", None), choice.pop("token_ids", None)
        choice["matched_stop"] = choice.pop("stop_reason")
        if self.knows_token_ids and body.get("return_token_ids"):
            choice |= {"prompt_token_ids": prompt, self.ids_name: sampled}
        if body.get("return_meta_info"):
            choice["meta_info"] = {"weight_version": self.weight_version, "cached_tokens": 0}
        return web.json_response(document)

    def _likeliest(self, temperature: float) -> dict[str, Any]:
        found = likeliest(self.logits or (), temperature)
        return {"output_ids": [5], "meta_info": {"output_top_logprobs": [[[found, 7, None]]]}}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.ports.add(request.transport.get_extra_info("peername")[1])
        answer = self.answers[min(len(self.bodies), len(self.answers) - 1)]
        self.bodies.append(asked := await request.json())
        self.arrived.set()
        if asked.get("top_logprobs_num"):
            if self.logits is None:
                return web.json_response({"error": {"message": "it shows no others"}}, status=400)
            temperature = asked["sampling_params"]["temperature"] if self.counts_temperature else 1.0
            return web.json_response(self._likeliest(temperature))
        if isinstance(answer, tuple):
            status, body = answer
            return web.json_response(body, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in answer:
                if isinstance(event, asyncio.Event):
                    await event.wait()
                elif isinstance(event, ConnectionError):
                    request.transport.abort()
                    return response
                else:
                    data = event if isinstance(event, str) else json.dumps(event)
                    await response.write(f"data: {data}\n\n".encode())
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        return response


def event(
    ids: list[int] | None,
    logprobs: list[float | None] | None,
    count: int,
    finish: str | dict[str, Any] | None = None,
    **meta: Any,
) -> Any:
    """One event of a generation, with the ids and logprobs that it names and the server's count."""
    rows = None if logprobs is None else [[p, id, None] for p, id in zip(logprobs, ids or [], strict=False)]
    info: dict[str, Any] = {
        "id": "r1",
        "finish_reason": {"type": finish} if isinstance(finish, str) else finish,
        "prompt_tokens": 3,
        "completion_tokens": count,
        "cached_tokens": 2,
        "weight_version": "default",
    }
    if rows is not None:
        info["output_token_logprobs"] = rows
    return {"text": "x" * count, "output_ids": ids, "meta_info": info | meta}


@asynccontextmanager
async def sglang_wire(*answers: Any, **options: Any) -> AsyncIterator[SglangWire]:
    wire = SglangWire(answers, **options)
    app = web.Application()
    prefix = "/get_" if wire.is_old else "/"
    app.router.add_get("/v1/models", wire.models)
    app.router.add_get(f"{prefix}model_info", wire.model_info)
    app.router.add_get(f"{prefix}server_info", wire.server_info)
    app.router.add_post("/tokenize", wire.tokenize)
    app.router.add_post("/abort_request", wire.abort)
    for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        app.router.add_post(path, wire.order)
    app.router.add_post("/generate", wire.generate)
    app.router.add_post("/v1/chat/completions", wire.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    wire.url = f"http://{host}:{port}"
    try:
        yield wire
    finally:
        await runner.cleanup()
