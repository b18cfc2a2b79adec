"""A whole system of processes with a faulty link between any two of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import yaml

from polar.runtimes.disk import unmount_below
from tests.faults.engine import sampled_answers
from tests.faults.killable_postgres import KillablePostgres, killable_postgres
from tests.faults.link import Link, Opened
from tests.faults.part import Part
from tests.systems import TOKEN

LEASE_SECONDS = 5.0
DISK_MEGABYTES = 64
SAMPLED = "sampled.txt"
"""The file with what the engine has sampled."""


@dataclass(frozen=True)
class Place:
    """What runs, what lies between, and where; parts are numbered from 0."""

    directory: Path
    servers: list[Part]
    nodes: list[Part]
    engine: Part
    database: KillablePostgres | None
    to_servers: list[Link]
    """As nodes and clients reach them."""
    to_engine: Link
    to_database: Link | None
    disks: list[Path]
    """Small ones, where they can be had: of the first server and the first node."""

    @property
    def stored_at(self) -> Path | str:
        """The database's file or URL."""
        return _database_url(self.to_database) or self.directory / "server-0/polar.db"

    @property
    def sampled(self) -> list[str]:
        """Every answer that the engine has begun to give an agent."""
        return sampled_answers(self.directory / SAMPLED)

    def set_clock(self, server: int, seconds: float) -> None:
        (self.directory / f"server-{server}.clock").write_text(str(seconds))

    def url(self, number: int) -> str:
        return self.to_servers[number % len(self.to_servers)].url


@asynccontextmanager
async def place(directory: Path, *, servers: int, nodes: int, on_postgres: bool) -> AsyncIterator[Place]:
    """Everything at work while the body runs, and killed after it unless it was stopped before."""
    async with AsyncExitStack() as parts:
        disks = parts.enter_context(_small_disks(directory, ("server-0", "node-0")))
        database = await parts.enter_async_context(killable_postgres()) if on_postgres else None
        to_database = None
        if database is not None:
            to_database = await parts.enter_async_context(Link(database.reach, carries_http=False))
        to_servers = [
            await parts.enter_async_context(
                Link(_reach(partial(_told, directory / f"server-{n}/server.json")), carries_http=True)
            )
            for n in range(servers)
        ]
        engine_file = directory / "engine.url"
        to_engine = await parts.enter_async_context(
            Link(_reach(lambda: engine_file.read_text()), carries_http=True)
        )
        running = Place(
            directory,
            [_server(directory, n, to_database) for n in range(servers)],
            [_node(directory, n, to_servers[n % servers], to_engine) for n in range(nodes)],
            _engine(directory, engine_file, directory / SAMPLED),
            database,
            to_servers,
            to_engine,
            to_database,
            disks,
        )
        everything = [running.engine, *running.servers, *running.nodes]
        for part in everything:
            part.start()
        try:
            yield running
        finally:
            await asyncio.gather(*(part.stop(kindly=False) for part in everything))
            for orphan in processes_below(directory):
                orphan.kill()


def processes_below(directory: Path) -> list[psutil.Process]:
    """Processes that work in a directory or were started with its name."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [process.cwd(), *process.cmdline()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(directory) in word for word in words):
            found.append(process)
    return found


def _server(directory: Path, number: int, to_database: Link | None) -> Part:
    name = f"server-{number}"
    url = _database_url(to_database)
    settings = {
        "data_dir": str(directory / name),
        "server": {
            "port": 0,
            "token": TOKEN,
            "lease_seconds": LEASE_SECONDS,
            "retry_seconds": 0.1,
            "database_url": url,
            "blobs_url": f"file://{directory}/blobs" if url else None,
        },
    }
    return _polar(directory, name, "serve", "--no-node", settings=settings, says="serving nodes at")


def _database_url(to_database: Link | None) -> str | None:
    if to_database is None:
        return None
    return f"postgresql://postgres@127.0.0.1:{to_database.port}/postgres"


def _node(directory: Path, number: int, to_server: Link, to_engine: Link) -> Part:
    name = f"node-{number}"
    settings = {
        "data_dir": str(directory / name),
        "server": {"token": TOKEN},
        "engine": {"url": to_engine.url, "mode": "chat"},
        "node": {
            "name": name,
            "server": to_server.url,
            "run_slots": 4,
            "ready_buffer": 1,
            "drain_seconds": 5,
            "runtimes": ["process"],
            # Some of the disks are smaller than what is kept free elsewhere.
            "disk_reserve_bytes": 1 << 20,
        },
    }
    return _polar(directory, name, "node", settings=settings, says="ready as")


def _engine(directory: Path, address: Path, sampled: Path) -> Part:
    return Part("engine", "tests.faults.engine", (address, sampled), directory, says="listening")


def _polar(directory: Path, name: str, *arguments: str, settings: Mapping[str, object], says: str) -> Part:
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    clock = directory / f"{name}.clock"
    clock.write_text("0")
    return Part(name, "tests.faults.program", ([*arguments, "--config", str(file)], clock), directory, says)


def _told(file: Path) -> str:
    return str(json.loads(file.read_text())["url"])


def _reach(url: Callable[[], str]) -> Callable[[], asyncio.Future[Opened]]:
    """Connect to wherever a part listens since it was last started."""

    async def open_there() -> Opened:
        try:
            parts = urlsplit(url())
        except ValueError as error:
            raise ConnectionRefusedError("it has not said where it listens") from error
        return await asyncio.open_connection(parts.hostname, parts.port)

    return lambda: asyncio.ensure_future(open_there())


@contextmanager
def _small_disks(directory: Path, names: tuple[str, ...]) -> Iterator[list[Path]]:
    """Disks that are soon full, as far as this user may mount any."""
    mounted: list[Path] = []
    try:
        for name in names:
            path = directory / name
            path.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "polar-faults", str(path)]
            if shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0:
                mounted.append(path)
        yield mounted
    finally:
        # Where the test has failed, so far as to leave sandboxes and their disks behind.
        unmount_below(directory)
