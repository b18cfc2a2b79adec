"""Checks whether this machine and its engine meet Polar's needs, and says how to fix what does not."""

from __future__ import annotations

import importlib.util
import json
import platform
import resource
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from polar.app.stack import (
    Say,
    connect_engine,
    leads_to_chat_mode,
    rendered_model,
    renderer_of,
    tokenises_alike,
)
from polar.assets.cache import without_making
from polar.assets.node import NODE_VERSION, node
from polar.config import plugins
from polar.config.settings import EngineSettings, NodeSettings, Settings, cache_dir, load_settings
from polar.engines.base import Engine, EngineError, GenerateRequest, Mode, ModelInfo
from polar.engines.embedded.weights import is_cached
from polar.engines.process import on_this_machine, vllm_program
from polar.errors import InvalidInput, NotInstalled, PolarError
from polar.harnesses.base import Harness
from polar.models.chat import Message, Role, Sampling
from polar.models.component import Component, Frozen
from polar.models.session import PROCESSED, RAW
from polar.rendering.base import Renderer
from polar.rendering.template_renderer import TEMPLATE
from polar.rendering.tokenizer import read_tokenizer
from polar.runtimes.base import Runtime
from polar.telemetry.readings import without_credentials

LEAST_PYTHON = (3, 11)
GIB = 1 << 30
LEAST_MEMORY, ENOUGH_MEMORY = GIB // 2, 2 * GIB
"""Enough for one session of a small harness, and for a few with the embedded engine."""
LEAST_DISK, ENOUGH_DISK = GIB, 10 * GIB
ENOUGH_FILES = 4096
"""A session needs about ten: connections, logs, sandbox."""

QUESTION = "Write one line of Python that prints the numbers 1, 22 and 333, then say why it works."
SAMPLE_TOKENS = 48

