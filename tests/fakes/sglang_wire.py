"""A server that speaks SGLang's native wire from a script of events, for the engine client's tests.

Pauses, names of weights and adapters are as in SGLang's repository at revision
cce0a1244b5a3ee60411fb403f65f856a1d012f0: `python/sglang/srt/entrypoints/http_server.py`,
`managers/tokenizer_control_mixin.py`, `managers/tokenizer_manager.py` and `lora/lora_registry.py` below
`python/sglang/srt`. An adapter that was unloaded is loaded again from where it came when a request names it;
one is unloaded only when no request uses it any more, and none is loaded meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes import character_chat
from tests.fakes.engine_wire import EngineWire, likeliest
from tests.listening import listening


@dataclass
class SglangWire(EngineWire):
    """Answers generations and chats.

    An entry of its script is a list of events (dicts are sent as JSON, strings as they are, an
    asyncio.Event is waited for, a ConnectionError drops the connection), or a pair of a status and an error
    body.
    """

    is_old: bool = False
    """Whether the addresses that inform have the names they had on older servers."""
    is_incremental: bool = False
    key: str | None = None
    """What whoever asks about the server must show."""
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
    aborted: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """The rids of requests that were aborted by name."""
    ports: set[int] = field(default_factory=set)
    """Of the clients' ends of the connections that generations came on."""
    path: str = "small"
    """Of its weights, by which it also calls itself."""
    takes_adapters: bool = False
    """Whether it was started with --enable-lora."""
    ever_loaded: dict[str, str] = field(default_factory=dict)
    sampling: Counter[str] = field(default_factory=Counter)
    """The adapters that requests are sampled with."""
    ended: asyncio.Condition = field(default_factory=asyncio.Condition)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by what loads or unloads an adapter."""

    async def start_anew(self) -> None:
        self.weight_version, self.path = "default", "small"
        self.ever_loaded.clear()
        await super().start_anew()

    async def models(self, request: web.Request) -> web.Response:
        cards: list[dict[str, Any]] = [{"id": self.path, "root": self.path, "max_model_len": 512}]
        cards += [
            {"id": name, "root": path, "parent": self.path, "max_model_len": None}
            for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self.path, "tokenizer_path": "small", "weight_version": self.weight_version}
        )

    async def server_info(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.key}" and self.key is not None:
            return web.json_response({"error": "Unauthorized"}, status=401)
        told = {"context_length": None, "api_key": "sk-secret", "version": "0.5.12"}
        return web.json_response(told | {"incremental_streaming_output": self.is_incremental})

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        return web.json_response({"tokens": [ord(letter) for letter in prompt], "count": len(prompt)})

    async def order(self, request: web.Request) -> web.Response:
        """Pauses, resumptions and updates, taken down as they come."""
        body = await request.json()
        self.orders.append((request.path, body))
        match request.path:
            case "/pause_generation":
                self.going.clear()
            case "/continue_generation":
                self.going.set()
            case "/update_weight_version":
                self.weight_version = body["new_version"]
        if request.path != "/update_weights_from_disk":
            return web.json_response({"message": "done"})
        if self.refuses_weights is not None:
            return web.json_response({"success": False, "message": self.refuses_weights}, status=400)
        self.weight_version, self.path = body["weight_version"], body["model_path"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.orders.append((request.path, body))
        do = self._load if request.path == "/load_lora_adapter" else self._unload
        try:
            if not self.takes_adapters:
                raise ValueError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            async with self.updating:
                await do(body)
        except ValueError as error:
            return web.json_response({"success": False, "error_message": str(error)}, status=400)
        return web.json_response({"success": True, "loaded_adapters": self.adapters})

    async def _load(self, body: dict[str, Any]) -> None:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            raise ValueError(f"Failed to load LoRA adapter {name} because it is already loaded")
        if not Path(path, "adapter_config.json").is_file():
            raise ValueError(f"Can't find 'adapter_config.json' at '{path}'")
        self.adapters[name] = self.ever_loaded[name] = path

    async def _unload(self, body: dict[str, Any]) -> None:
        name = body["lora_name"]
        if self.adapters.pop(name, None) is None:
            raise ValueError(f"LoRA with name {name} does not exist.")
        async with self.ended:
            await self.ended.wait_for(lambda: not self.sampling[name])

    async def _resolve(self, name: str) -> None:
        """Take an adapter into use for a request."""
        if not self.takes_adapters:
            raise ValueError(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")
        if name not in self.adapters:
            if name not in self.ever_loaded:
                raise ValueError(f"Got LoRA adapter that has never been loaded: {name}")
            async with self.updating:
                await self._load({"lora_name": name, "lora_path": self.ever_loaded[name]})
        self.sampling[name] += 1

    async def _release(self, name: str | None) -> None:
        if name is not None:
            async with self.ended:
                self.sampling[name] -= 1
                self.ended.notify_all()

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.put_nowait((await request.json())["rid"])
        return web.Response()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """SGLang's chat: ids in one piece only, each under the name that its flag has."""
        body = await request.json()
        answer = self.next_answer(body)
        for flag in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if body.get(flag) and body.get("stream"):
                message = f"{flag} is not supported with streaming on /v1/chat/completions."
                return web.json_response({"object": "error", "message": message, "code": 400}, status=400)
        if isinstance(answer, asyncio.Event) or not self.going.is_set():
            try:
                await self.going.wait()
                if isinstance(answer, asyncio.Event):
                    await answer.wait()
            except asyncio.CancelledError:
                self.disconnected.set()
                raise
        if isinstance(answer, tuple):
            status, problem = answer
            return web.json_response(problem, status=status)
        if adapter := body.get("lora_path"):
            try:
                await self._resolve(adapter)
            except ValueError as error:
                problem = {"object": "error", "message": str(error), "type": "BadRequest", "code": 400}
                return web.json_response(problem, status=400)
            await self._release(adapter)
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
        answer = self.next_answer(asked := await request.json())
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
        adapter: str | None = None
        try:
            await self.going.wait()
            if named := asked.get("lora_path"):
                await self._resolve(named)
                adapter = named
            for event in answer:
                if isinstance(event, asyncio.Event):
                    await event.wait()
                    await self.going.wait()
                elif isinstance(event, ConnectionError):
                    request.transport.abort()
                    return response
                else:
                    if isinstance(event, dict) and "meta_info" in event:
                        meta = {"weight_version": self.weight_version} | event["meta_info"]
                        event = event | {"meta_info": meta}
                    await _write(response, event)
        except ValueError as error:
            await _write(response, {"error": {"message": str(error), "code": 400}})
            await _write(response, "[DONE]")
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        finally:
            await self._release(adapter)
        return response


