"""What `polar serve` and `polar node` run: engine, gateway, rollout server and node, together or apart."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.metrics_core import Metric

from polar.app.memory import keep_memory_steady, share_one_heap
from polar.app.node_processes import NodeProcesses
from polar.client import AsyncClient
from polar.client.connection import pinned
from polar.config import plugins
from polar.config.settings import EngineSettings, Settings, environment_client_cert
from polar.engines.base import Engine, Mode, ModelInfo
from polar.engines.embedded.weights import ensure_tokenizer
from polar.engines.http import HttpEngine
from polar.engines.process import on_this_machine, started_engine
from polar.engines.replicas import engine_client
from polar.errors import InvalidInput, NotInstalled, PolarError
from polar.files import digest, make_directory
from polar.gateway.server import Gateway
from polar.models.access import TokenRole
from polar.node.node import Node, join
from polar.node.services import lock_directory, node_directory
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from polar.rendering.template import PROBES
from polar.rendering.tokenizer import read_tokenizer
from polar.rollout.access import load_or_create_secret, load_or_create_token
from polar.rollout.server import RolloutServer, announce_server
from polar.store.store import Store
from polar.telemetry.page import MetricSource, MetricsPage, listening
from polar.telemetry.readings import families
from polar.telemetry.tracing import exporting

log = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Tells the user which step has begun."""


PROBE = "<|im_start|>user\nA 1,024-token probe: naïve 東京 </s>\n\t<tool_call>{}<|im_end|>"
"""Tokenised differently by different models, even if they share part of a vocabulary."""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """A gateway in front of an engine, ready for sessions."""

    gateway: Gateway
    model: ModelInfo
    metrics: tuple[MetricSource, ...]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    url: str
    token: str
    """The owner's token, which permits everything."""
    node_token: str
    """A token for a node of this process; it ends with the server and is never stored."""
    read_token: str
    """A token for read-only pages; it ends with the server and is never stored."""
    page: MetricsPage

    @property
    def dashboard(self) -> str:
        """The dashboard's address, with its token in the fragment, which browsers do not send."""
        return f"{self.url}/#token={self.read_token}"


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """One or several nodes that have joined a server, ready to run."""

    node: Node | NodeProcesses
    model: ModelInfo
    metrics: tuple[MetricSource, ...]
    """The metrics of node, gateway and engine; only the engine's if nodes have their own pages."""


@dataclass(frozen=True, slots=True)
class Stack(ControlPlane):
    model: ModelInfo


@asynccontextmanager
async def running(settings: Settings, say: Say, *, policy: Path | None = None) -> AsyncIterator[Stack]:
    """Start everything, with the weights `policy` if new, and stop it in reverse order after the block."""
    if policy is not None and (adapter := policy / "adapter_config.json").is_file():
        rank = max(json.loads(adapter.read_text())["r"], settings.engine.lora_rank or 0)
        settings = settings.updated(engine={"lora_rank": rank})
    async with (
        serving(settings, say) as server,
        # Like a single cancelled node, several return their sessions at once.
        join_server(
            *(settings.updated(node={"drain_seconds": 0.0}), server.url, server.node_token, say),
            pin=_own_certificate(settings),
        ) as worker,
        _in_background(worker.node.run()),
    ):
        if policy is not None:
            await _start_policy(policy, settings, server, say)
        with server.page.showing(*worker.metrics):
            tokens = (server.token, server.node_token, server.read_token)
            yield Stack(server.url, *tokens, server.page, worker.model)


async def _start_policy(policy: Path, settings: Settings, server: ControlPlane, say: Say) -> None:
    certificate = _own_certificate(settings)
    ca = pinned(certificate) if certificate else None
    async with AsyncClient(server.url, server.token, ca=ca) as client:
        now, wanted = await client.policy(), digest(policy)
        if now.version > 0:
            if now.version == 1 and (now.path is None or digest(Path(now.path)) != wanted):
                raise InvalidInput(
                    f"{settings.data_dir} was started with other weights than {policy}",
                    hint="use the same weights, or another directory",
                )
            say(f"resuming the policy at version {now.version}")
            return
        here = Path.cwd()
        say(f"the policy begins with {policy.relative_to(here) if policy.is_relative_to(here) else policy}")
        # Copied to the only directory from which nodes of this data directory load weights.
        copy = settings.data_dir.absolute() / "weights" / wanted[:16]
        shutil.copytree(policy, copy, dirs_exist_ok=True)
        await client.update_policy(copy)


