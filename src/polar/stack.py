"""What `polar serve` and `polar node` run: engine, gateway, rollout server and node, together or apart."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from polar import plugins
from polar.client import AsyncClient
from polar.config.settings import EngineSettings, Settings, environment_database_url, environment_engine_key
from polar.engines.base import Engine, Mode, ModelInfo
from polar.engines.embedded.process import embedded_engine
from polar.engines.embedded.weights import ensure_tokenizer, is_cached
from polar.engines.replicas import Replicas
from polar.errors import InvalidInput, NotInstalled, PolarError
from polar.gateway.server import Gateway
from polar.node.joining import join
from polar.node.worker import Node
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rollout.server import RolloutServer
from polar.rollout.token import load_or_create_token
from polar.store.store import Store

log = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Tells the user which step has begun."""


PROBE = "<|im_start|>user\nA 1,024-token probe: naïve 東京 </s>\n\t<tool_call>{}<|im_end|>"
"""Told apart by tokenizers of different models, also where they share a vocabulary's beginning."""

YOUNG_OBJECTS = 50_000
"""How many more objects than before make the garbage collector look for cycles among them."""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """A gateway in front of an engine, ready for sessions."""

    gateway: Gateway
    model: ModelInfo


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A rollout server that listens."""

    url: str
    token: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A node that a server has taken, ready to run."""

    node: Node
    model: ModelInfo


@dataclass(frozen=True, slots=True)
class Stack:
    """A running system."""

    url: str
    """Of the control plane."""
    token: str
    model: ModelInfo


@asynccontextmanager
async def running(settings: Settings, say: Say) -> AsyncIterator[Stack]:
    """Start everything; on the way out end it in the opposite order. A part that fails ends the whole."""
    async with (
        serving(settings, say) as server,
        joined(settings, server.url, server.token, say) as worker,
        _in_background(worker.node.run()),
    ):
        yield Stack(server.url, server.token, worker.model)


@asynccontextmanager
async def serving(settings: Settings, say: Say) -> AsyncIterator[ControlPlane]:
    """The rollout server alone; nodes join it."""
    data_dir = settings.data_dir.absolute()
    data_dir.mkdir(parents=True, exist_ok=True)
    token = settings.server.token or load_or_create_token(data_dir)
    say("starting the rollout server")
    async with (
        Store.open(data_dir) as store,
        RolloutServer(store, token, settings.server) as server,
    ):
        address = data_dir / "server.json"
        address.write_text(json.dumps({"url": server.url, "pid": os.getpid()}))
        try:
            yield ControlPlane(server.url, token)
        finally:
            address.unlink(missing_ok=True)


@asynccontextmanager
async def joined(settings: Settings, url: str | None, token: str | None, say: Say) -> AsyncIterator[Worker]:
    """A node of the rollout server at `url`, with its own gateway and, unless one is named, engine."""
    data_dir = settings.data_dir.absolute()
    async with AsyncClient(url, token) as client:
        welcome = await join(client, settings.node.name)
        async with data_plane(settings, say) as plane:
            say(f"starting the node {settings.node.name}")
            node = Node(
                settings.node,
                data_dir,
                client,
                plane.gateway,
                plane.model,
                lease_seconds=welcome.lease_seconds,
            )
            yield Worker(node, plane.model)


def opened_store(settings: Settings) -> AbstractAsyncContextManager[Store]:
    """The store that the settings name, to be entered."""
    return Store.open(
        settings.data_dir.absolute(),
        database_url=settings.server.database_url or environment_database_url(),
        blobs_url=settings.server.blobs_url,
    )


@asynccontextmanager
async def data_plane(settings: Settings, say: Say) -> AsyncIterator[DataPlane]:
    """The engine, embedded unless one is named, and a gateway in front of it."""
    async with AsyncExitStack() as parts:
        engine = await parts.enter_async_context(connected(settings, say))
        model = await engine.model_info()
        renderer = await _renderer(settings.engine, engine, model)
        await engine.check(Mode.TOKENS if renderer else Mode.CHAT)
        say("starting the gateway")
        gateway = await parts.enter_async_context(Gateway(settings.gateway, engine, renderer, model))
        _collect_rarely()
        yield DataPlane(gateway, model)