async def _write(response: web.StreamResponse, event: Any) -> None:
    data = event if isinstance(event, str) else json.dumps(event)
    await response.write(f"data: {data}\n\n".encode())


def event(
    ids: list[int] | None,
    logprobs: list[float | None] | None,
    count: int,
    finish: str | dict[str, Any] | None = None,
    **meta: Any,
) -> Any:
    """One event of a generation, with the ids and logprobs that it names and the server's count.

    Where it names no weight_version, the server's own of the moment goes with it.
    """
    rows = None if logprobs is None else [[p, id, None] for p, id in zip(logprobs, ids or [], strict=False)]
    info: dict[str, Any] = {
        "id": "r1",
        "finish_reason": {"type": finish} if isinstance(finish, str) else finish,
        "prompt_tokens": 3,
        "completion_tokens": count,
        "cached_tokens": 2,
    }
    if rows is not None:
        info["output_token_logprobs"] = rows
    return {"text": "x" * count, "output_ids": ids, "meta_info": info | meta}


ANSWER = [event([5, 2], [-1.0] * 2, 2, "stop"), "[DONE]"]
"""Two tokens."""


@asynccontextmanager
async def sglang_wire(*answers: Any, **options: Any) -> AsyncIterator[SglangWire]:
    wire = SglangWire(answers, **options)
    app = web.Application(middlewares=[wire.connected])
    prefix = "/get_" if wire.is_old else "/"
    app.router.add_get("/v1/models", wire.models)
    app.router.add_get(f"{prefix}model_info", wire.model_info)
    app.router.add_get(f"{prefix}server_info", wire.server_info)
    app.router.add_post("/tokenize", wire.tokenize)
    app.router.add_post("/abort_request", wire.abort)
    for name in (
        "pause_generation",
        "continue_generation",
        "update_weights_from_disk",
        "update_weight_version",
    ):
        app.router.add_post(f"/{name}", wire.order)
    for name in ("load", "unload"):
        app.router.add_post(f"/{name}_lora_adapter", wire.adapter)
    app.router.add_post("/generate", wire.generate)
    app.router.add_post("/v1/chat/completions", wire.chat)
    async with listening(app) as wire.url:
        yield wire
