"""What `polar serve` and `polar node` run: engine, gateway, rollout server and node, together or apart."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.metrics_core import Metric

from polar.app.node_processes import NodeProcesses
from polar.client import AsyncClient
from polar.client.address import pinned
from polar.config import plugins
from polar.config.settings import EngineSettings, Settings, environment_client_cert
from polar.engines.base import Engine, Mode, ModelInfo
from polar.engines.embedded.weights import ensure_tokenizer
from polar.engines.http import HttpEngine
from polar.engines.process import started_engine
from polar.engines.replicas import engine_client
from polar.errors import InvalidInput, NotInstalled
from polar.files import digest
from polar.gateway.server import Gateway
from polar.models.access import TokenRole
from polar.node.node import Node, join
from polar.node.services import lock_directory, node_directory
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rendering.tokenizer import read_tokenizer
from polar.rollout.server import RolloutServer, announce_server
from polar.rollout.tokens import load_or_create_secret, load_or_create_token
from polar.store.store import Store
from polar.telemetry.page import MetricsPage, Part, listening
from polar.telemetry.readings import families
from polar.telemetry.tracing import exporting

log = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Tells the user which step has begun."""


PROBE = "<|im_start|>user\nA 1,024-token probe: naïve 東京 </s>\n\t<tool_call>{}<|im_end|>"
"""Told apart by tokenizers of different models, also where they share a vocabulary's beginning."""
LARGE_BLOCK = 64 * 1024
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of <malloc.h>."""
YOUNG_OBJECTS = 10_000
"""How many more objects than before make the garbage collector look for cycles among them.

Statements of SQLAlchemy are such cycles: of five times as many a server would keep 10 MiB.
"""
OLDER_EVERY = 2
"""Every second collection also looks at what outlived the one before, and every second of those at everything
that is not frozen.