@asynccontextmanager
async def connected(settings: Settings, say: Say) -> AsyncIterator[Engine]:
    """The client of the engine that is named, else of the embedded one, which runs as long as the body."""
    async with AsyncExitStack() as parts:
        urls = settings.engine.urls
        if not urls:
            say(f"starting the embedded engine with {settings.engine.model}")
            if not is_cached(settings.engine.model):
                say("fetching and converting its weights, about a minute, this once")
            log_file = settings.data_dir.absolute() / "logs" / "engine.log"
            process = await parts.enter_async_context(embedded_engine(settings.engine, log_file))
            await parts.enter_async_context(_in_background(process.watch()))
            urls = (process.url,)
        engine = _engine(settings.engine, urls)
        parts.push_async_callback(engine.close)
        yield engine


def _engine(settings: EngineSettings, urls: Sequence[str]) -> Engine:
    """The client of the one engine, or of all replicas as if they were one."""
    client = plugins.load("engines", settings.kind)
    named = settings.model if "model" in settings.model_fields_set else None
    key = settings.api_key or environment_engine_key()
    engines: dict[str, Engine] = {
        url: client(url, key, model=named, max_context=settings.max_context) for url in urls
    }
    return engines[urls[0]] if len(urls) == 1 else Replicas(engines)


async def _renderer(settings: EngineSettings, engine: Engine, model: ModelInfo) -> Renderer | None:
    """The renderer of the engine's model, for tokens mode; None for chat mode, where it needs none."""
    modes = plugins.load("engines", settings.kind).modes
    if settings.mode == "chat" or (settings.mode == "auto" and Mode.TOKENS not in modes):
        return None
    if Mode.TOKENS not in modes:
        raise InvalidInput(
            f"engine.mode: an engine of kind {settings.kind} takes no tokens", hint="set it to chat or auto"
        )
    is_left_to_engine = settings.url is not None and "model" not in settings.model_fields_set
    name = model.name if is_left_to_engine else settings.model
    may_do_without = settings.mode == "auto" and settings.url is not None
    try:
        directory = await asyncio.to_thread(ensure_tokenizer, name)
    except NotInstalled as error:
        # A name that the user wrote is meant; one that the engine made up may lead nowhere.
        if not (may_do_without and is_left_to_engine):
            raise
        _say_chat_mode(error)
        return None
    try:
        renderer = await asyncio.to_thread(renderer_for, name, directory)
    except InvalidInput as error:
        if not may_do_without:
            raise
        _say_chat_mode(error)
        return None
    await _check_tokenizer(engine, model, name, directory)
    return renderer


def _say_chat_mode(error: PolarError) -> None:
    log.warning(
        "chat mode: the engine renders the prompts, because Polar cannot (%s). Its tokens are recorded and"
        " trainable, but a history that it tokenises anew begins a new trace. Set engine.mode to say which",
        error,
    )


async def _check_tokenizer(engine: Engine, model: ModelInfo, name: str, directory: Path) -> None:
    """Raise if the engine is seen to tokenise in another way than the renderer."""
    ours = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    theirs = await engine.tokenize(PROBE)
    if theirs is None:
        log.warning("the engine does not say how it tokenises: that it serves %s is taken on trust", name)
    elif theirs != ours:
        raise InvalidInput(
            f"the engine serves {model.name} with another tokenizer than that of {name}",
            hint="name the model that the engine serves: --model, or engine.model in the settings",
        )


def _collect_rarely() -> None:
    """Let the garbage collector pass over what is loaded by now, and look at new objects less often.

    What a request makes is freed as it is dropped. With Python's defaults the collector walks through
    all that is alive every few requests, which takes a quarter of a busy gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


@asynccontextmanager
async def _in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the body; if it fails, the body is cancelled and its error takes over."""
    owner = asyncio.current_task()
    assert owner is not None
    task = asyncio.create_task(work)

    def wake_owner(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and done.exception():
            owner.cancel()

    task.add_done_callback(wake_owner)
    try:
        yield
    except asyncio.CancelledError:
        if task.done() and not task.cancelled() and (error := task.exception()):
            owner.uncancel()
            raise error from None
        raise
    finally:
        task.cancel()
        await asyncio.wait({task})