@asynccontextmanager
async def serving(settings: Settings, say: Say) -> AsyncIterator[ControlPlane]:
    """Run only the rollout server; nodes join it."""
    share_one_heap()
    data_dir = settings.data_dir.absolute()
    make_directory(data_dir)
    token = settings.server.token or load_or_create_token(data_dir)
    secret = _webhook_secret(settings)
    say("starting the rollout server")
    tls = settings.server.tls
    async with (
        open_store(settings) as store,
        RolloutServer(store, token, settings.server, webhook_secret=secret) as server,
        _in_background(keep_memory_steady()),
    ):
        with announce_server(data_dir, server.url, tls.cert if tls else None):
            node_token = server.issue(f"node-{settings.node.name}"[:128], TokenRole.NODE)
            read_token = server.issue("dashboard", TokenRole.READ_ONLY)
            yield ControlPlane(server.url, token, node_token, read_token, server.page)


@asynccontextmanager
async def _join_several(
    settings: Settings, url: str | None, token: str | None, say: Say, pin: Path | None
) -> AsyncIterator[JoinedNode]:
    settings = _on_this_machine(settings, say)
    async with connect_engine(settings, say) as engine:
        settings = settings.updated(node={"server": url}, server={"token": token})
        if settings.engine.url is None:
            assert isinstance(engine, HttpEngine)
            settings = settings.updated(engine={"url": engine.url, "model": settings.engine.model})
        async with NodeProcesses(settings, say, pin=pin) as nodes:
            yield JoinedNode(nodes, await engine.model_info(), (_families_of(engine),))


def _families_of(engine: Engine) -> MetricSource:
    async def families_of() -> Iterable[Metric]:
        return families(await engine.readings())

    return families_of


@asynccontextmanager
async def join_server(
    settings: Settings, url: str | None, token: str | None, say: Say, *, pin: Path | None = None
) -> AsyncIterator[JoinedNode]:
    """Join one or several nodes to the rollout server at `url`, with their own gateways.

    The engine is started unless one is configured. `pin` is the server's own certificate.
    """
    if settings.node.count > 1:
        async with _join_several(settings, url, token, say, pin) as worker:
            yield worker
        return
    data_dir = settings.data_dir.absolute()
    async with AsyncClient(url, token, ca=pinned(pin) if pin else settings.node.ca) as client:
        welcome = await join(client, settings.node)
        # Before the engine, which is slow to start, and before the node reports that it is ready.
        with lock_directory(node_directory(data_dir, settings.node.name)):
            async with data_plane(settings, say) as plane:
                say(f"starting the node {settings.node.name}")
                parts = (settings.node, data_dir, client, plane.gateway, plane.model)
                node = Node(*parts, lease_seconds=welcome.lease_seconds, resume_bytes=welcome.resume_bytes)
                metrics = (node.metric_families, *plane.metrics)
                page = MetricsPage()
                page.add(*metrics)
                async with listening(settings.telemetry, page) as address:
                    if address is not None:
                        say(f"metrics at {address}")
                    yield JoinedNode(node, plane.model, metrics)


def _own_certificate(settings: Settings) -> Path | None:
    """Return the certificate by which this process's node and clients recognise its server."""
    tls = settings.server.tls
    if tls is None:
        return None
    if tls.client_ca is not None and environment_client_cert() is None:
        raise InvalidInput(
            "server.tls.client_ca: the node of this process has no client certificate",
            hint="set POLAR_CLIENT_CERT and POLAR_CLIENT_KEY, or run nodes apart: polar serve --no-node",
        )
    return tls.cert


def _webhook_secret(settings: Settings) -> str | None:
    """Return the secret for signing webhooks; None if there are none."""
    webhooks = settings.server.webhooks
    if not webhooks.allow:
        return None
    if webhooks.secret is None and settings.server.database_url:
        raise InvalidInput(
            "server.webhooks: servers that share a database must use the same secret",
            hint="set server.webhooks.secret or POLAR_WEBHOOK_SECRET",
        )
    return webhooks.secret or load_or_create_secret(settings.data_dir.absolute() / "webhook-secret")


def open_store(settings: Settings) -> AbstractAsyncContextManager[Store]:
    return Store.open(
        settings.data_dir.absolute(),
        database_url=settings.server.database_url,
        blobs_url=settings.server.blobs_url,
    )


@asynccontextmanager
async def data_plane(settings: Settings, say: Say) -> AsyncIterator[DataPlane]:
    """Run a gateway in front of the engine, starting the engine unless one is configured."""
    share_one_heap()
    settings = _on_this_machine(settings, say)
    async with AsyncExitStack() as parts:
        # First, so that it still records calls that the gateway's end interrupts.
        about = {"service.instance.id": settings.node.name}
        await parts.enter_async_context(exporting(settings.telemetry, about))
        engine = await parts.enter_async_context(connect_engine(settings, say))
        model = await engine.model_info()
        renderer = await _renderer(settings.engine, engine, model)
        if renderer is None and settings.engine.keeps_thoughts:
            raise InvalidInput(
                "engine.history: has no effect in chat mode, where the engine's template decides",
                hint="set engine.mode to tokens, or engine.history to template",
            )
        if renderer is None and settings.engine.record_routing:
            raise InvalidInput(
                "engine.record_routing: engines do not report experts in chat mode",
                hint="set engine.mode to tokens, or remove record_routing",
            )
        await engine.check(Mode.TOKENS if renderer else Mode.CHAT)
        # The check has completed it.
        model = replace(await engine.model_info(), renderer=renderer.name if renderer else None)
        say("starting the gateway")
        gateway = await parts.enter_async_context(Gateway(settings.gateway, engine, renderer, model))
        await parts.enter_async_context(_in_background(keep_memory_steady()))
        yield DataPlane(gateway, model, (gateway.metric_families, _families_of(engine)))


