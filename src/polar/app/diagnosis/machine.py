"""This machine: Python, Node.js, memory, disk, open files, ports, and the settings."""

from __future__ import annotations

import importlib.util
import json
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from polar.app.diagnosis.finding import Area, Finding
from polar.assets.cache import without_making
from polar.assets.node import NODE_VERSION, node
from polar.config.settings import Settings, cache_dir, load_settings
from polar.engines.embedded.weights import is_cached
from polar.errors import InvalidInput, NotInstalled

AREA = Area("machine")

LEAST_PYTHON = (3, 11)
GIB = 1 << 30
LEAST_MEMORY, ENOUGH_MEMORY = GIB // 2, 2 * GIB
"""One session of a small harness, and a few of them with the embedded engine."""
LEAST_DISK, ENOUGH_DISK = GIB, 10 * GIB
ENOUGH_FILES = 4096
"""A session takes about ten: its connections, its logs, its sandbox."""


def settings_found(path: Path | None) -> tuple[Settings, Finding]:
    """The settings, or the defaults in the place of those that are wrong."""
    try:
        settings = load_settings(path)
    except InvalidInput as error:
        return Settings(), AREA.problem("settings", error.message, error.hint or "see docs/operations.md")
    return settings, AREA.ok("settings", f"state in {settings.data_dir.absolute()}")


def findings(settings: Settings) -> Iterator[Finding]:
    yield _python()
    yield _node()
    yield _memory(Path("/proc/meminfo"))
    yield _disk("disk for state", settings.data_dir.absolute())
    yield _disk("disk for downloads", cache_dir())
    yield _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from _ports(settings)
    if not settings.engine.urls:
        yield _embedded_engine(settings.engine.model)


def _python() -> Finding:
    version = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    if sys.version_info < LEAST_PYTHON:
        return AREA.problem("python", version, "use Python 3.11 or newer")
    if sys.platform != "linux":
        return AREA.warning("python", version, "sandboxes need Linux; elsewhere use containers")
    return AREA.ok("python", version)


def _node() -> Finding:
    try:
        with without_making():
            return AREA.ok("node.js", f"{NODE_VERSION} in {node()}")
    except NotInstalled:
        detail = f"{NODE_VERSION} is not fetched yet; harnesses that need it bring it along"
        return AREA.warning("node.js", detail, "reach PyPI when such a harness runs first")


def _memory(meminfo: Path) -> Finding:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return AREA.warning("memory", "this system does not say how much is free")
    return _amount("memory", available, "free", LEAST_MEMORY, ENOUGH_MEMORY, "lower node.run_slots")


def _disk(name: str, directory: Path) -> Finding:
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    advice = "free some (server.keep_recordings_days), or set data_dir or $POLAR_CACHE to another place"
    return _amount(name, free, f"free at {directory}", LEAST_DISK, ENOUGH_DISK, advice)


def _amount(name: str, bytes_: int, words: str, least: int, enough: int, fix: str) -> Finding:
    detail = f"{bytes_ / GIB:.1f} GiB {words}"
    if bytes_ < least:
        return AREA.problem(name, detail, fix)
    return AREA.ok(name, detail) if bytes_ >= enough else AREA.warning(name, detail, fix)


def _open_files(limit: int) -> Finding:
    detail = "not limited" if limit == resource.RLIM_INFINITY else f"at most {limit}"
    if limit != resource.RLIM_INFINITY and limit < ENOUGH_FILES:
        return AREA.warning("open files", detail, f"ulimit -n {ENOUGH_FILES} before starting Polar")
    return AREA.ok("open files", detail)


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
            yield AREA.ok(name, f"{host}:{port} is free")
        elif name == "server port" and _is_ours(settings.data_dir, port):
            yield AREA.ok(name, f"{host}:{port} is the server that runs here")
        else:
            yield AREA.problem(name, f"{host}:{port}: {taken}", f"set {setting} to another, 0 for any")


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


def _embedded_engine(model: str) -> Finding:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        fix = "pip install 'polar-rl[engine]', or name a running engine with engine.url"
        return AREA.problem("embedded engine", "torch or transformers is not installed", fix)
    if not is_cached(model):
        return AREA.warning("embedded engine", f"the weights of {model} are fetched at the first start")
    return AREA.ok("embedded engine", f"will serve {model}")