With Python's ten, cycles that a session keeps until its end were found thousands of sessions later.
"""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """A gateway in front of an engine, ready for sessions."""

    gateway: Gateway
    model: ModelInfo
    metrics: tuple[Part, ...]
    """Of the gateway and the engine."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A rollout server that listens."""

    url: str
    token: str
    """Of its owner: opens everything."""
    node_token: str
    """For a node of this process; like the next, it ends with the server and is stored nowhere."""
    read_token: str
    """For a page that only shows."""
    page: MetricsPage

    @property
    def dashboard(self) -> str:
        """The dashboard's address, with its token where no browser sends it to a server."""
        return f"{self.url}/#token={self.read_token}"


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A node that a server has taken, or several in processes of their own, ready to run."""

    node: Node | NodeProcesses
    model: ModelInfo
    metrics: tuple[Part, ...]
    """Of the node, its gateway and its engine; of the engine alone where the nodes have their own pages."""


@dataclass(frozen=True, slots=True)
class Stack(ControlPlane):
    """A running system."""

    model: ModelInfo


@asynccontextmanager
async def running(settings: Settings, say: Say, *, policy: Path | None = None) -> AsyncIterator[Stack]:
    """Start everything; on the way out end it in the opposite order. A part that fails ends the whole.

    `policy`: weights to begin with, where the model's own were never replaced.
    """
    if policy is not None and (adapter := policy / "adapter_config.json").is_file():
        rank = max(json.loads(adapter.read_text())["r"], settings.engine.lora_rank or 0)
        settings = settings.updated(engine={"lora_rank": rank})
    async with (
        serving(settings, say) as server,
        # As a node that is cancelled does, several give their sessions back at once.
        joined(
            *(settings.updated(node={"drain_seconds": 0.0}), server.url, server.node_token, say),
            pin=_own_certificate(settings),
        ) as worker,
        _in_background(worker.node.run()),
    ):
        if policy is not None:
            await _begin_with(policy, settings, server, say)
        with server.page.showing(*worker.metrics):
            tokens = (server.token, server.node_token, server.read_token)
            yield Stack(server.url, *tokens, server.page, worker.model)


async def _begin_with(policy: Path, settings: Settings, server: ControlPlane, say: Say) -> None:
    certificate = _own_certificate(settings)
    ca = pinned(certificate) if certificate else None
    async with AsyncClient(server.url, server.token, ca=ca) as client:
        now, wanted = await client.policy(), digest(policy)
        if now.version > 0:
            if now.version == 1 and (now.path is None or digest(Path(now.path)) != wanted):
                raise InvalidInput(
                    f"{settings.data_dir} began with other weights than {policy}",
                    hint="go on with those, or begin anew in another directory",
                )
            say(f"the policy goes on at version {now.version}")
            return
        here = Path.cwd()
        say(f"the policy begins with {policy.relative_to(here) if policy.is_relative_to(here) else policy}")
        # A copy, in the one directory from which a node of this data takes weights.
        copy = settings.data_dir.absolute() / "weights" / wanted[:16]
        shutil.copytree(policy, copy, dirs_exist_ok=True)
        await client.update_policy(copy)


@asynccontextmanager
async def serving(settings: Settings, say: Say) -> AsyncIterator[ControlPlane]:
    """The rollout server alone; nodes join it."""
    data_dir = settings.data_dir.absolute()
    data_dir.mkdir(parents=True, exist_ok=True)
    token = settings.server.token or load_or_create_token(data_dir)
    secret = _webhook_secret(settings)
    say("starting the rollout server")
    tls = settings.server.tls
    async with (
        opened_store(settings) as store,
        RolloutServer(store, token, settings.server, webhook_secret=secret) as server,
    ):
        _collect_rarely()
        _return_large_blocks()
        with announce_server(data_dir, server.url, tls.cert if tls else None):
            node_token = server.issue(f"node-{settings.node.name}"[:128], TokenRole.NODE)
            read_token = server.issue("dashboard", TokenRole.READ_ONLY)
            yield ControlPlane(server.url, token, node_token, read_token, server.page)


@asynccontextmanager
async def _several(
    settings: Settings, url: str | None, token: str | None, say: Say, pin: Path | None
) -> AsyncIterator[JoinedNode]:
    """Several nodes of the rollout server at `url`, in front of the same engine."""
    async with connected(settings, say) as engine:
        settings = settings.updated(node={"server": url}, server={"token": token})
        if settings.engine.url is None:
            assert isinstance(engine, HttpEngine)
            settings = settings.updated(engine={"url": engine.url, "model": settings.engine.model})
        async with NodeProcesses(settings, say, pin=pin) as nodes:
            yield JoinedNode(nodes, await engine.model_info(), (_families_of(engine),))


def _families_of(engine: Engine) -> Part:
    async def families_of() -> Iterable[Metric]:
        return families(await engine.readings())

    return families_of


@asynccontextmanager
async def joined(
    settings: Settings, url: str | None, token: str | None, say: Say, *, pin: Path | None = None
) -> AsyncIterator[JoinedNode]:
    """A node of the rollout server at `url`, with its own gateway and, unless one is named, engine; or
    several of them. `pin`: the certificate of that very server."""
    if settings.node.count > 1:
        async with _several(settings, url, token, say, pin) as worker:
            yield worker
        return
    data_dir = settings.data_dir.absolute()
    async with AsyncClient(url, token, ca=pinned(pin) if pin else settings.node.ca) as client:
        welcome = await join(client, settings.node)
        # Before the engine, which takes long to start, and before anybody is told that the node works.
        with lock_directory(node_directory(data_dir, settings.node.name)):
            async with data_plane(settings, say) as plane:
                say(f"starting the node {settings.node.name}")
                parts = (settings.node, data_dir, client, plane.gateway, plane.model)
                node = Node(*parts, lease_seconds=welcome.lease_seconds)
                metrics = (node.metric_families, *plane.metrics)
                page = MetricsPage()
                page.add(*metrics)
                async with listening(settings.telemetry, page) as address:
                    if address is not None:
                        say(f"metrics at {address}")
                    yield JoinedNode(node, plane.model, metrics)


def _own_certificate(settings: Settings) -> Path | None:
    """The one by which this process's node and clients know its server."""
    tls = settings.server.tls
    if tls is None:
        return None
    if tls.client_ca is not None and environment_client_cert() is None:
        raise InvalidInput(
            "server.tls.client_ca: the node of this process has no certificate to show",
            hint="set POLAR_CLIENT_CERT and POLAR_CLIENT_KEY, or run nodes apart: polar serve --no-node",
        )
    return tls.cert


def _webhook_secret(settings: Settings) -> str | None:
    """What webhooks are signed with; None where there are none."""
    webhooks = settings.server.webhooks
    if not webhooks.allow:
        return None
    if webhooks.secret is None and settings.server.database_url:
        raise InvalidInput(
            "server.webhooks: servers that share a database must sign with one secret",
            hint="set server.webhooks.secret or POLAR_WEBHOOK_SECRET",
        )
    return webhooks.secret or load_or_create_secret(settings.data_dir.absolute() / "webhook-secret")


def opened_store(settings: Settings) -> AbstractAsyncContextManager[Store]:
    """The store that the settings name, to be entered."""
    return Store.open(
        settings.data_dir.absolute(),
        database_url=settings.server.database_url,
        blobs_url=settings.server.blobs_url,
    )