@asynccontextmanager
async def connect_engine(settings: Settings, say: Say) -> AsyncIterator[Engine]:
    """Yield the client of the configured engine, or of one started for the block."""
    settings = _on_this_machine(settings, say)
    async with AsyncExitStack() as parts:
        urls, kind = settings.engine.urls, settings.engine.client
        if not urls and kind != "vllm":
            known = plugins.names("engines")
            hint = "set engine.url" if kind in known else f"known: auto, embedded, {', '.join(known)}"
            raise InvalidInput(f"engine.kind: Polar cannot start an engine of kind {kind}", hint=hint)
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


def _on_this_machine(settings: Settings, say: Say) -> Settings:
    return settings.model_copy(update={"engine": on_this_machine(settings.engine, say)})


async def _renderer(settings: EngineSettings, engine: Engine, model: ModelInfo) -> Renderer | None:
    """Return the renderer of the engine's model for tokens mode; None for chat mode."""
    modes = plugins.load("engines", settings.client).modes
    if settings.mode == "chat" or (settings.mode == "auto" and Mode.TOKENS not in modes):
        return None
    if Mode.TOKENS not in modes:
        raise InvalidInput(
            f"engine.mode: an engine of kind {settings.kind} does not accept tokens",
            hint="set it to chat or auto",
        )
    name = rendered_model(settings, model)
    try:
        renderer, directory = await renderer_of(settings, name)
    except (NotInstalled, InvalidInput) as error:
        if not leads_to_chat_mode(settings, error):
            raise
        is_elsewhere = isinstance(error, NotInstalled)
        remedy = "for tokens mode --model names its directory here; " if is_elsewhere else ""
        log.warning(
            "using chat mode: the engine renders prompts, because Polar cannot (%s). Tokens are recorded"
            " and trainable, but a history that is tokenised again begins a new trace (%sset engine.mode to"
            " silence this)",
            error,
            remedy,
        )
        return None
    await _check_tokenizer(engine, model, name, renderer, directory)
    return renderer


def rendered_model(settings: EngineSettings, model: ModelInfo) -> str:
    """The model whose tokenizer renders prompts: the configured one, else what the engine calls its own."""
    return model.name if _is_left_to_engine(settings) else settings.model


def leads_to_chat_mode(settings: EngineSettings, error: PolarError) -> bool:
    """Whether the engine renders where this error leaves no renderer: not where the settings ask for one, or
    name a model that is missing; nor with the embedded engine, which reads no calls."""
    is_named = settings.renderer is not None or settings.tool_form is not None
    # A configured name must be valid; one that the engine made up need not be.
    is_missing = isinstance(error, NotInstalled) and not _is_left_to_engine(settings)
    return not (settings.mode == "tokens" or is_named or is_missing or settings.is_embedded)


def _is_left_to_engine(settings: EngineSettings) -> bool:
    return settings.url is not None and "model" not in settings.model_fields_set


async def renderer_of(settings: EngineSettings, name: str) -> tuple[Renderer, Path]:
    """Return the configured renderer of a model, and the directory of its tokenizer."""
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


async def _check_tokenizer(
    engine: Engine, model: ModelInfo, name: str, renderer: Renderer, directory: Path
) -> None:
    """Raise if the engine is known to tokenise differently from the renderer."""
    is_same = await tokenises_alike(engine, renderer, directory)
    if is_same is None:
        log.warning("the engine's tokenizer cannot be checked; assuming that it serves %s", name)
    elif not is_same:
        raise InvalidInput(
            f"the engine serves {model.name} with a different tokenizer from that of {name}",
            hint="set --model, or engine.model in the settings, to the model that the engine serves",
        )


async def tokenises_alike(engine: Engine, renderer: Renderer, directory: Path) -> bool | None:
    """Whether the engine tokenises as the renderer does, control tokens included; None if it does not say."""
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    written = set(renderer.stop_token_ids)
    for conversation in PROBES.values():
        with suppress(InvalidInput):
            written.update(renderer.render(*conversation))
    added = tokenizer.get_added_tokens_decoder()
    text = PROBE + "".join(added[id].content for id in sorted(written & added.keys()))
    theirs = await engine.tokenize(text)
    return None if theirs is None else bool(theirs == tokenizer.encode(text, add_special_tokens=False).ids)


@asynccontextmanager
async def _in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the block; if it fails, cancel the block and raise its error."""
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
