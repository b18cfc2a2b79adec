"""A server that speaks vLLM's completions and chat wires from a script, for the engine client's tests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from tests.fakes import character_chat
from tests.fakes.character_chat import Said
from tests.fakes.engine_wire import EngineWire, likeliest
from tests.listening import listening

HOTTEST = 2.0
"""The highest temperature that vLLM accepts."""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class VllmWire(EngineWire):
    """Answers completions and chats.

    An entry of its script is a list of events (dicts are sent as JSON, strings as they are, an
    asyncio.Event is waited for), a pair of a status and an error body, or, of a chat, what is said: in one
    piece or as a stream, with or without tokens, as it is asked for.
    """

    orders: list[str] = field(default_factory=list)
    """What was asked of the server itself, by path."""
    refused: str = ""
    """The path of orders that fail."""
    context: int = 512
    """Tokens that the model has room for."""
    weight_version: str | None = "default"
    """None: a server before 0.32, which gives weights no names."""
    named: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is asked what its weights are called."""
    started_at: float | None = None
    """What its metrics say; None: it has no such page."""
    transfers: list[dict[str, Any]] = field(default_factory=list)
    """What it was told of weights in a GPU's memory."""
    received: asyncio.Event | None = None
    """What a transfer waits for until it has read all of them."""
    is_receiving: bool = False
    """Whether a transfer was begun and not finished."""
    backend: str | None = "ipc"
    """Of its --weight-transfer-config; None: it was started without."""
    workers: int = 1
    """0: a server that does not tell."""
    joining: asyncio.Event | None = None
    """What joining a group waits for."""
    group: list[Connection] = field(default_factory=list)
    """Each worker's way to the trainer, in the place of NCCL's."""
    received_weights: dict[str, list[float]] = field(default_factory=dict)
    """What came over it last."""
    logits: Mapping[str, float] | None = None
    """Of what may follow any prompt: then a completion that is not streamed tells the likeliest."""
    counts_temperature: bool = False
    """As --logprobs-mode processed_logprobs."""
    named_logprobs_mode: str | None = None
    """What its list of models calls them, rightly or not; None: it is silent, as vLLM is."""

    async def start_anew(self) -> None:
        self.weight_version = None if self.weight_version is None else "default"
        self.started_at = None if self.started_at is None else self.started_at + 60
        self.is_receiving = False
        self._leave_group()
        await super().start_anew()

    async def models(self, request: web.Request) -> web.Response:
        cards: list[dict[str, Any]] = [
            {"id": "small", "max_model_len": self.context, "root": "/models/small"}
        ]
        if self.named_logprobs_mode is not None:
            cards[0]["logprobs_mode"] = self.named_logprobs_mode
        cards += [{"id": name, "root": path, "parent": "small"} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.orders.append(f"{request.path} {body['lora_name']}")
        if request.path == self.refused:
            return web.json_response({"error": {"message": "not now"}}, status=500)
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.json_response("Success")

    async def unload_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.orders.append(f"{request.path} {body['lora_name']}")
        known = self.adapters.pop(body["lora_name"], None)
        return web.json_response("Success", status=200 if known else 404)

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = character_chat.prompt_ids(await request.json())
        return web.json_response({"count": len(ids), "max_model_len": self.context, "tokens": ids})

    async def order(self, request: web.Request) -> web.Response:
        """Pauses and weights, as in vLLM's development mode."""
        self.orders.append(request.path)
        if request.path == self.refused:
            return web.json_response({"error": {"message": "not now"}}, status=500)
        if request.path == "/pause":
            self.going.clear()
        if request.path == "/resume":
            self.going.set()
        if request.path == "/update_weight_version" and self.weight_version is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/update_weight_version":
            self.weight_version = (await request.json())["new_version"]
        if request.path in ("/start_weight_update", "/finish_weight_update"):
            if self.is_receiving is (request.path == "/start_weight_update"):
                return web.json_response({"error": {"message": "not in this order"}}, status=500)
            self.is_receiving = not self.is_receiving
        if request.path == "/shutdown_weight_transfer_engine":
            self._leave_group()
            return web.json_response({}, status=404 if self.weight_version is None else 200)
        if request.path == "/init_weight_transfer_engine":
            self.arrived.set()
            if self.backend != "nccl":
                return web.json_response(
                    {"error": {"message": "Weight transfer not configured."}}, status=500
                )
            if self.joining is not None:
                await self.joining.wait()
            await self._join((await request.json())["init_info"])
        if request.path == "/update_weights":
            self.transfers.append((await request.json())["update_info"])
            self.arrived.set()
            if self.received is not None:
                await self.received.wait()
            if self.backend == "nccl":
                await self._receive(**self.transfers[-1])
        return web.json_response({})

    async def world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": self.workers}, status=200 if self.workers else 404)

    async def _join(self, init_info: dict[str, Any]) -> None:
        host, port = init_info.pop("master_address"), init_info.pop("master_port")
        assert init_info == {"rank_offset": 1, "world_size": self.workers + 1}
        self.group = [await asyncio.open_connection(host, port) for _ in range(self.workers)]

    async def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        """Each worker receives all weights; as with NCCL, for as long as the trainer takes."""
        assert self.is_receiving
        for reader, writer in self.group:
            try:
                for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
                    data = await reader.readexactly(math.prod(shape) * np.dtype(dtype).itemsize)
                    self.received_weights[name] = np.frombuffer(data, dtype).tolist()
            except asyncio.IncompleteReadError:
                await asyncio.Event().wait()
            writer.write(b".")

    def _leave_group(self) -> None:
        while self.group:
            self.group.pop()[1].close()

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.going.is_set()})

    async def metrics(self, request: web.Request) -> web.Response:
        if self.started_at is None:
            return web.Response(status=404)
        return web.Response(text=f"# TYPE x gauge\nprocess_start_time_seconds {self.started_at}\n")

    def _likeliest(self, temperature: float) -> dict[str, Any]:
        found = likeliest((self.logits or {}).values(), temperature)
        told = {"y": found, "x": found - 1}
        logprobs = {"tokens": ["x"], "token_logprobs": [told["x"]], "top_logprobs": [told]}
        return {"choices": [{"index": 0, "text": "x", "token_ids": [5], "logprobs": logprobs}]}

    async def weights(self, request: web.Request) -> web.Response:
        self.named.set()
        if self.weight_version is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"weight_version": self.weight_version})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = self.next_answer(body)
        await self.going.wait()
        if request.path == "/v1/completions" and not body.get("stream") and isinstance(answer, Said):
            return web.json_response({"error": {"message": "it completes nothing"}}, status=400)
        if body["model"].startswith("polar-") and body["model"] not in self.adapters:
            message = f"The model `{body['model']}` does not exist."
            return web.json_response({"error": {"message": message}}, status=404)
        if body.get("temperature", 1.0) > HOTTEST:
            message = f"temperature must be in [0, 2], got {body['temperature']}."
            return web.json_response({"error": {"message": message}}, status=400)
        if self.logits is not None and not body.get("stream"):
            return web.json_response(self._likeliest(body["temperature"] if self.counts_temperature else 1.0))
        if isinstance(answer, Said):
            if not body.get("stream"):
                return web.json_response(character_chat.document(answer, body))
            answer = [*character_chat.events(answer, body), "[DONE]"]
        if isinstance(answer, tuple):
            status, body = answer
            return web.json_response(body, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in answer:
                if isinstance(event, asyncio.Event):
                    await event.wait()
                    continue
                data = event if isinstance(event, str) else json.dumps(event)
                await response.write(f"data: {data}\n\n".encode())
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        return response


def event(ids: list[int] | None, logprobs: list[float] | None, finish: str | None = None, **root: Any) -> Any:
    """One chunk of a completion as vLLM streams it."""
    choice = {
        "index": 0,
        "text": "x" * len(ids or logprobs or ()),
        "token_ids": ids,
        "logprobs": None if logprobs is None else {"token_logprobs": logprobs},
        "finish_reason": finish,
    }
    return {"object": "text_completion", "choices": [choice]} | root


def routed_event(
    ids: list[int], logprobs: list[float], finish: str | None = None, experts: Any = None
) -> Any:
    """One chunk of tokens with the experts that an array holds, as vLLM streams them."""
    file = io.BytesIO()
    np.save(file, np.zeros(0) if experts is None else experts)
    choice = {
        "index": 0,
        "logprobs": {"content": [{"token": "token_id:1", "logprob": each} for each in logprobs]},
        "finish_reason": finish,
        "token_ids": ids,
        "routed_experts": None if experts is None else base64.b64encode(file.getvalue()).decode(),
    }
    return {"request_id": "generate-tokens-r1", "choices": [choice], "usage": None}


def usage(tokens: int, cached: int = 0) -> Any:
    return {
        "choices": [],
        "usage": {"completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}},
    }


ANSWER = [event([5], [-1.0]), event([2], [-1.0], "stop"), usage(2), "[DONE]"]
"""Two tokens."""


@asynccontextmanager
async def vllm_wire(
    *answers: Any, takes_orders: bool = False, takes_adapters: bool = False
) -> AsyncIterator[VllmWire]:
    wire = VllmWire(answers)
    app = web.Application(middlewares=[wire.connected])
    app.router.add_get("/v1/models", wire.models)
    app.router.add_post("/v1/completions", wire.completions)
    app.router.add_post("/v1/chat/completions", wire.completions)
    app.router.add_post("/inference/v1/generate", wire.completions)
    app.router.add_post("/tokenize", wire.tokenize)
    if takes_adapters:
        app.router.add_post("/v1/load_lora_adapter", wire.load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", wire.unload_adapter)
    if takes_orders:
        app.router.add_get("/weight_info", wire.weights)
        app.router.add_get("/is_paused", wire.is_paused)
        app.router.add_get("/metrics", wire.metrics)
        app.router.add_get("/get_world_size", wire.world_size)
        app.router.add_post("/{order}", wire.order)
    async with listening(app) as wire.url:
        yield wire