_RENDERING = ("tokenizers", "jinja2", "renderers")
_VERSION_PAGES = {"vllm": ("/version",), "sglang": ("/server_info", "/get_server_info")}
_WEIGHT_SIGNS = {
    "vllm": ("/is_paused", "", "start vLLM with VLLM_SERVER_DEV_MODE=1"),
    "sglang": ("/openapi.json", "/update_weights_from_disk", "start a current SGLang"),
}
"""For each kind of engine: a path of servers that accept weights, text expected there, and the fix."""
_WEAKER = ("watched", "not ", "copied")
"""Prefixes of descriptions of limits that are enforced less strictly or more slowly than by the kernel."""
_LIMITS_FIX = (
    "give Polar a writable control group of its own (systemd: Delegate=yes; docker: --privileged or"
    " --cgroupns=private with a writable /sys/fs/cgroup) and permission to mount; see docs/sandboxes.md"
)
_FETCHED = "nothing, if PyPI and npm's registry are reachable when a task first uses it"


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could, or something that not everybody needs is missing."""
    PROBLEM = "problem"
    """Sessions will fail."""


class Finding(Frozen):
    area: str
    name: str
    level: Severity
    detail: str
    fix: str | None = None
    """What to do; None if there is nothing to do."""


class Area:
    def __init__(self, name: str) -> None:
        self.name = name

    def ok(self, name: str, detail: str) -> Finding:
        return Finding(area=self.name, name=name, level=Severity.OK, detail=detail)

    def warning(self, name: str, detail: str, fix: str | None = None) -> Finding:
        return Finding(area=self.name, name=name, level=Severity.WARNING, detail=detail, fix=fix)

    def problem(self, name: str, detail: str, fix: str | None = None) -> Finding:
        return Finding(area=self.name, name=name, level=Severity.PROBLEM, detail=detail, fix=fix)

    async def run_check(self, name: str, check: Callable[[], Awaitable[Finding]]) -> Finding:
        """Run a check; an error that prevents it is itself a problem."""
        try:
            return await check()
        except PolarError as error:
            return self.problem(name, error.message, error.hint)


MACHINE, SANDBOXES, HARNESSES, ENGINE = map(Area, ("machine", "sandboxes", "harnesses", "engine"))


async def findings(settings: Settings) -> AsyncIterator[Finding]:
    """Yield all findings except those about settings and engine."""
    for finding in machine_findings(settings):
        yield finding
    async for finding in sandbox_findings(settings.node):
        yield finding
    for name in plugins.names("harnesses"):
        yield await harness_finding(name)


def check_settings(path: Path | None) -> tuple[Settings, Finding]:
    try:
        settings = load_settings(path)
    except InvalidInput as error:
        return Settings(), MACHINE.problem("settings", error.message, error.hint or "see docs/operations.md")
    return settings, MACHINE.ok("settings", f"state in {settings.data_dir.absolute()}")


def machine_findings(settings: Settings) -> Iterator[Finding]:
    yield _python()
    yield _node()
    yield _memory(Path("/proc/meminfo"))
    yield _disk("disk for state", settings.data_dir.absolute())
    yield _disk("disk for downloads", cache_dir())
    yield _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from _ports(settings)
    engine = on_this_machine(settings.engine, lambda _step: None)
    if engine.is_embedded:
        yield _embedded_engine(engine.model)
    elif engine.client == "vllm" and not engine.urls:
        yield _own_vllm(engine)


def _python() -> Finding:
    version = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    if sys.version_info < LEAST_PYTHON:
        return MACHINE.problem("python", version, "use Python 3.11 or newer")
    if sys.platform != "linux":
        return MACHINE.warning("python", version, "sandboxes require Linux; elsewhere, use containers")
    return MACHINE.ok("python", version)


def _node() -> Finding:
    try:
        with without_making():
            return MACHINE.ok("node.js", f"{NODE_VERSION} in {node()}")
    except NotInstalled:
        detail = f"{NODE_VERSION} is not downloaded yet; it comes with the first harness that needs it"
        return MACHINE.warning(
            "node.js", detail, "make sure that PyPI is reachable when such a harness first runs"
        )


def _memory(meminfo: Path) -> Finding:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return MACHINE.warning("memory", "the free memory of this system is unknown")
    return _amount("memory", available, "free", LEAST_MEMORY, ENOUGH_MEMORY, "lower node.run_slots")


def _disk(name: str, directory: Path) -> Finding:
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    advice = "free some (server.keep_recordings_days), or move data_dir or $POLAR_CACHE"
    return _amount(name, free, f"free at {directory}", LEAST_DISK, ENOUGH_DISK, advice)


def _amount(name: str, bytes_: int, words: str, least: int, enough: int, fix: str) -> Finding:
    detail = f"{bytes_ / GIB:.1f} GiB {words}"
    if bytes_ < least:
        return MACHINE.problem(name, detail, fix)
    return MACHINE.ok(name, detail) if bytes_ >= enough else MACHINE.warning(name, detail, fix)


def _open_files(limit: int) -> Finding:
    detail = "not limited" if limit == resource.RLIM_INFINITY else f"at most {limit}"
    if limit != resource.RLIM_INFINITY and limit < ENOUGH_FILES:
        return MACHINE.warning("open files", detail, f"ulimit -n {ENOUGH_FILES} before starting Polar")
    return MACHINE.ok("open files", detail)


def _ports(settings: Settings) -> Iterator[Finding]:
    server, gateway, telemetry = settings.server, settings.gateway, settings.telemetry
    wanted = (
        ("server port", server.host, server.port, "server.port"),
        ("gateway port", gateway.host, gateway.port, "gateway.port"),
        ("metrics port", telemetry.metrics_host, telemetry.metrics_port, "telemetry.metrics_port"),
    )
    for name, host, port, setting in wanted:
        if not port:
            continue
        taken = _why_taken(host, port)
        if taken is None:
            yield MACHINE.ok(name, f"{host}:{port} is free")
        elif name == "server port" and _is_ours(settings.data_dir, port):
            yield MACHINE.ok(name, f"{host}:{port} is used by the server running here")
        else:
            yield MACHINE.problem(
                name, f"{host}:{port}: {taken}", f"set {setting} to another port, or 0 for a free one"
            )


def _why_taken(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _is_ours(data_dir: Path, port: int) -> bool:
    try:
        return str(json.loads((data_dir / "server.json").read_text())["url"]).endswith(f":{port}")
    except (OSError, ValueError, KeyError):
        return False


def _own_vllm(settings: EngineSettings) -> Finding:
    try:
        return MACHINE.ok("vLLM", f"{vllm_program(settings)} will serve {settings.model}")
    except NotInstalled as error:
        return MACHINE.problem("vLLM", error.message, error.hint or "")


def _embedded_engine(model: str) -> Finding:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        fix = "pip install 'polar-rl[engine]', or set engine.url to a running engine"
        return MACHINE.problem("embedded engine", "torch or transformers is not installed", fix)
    if not is_cached(model):
        return MACHINE.warning("embedded engine", f"the weights of {model} are downloaded at first start")
    return MACHINE.ok("embedded engine", f"will serve {model}")


async def sandbox_findings(settings: NodeSettings) -> AsyncIterator[Finding]:
    for name in plugins.names("runtimes"):
        runtime: type[Runtime] = plugins.load("runtimes", name)
        is_used = name in settings.runtimes
        reason = await runtime.unavailable()
        if reason is not None:
            yield _unavailable(name, reason, is_used=is_used)
            continue
        yield SANDBOXES.ok(
            name, "works" if is_used else f"works; add {name} to node.runtimes to let tasks use it"
        )
        if is_used and (kept := dict(await runtime.enforcement())):
            yield _bounds(name, kept)


def _unavailable(name: str, reason: str, *, is_used: bool) -> Finding:
    if not is_used:
        fix = f"nothing, unless tasks need it: then fix this and add {name} to node.runtimes"
        return SANDBOXES.warning(name, f"not available: {reason}", fix)
    return SANDBOXES.problem(name, reason, f"fix this, or remove {name} from node.runtimes")


def _bounds(name: str, kept: dict[str, str]) -> Finding:
    detail = "; ".join(f"{what}: {how}" for what, how in kept.items())
    if any(how.startswith(_WEAKER) for how in kept.values()):
        return SANDBOXES.warning(f"{name} limits", detail, _LIMITS_FIX)
    return SANDBOXES.ok(f"{name} limits", detail)


async def harness_finding(name: str) -> Finding:
    try:
        harness: Harness = plugins.create("harnesses", "harness", Component(name=name))
    except PolarError as error:
        # Some harnesses have required options.
        return HARNESSES.ok(name, f"requires options in the task: {error.message}")
    try:
        with without_making():
            installation = await harness.install()
    except NotInstalled as error:
        return HARNESSES.warning(name, error.message, error.hint and _FETCHED)
    except PolarError as error:
        return HARNESSES.problem(name, error.message, error.hint)
    return HARNESSES.ok(name, installation.version or "installed")


async def engine_findings(settings: Settings, say: Say) -> AsyncIterator[Finding]:
    """Check the engine that the settings name, or one started for the purpose."""
    settings = settings.model_copy(update={"engine": on_this_machine(settings.engine, say)})
    try:
        async with connect_engine(settings, say) as engine:
            async for finding in _engine_findings(settings, engine):
                yield finding
    except PolarError as error:
        yield ENGINE.problem("reachable", error.message, error.hint or "start it, or correct engine.url")


async def _engine_findings(settings: Settings, engine: Engine) -> AsyncIterator[Finding]:
    model = await engine.model_info()
    policy = f"policy version {model.policy_version}"
    yield ENGINE.ok("reachable", f"serves {model.name} with a context of {model.max_context}, {policy}")
    modes = plugins.load("engines", settings.engine.client).modes
    if Mode.TOKENS not in modes:
        yield ENGINE.warning(
            "tokens", "text only: sessions are recorded but never trainable", "use vLLM or SGLang to train"
        )
        return
    yield await ENGINE.run_check("tokens", lambda: _check_mode(engine, Mode.TOKENS))
    yield await ENGINE.run_check("chat", lambda: _check_mode(engine, Mode.CHAT))
    yield await ENGINE.run_check("logprobs", lambda: _logprobs(engine))
    yield await _weights(settings)
    yield await _versions(settings)
    try:
        renderer, directory = await renderer_of(settings.engine, rendered_model(settings.engine, model))
    except PolarError as error:
        yield _no_renderer(settings.engine, error)
        return
    yield ENGINE.ok("renderer", _describe_renderer(settings.engine, renderer))
    if settings.engine.mode != "chat":
        check = partial(_same_tokenizer, engine, model, renderer, directory)
        yield await ENGINE.run_check("tokenizer", check)
    async for finding in _sample_findings(engine, renderer, directory):
        yield finding


def _no_renderer(settings: EngineSettings, error: PolarError) -> Finding:
    if settings.mode == "chat":
        return ENGINE.ok("renderer", f"mode chat (set by engine.mode); tokens mode has none: {error.message}")
    if not leads_to_chat_mode(settings, error):
        return ENGINE.problem("renderer", f"none, so nothing starts: {error.message}", error.hint)
    fix = f"{error.hint or ''} (without it the engine renders: engine.mode chat)".strip()
    return ENGINE.warning("renderer", f"none, so the mode is chat: {error.message}", fix)


def _describe_renderer(settings: EngineSettings, renderer: Renderer) -> str:
    mode = "chat (set by engine.mode); tokens mode would use" if settings.mode == "chat" else "tokens:"
    if settings.renderer is not None:
        why = "set by engine.renderer"
    elif renderer.name.startswith(TEMPLATE):
        why = "the model's own chat template, proved turn by turn"
    else:
        why = "of the package renderers, the nearest to the model's chat template"
    calls = renderer.call_form or "none: the template shows no tools"
    return f"mode {mode} {renderer.name} ({why}); calls: {calls}; earlier thoughts: {settings.history}"


async def _versions(settings: Settings) -> Finding:
    found = [f"{name} {version(name)}" for name in _RENDERING if importlib.util.find_spec(name)]
    async with _engine_http(settings.engine) as http:
        for url, page in product(settings.engine.urls, _VERSION_PAGES.get(settings.engine.client, ())):
            try:
                answer = await http.get(f"{url.removesuffix('/v1')}{page}")
                found.append(f"{settings.engine.client} {answer.json()['version']}")
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                continue
    return ENGINE.ok("versions", ", ".join(dict.fromkeys(found)))


async def _logprobs(engine: Engine) -> Finding:
    """Report the kind of logprobs, which earlier checks found out if the engine does not say."""
    mode = (await engine.model_info()).logprobs_mode
    if mode == PROCESSED:
        return ENGINE.ok("logprobs", "from the distribution that tokens are sampled from")
    known = "computed before temperature" if mode == RAW else "from an unknown distribution"
    fix = "start vLLM with --logprobs-mode processed_logprobs, or train at temperature 1"
    return ENGINE.warning("logprobs", f"{known}: sessions at temperatures other than 1 are not trained", fix)


async def _check_mode(engine: Engine, mode: Mode) -> Finding:
    await engine.check(mode)
    return ENGINE.ok(mode.value, "token ids and logprobs come with every answer")


async def _weights(settings: Settings) -> Finding:
    """Check for weight updates by what a server shows, without pausing or loading anything."""
    path, sign, fix = _WEIGHT_SIGNS.get(settings.engine.client, ("", "", "use vLLM or SGLang to train"))
    async with _engine_http(settings.engine) as http:
        lacking = [
            without_credentials(url)
            for url in settings.engine.urls
            if not await _shows(http, f"{url.removesuffix('/v1')}{path}", sign)
        ]
    if lacking:
        return ENGINE.warning("weight updates", f"not supported by {', '.join(lacking)}", fix)
    return ENGINE.ok("weight updates", "supported while sessions run")


def _engine_http(settings: EngineSettings) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    return httpx.AsyncClient(timeout=10.0, headers=headers)


async def _shows(http: httpx.AsyncClient, url: str, sign: str) -> bool:
    try:
        answer = await http.get(url)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and sign in answer.text


async def _sample_findings(engine: Engine, renderer: Renderer, directory: Path) -> AsyncIterator[Finding]:
    try:
        ids, pieces = await _sample(engine, renderer)
    except EngineError as error:
        yield ENGINE.problem("streaming", error.message, error.hint)
        return
    yield _streaming(ids, pieces)
    yield drift(ids, read_tokenizer(directory / "tokenizer.json"))


async def _same_tokenizer(engine: Engine, model: ModelInfo, renderer: Renderer, directory: Path) -> Finding:
    is_same = await tokenises_alike(engine, renderer, directory)
    if is_same is None:
        return ENGINE.warning("tokenizer", f"cannot be compared; assumed to be that of {model.name}")
    if not is_same:
        fix = "set --model, or engine.model in the settings, to the model that the engine serves"
        return ENGINE.problem("tokenizer", f"differs from that in {directory}", fix)
    return ENGINE.ok("tokenizer", "engine and renderer agree")


async def _sample(engine: Engine, renderer: Renderer) -> tuple[list[int], int]:
    prompt = renderer.render((Message(Role.USER, QUESTION),), ())
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=SAMPLE_TOKENS)
    request = GenerateRequest("doctor", prompt, sampling, renderer.stop_token_ids)
    ids: list[int] = []
    pieces = 0
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            ids += chunk.ids
            pieces += 1
    return ids, pieces


def _streaming(ids: list[int], pieces: int) -> Finding:
    detail = f"{len(ids)} tokens came in {pieces} pieces"
    if pieces < 2 <= len(ids) - 1:
        return ENGINE.warning(
            "streaming", detail, "connect to the engine directly: a proxy in between may buffer"
        )
    return ENGINE.ok("streaming", detail)


def drift(ids: list[int], tokenizer: Tokenizer) -> Finding:
    """Check whether the sampled text, tokenised again as a chat template does, gives the sampled tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    again = tokenizer.encode(text, add_special_tokens=False).ids
    if again == ids:
        return ENGINE.ok("token drift", f"none: {len(ids)} sampled tokens are unchanged when tokenised again")
    pairs = enumerate(zip(ids, again, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(ids), len(again)))
    return ENGINE.ok(
        "token drift",
        f"{len(ids)} sampled tokens become {len(again)} when tokenised again, different from token {place}:"
        " tokens mode trains what was sampled; in chat mode such a turn begins a new trace",
    )