@asynccontextmanager
async def data_plane(settings: Settings, say: Say) -> AsyncIterator[DataPlane]:
    """The engine, started unless one is named, and a gateway in front of it."""
    async with AsyncExitStack() as parts:
        # First, so that it takes the spans of calls that the gateway's end breaks off.
        about = {"service.instance.id": settings.node.name}
        await parts.enter_async_context(exporting(settings.telemetry, about))
        engine = await parts.enter_async_context(connected(settings, say))
        model = await engine.model_info()
        renderer = await _renderer(settings.engine, engine, model)
        if renderer is None and settings.engine.keeps_thoughts:
            raise InvalidInput(
                "engine.history: in chat mode the engine's template decides what is kept",
                hint="set engine.mode to tokens, or engine.history to template",
            )
        if renderer is None and settings.engine.record_routing:
            raise InvalidInput(
                "engine.record_routing: in chat mode engines do not tell the experts of a stream",
                hint="set engine.mode to tokens, or leave record_routing out",
            )
        await engine.check(Mode.TOKENS if renderer else Mode.CHAT)
        # The check has found out more.
        model = replace(await engine.model_info(), renderer=renderer.name if renderer else None)
        say("starting the gateway")
        gateway = await parts.enter_async_context(Gateway(settings.gateway, engine, renderer, model))
        _collect_rarely()
        _return_large_blocks()
        yield DataPlane(gateway, model, (gateway.metric_families, _families_of(engine)))


def _collect_rarely() -> None:
    """Let the garbage collector pass over what is loaded by now, and look at new objects less often.

    What a request makes is freed as it is dropped. With Python's defaults the collector walks through
    all that is alive every few requests, which takes a quarter of a busy gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, OLDER_EVERY, OLDER_EVERY)


def _return_large_blocks() -> None:
    """Have large buffers be pages of their own, which go back to the system as soon as they are freed.

    The C library comes to keep them on the heap once it has freed a few. What lives on lies between them
    then, and a node that runs for days grows by the holes. Not where a trainer computes in this process: its
    tensors come and go all the time, and new pages for each take a third more of the processor.
    """
    if "torch" in sys.modules:
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGE_BLOCK)
        set_option(_M_ARENA_MAX, 2)


@asynccontextmanager
async def connected(settings: Settings, say: Say) -> AsyncIterator[Engine]:
    """The client of the engine that is named, else of one that is started and runs as long as the body."""
    async with AsyncExitStack() as parts:
        urls, kind = settings.engine.urls, settings.engine.client
        if not urls and kind != "vllm":
            raise InvalidInput(
                f"engine.kind: an engine of kind {kind} is not started here", hint="name it with engine.url"
            )
        if not urls:
            log_file = settings.data_dir.absolute() / "logs" / "engine.log"
            process = await parts.enter_async_context(
                started_engine(settings.engine, log_file, say, log_format=settings.log_format)
            )
            await parts.enter_async_context(_in_background(process.watch()))
            urls = (process.url,)
        engine = engine_client(settings.engine, urls)
        parts.push_async_callback(engine.close)
        yield engine


async def _renderer(settings: EngineSettings, engine: Engine, model: ModelInfo) -> Renderer | None:
    """The renderer of the engine's model, for tokens mode; None for chat mode, where it needs none."""
    modes = plugins.load("engines", settings.client).modes
    if settings.mode == "chat" or (settings.mode == "auto" and Mode.TOKENS not in modes):
        return None
    if Mode.TOKENS not in modes:
        raise InvalidInput(
            f"engine.mode: an engine of kind {settings.kind} takes no tokens", hint="set it to chat or auto"
        )
    is_left_to_engine = settings.url is not None and "model" not in settings.model_fields_set
    name = model.name if is_left_to_engine else settings.model
    try:
        renderer, directory = await renderer_of(settings, name)
    except (NotInstalled, InvalidInput) as error:
        # A name that the user wrote is meant; one that the engine made up may lead nowhere.
        is_missing = isinstance(error, NotInstalled) and not is_left_to_engine
        is_meant = is_missing or settings.renderer is not None
        if settings.mode != "auto" or settings.is_embedded or is_meant:
            raise
        log.warning(
            "chat mode: the engine renders the prompts, because Polar cannot (%s). Its tokens are recorded"
            " and trainable, but a history that it tokenises anew begins a new trace. Set engine.mode to say"
            " which",
            error,
        )
        return None
    await _check_tokenizer(engine, model, name, directory)
    return renderer


async def renderer_of(settings: EngineSettings, name: str) -> tuple[Renderer, Path]:
    """The renderer of a model as the settings want it, and the directory of its tokenizer."""
    directory = await asyncio.to_thread(ensure_tokenizer, name)
    renderer = await asyncio.to_thread(
        renderer_for,
        name,
        directory,
        family=settings.renderer,
        tool_form=settings.tool_form,
        tool_prompt=settings.tool_prompt,
        keeps_thoughts=settings.keeps_thoughts,
    )
    return renderer, directory


async def _check_tokenizer(engine: Engine, model: ModelInfo, name: str, directory: Path) -> None:
    """Raise if the engine is seen to tokenise in another way than the renderer."""
    ours = read_tokenizer(directory / "tokenizer.json").encode(PROBE, add_special_tokens=False).ids
    theirs = await engine.tokenize(PROBE)
    if theirs is None:
        log.warning("the engine does not say how it tokenises: that it serves %s is taken on trust", name)
    elif theirs != ours:
        raise InvalidInput(
            f"the engine serves {model.name} with another tokenizer than that of {name}",
            hint="name the model that the engine serves: --model, or engine.model in the settings",
        )


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
