"""Sandboxes as a task asks for them: its files in place, its prepare steps done."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Self

from polar.config import plugins
from polar.config.settings import NodeSettings
from polar.errors import InvalidInput, NotInstalled, PolarError
from polar.gateway.server import Gateway
from polar.models.task import Exec, TaskSpec, Upload
from polar.runtimes.allow_list import AllowList
from polar.runtimes.base import Command, Host, Runtime, Sandbox, SandboxError, SandboxSpec, ToolDirectory

log = logging.getLogger(__name__)

_MAX_UPLOAD_FILES = 20_000
_ERROR_BYTES = 2_000
"""How much of a failing step's output its error repeats; the whole is in the session's logs."""
_UNUSED_SNAPSHOTS = 16
"""How many snapshots are kept that no session uses at the moment."""


class PreparationFailed(PolarError):
    """A prepare step of the task did not succeed; trying again would not help."""


@dataclass(slots=True, eq=False)
class SharedSnapshot:
    """The snapshot of one preparation; whoever finds none holds the lock while it makes one."""

    name: str
    runtime: Runtime
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_made: bool = False
    users: int = 0


class Snapshots:
    """Prepared workspaces that the samples of a task share, so that its prepare steps run once a node; those
    that no session has used for longest go first."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._entries: OrderedDict[str, SharedSnapshot] = OrderedDict()
        self._made = 0

    @asynccontextmanager
    async def use(self, task: TaskSpec, runtime: Runtime) -> AsyncIterator[SharedSnapshot]:
        """The entry of this task's preparation; its snapshot stays while the block runs."""
        key = _preparation(task)
        entry = self._entries.get(key)
        if entry is None:
            self._made += 1
            entry = self._entries[key] = SharedSnapshot(str(self._made), runtime)
        entry.users += 1
        self._entries.move_to_end(key)
        try:
            yield entry
        finally:
            entry.users -= 1
            await self._forget_unused(_UNUSED_SNAPSHOTS)

    async def close(self) -> None:
        """Remove all snapshots, once no session uses them."""
        await self._forget_unused(0)

    async def _forget_unused(self, kept: int) -> None:
        unused = [key for key, entry in self._entries.items() if not entry.users]
        for key in unused[: max(0, len(unused) - kept)]:
            entry = self._entries.pop(key)
            if entry.is_made:
                await entry.runtime.discard(entry.name, self._host)


def _preparation(task: TaskSpec) -> str:
    """Equal for tasks whose sandboxes begin alike."""
    document = task.model_dump_json(include={"runtime", "files", "prepare"})
    return hashlib.sha256(document.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SandboxPlace:
    """Where a node's sandboxes are made, and what its owner allows there."""

    settings: NodeSettings
    directory: Path
    """The node's own below the data directory."""
    snapshots: Snapshots

    @property
    def host(self) -> Host:
        """This node, as runtimes see it."""
        return Host(self.directory, self.settings.disk_reserve_bytes, self.settings.upload_roots)


@dataclass(slots=True)
class Sandboxes:
    """Makes the sandboxes of one session: the agent's own, and others like it before the agent came."""

    session_id: str
    task: TaskSpec
    place: SandboxPlace
    name: str
    gateway: Gateway | None = None
    """None: the sandboxes reach none."""
    made: int = 0

    @asynccontextmanager
    async def sandbox(self, tools: tuple[ToolDirectory, ...] = ()) -> AsyncIterator[Sandbox]:
        """A sandbox ready for use; stopped at the end whatever happens."""
        runtime = await self._runtime()
        async with AsyncExitStack() as stack:
            yield await self._ready(runtime, self._spec(tools), stack)

    def _spec(self, tools: tuple[ToolDirectory, ...]) -> SandboxSpec:
        self.made += 1
        name = self.name if self.made == 1 else f"{self.name}.{self.made}"
        return SandboxSpec(
            name=name,
            gateway_host=self.gateway.host if self.gateway else "127.0.0.1",
            # Only the agent has anything to ask of the gateway.
            gateway_port=self.gateway.port if self.gateway and self.made == 1 else 0,
            tools=tools,
        )

    async def _ready(self, runtime: Runtime, spec: SandboxSpec, stack: AsyncExitStack) -> Sandbox:
        """From the task's snapshot where there is one; else made anew, and kept as one where it pays."""
        task = self.task
        if not (task.prepare and task.samples > 1 and runtime.supports_snapshots):
            sandbox = await self._start(runtime, spec, stack)
            await self._prepare(sandbox)
            return sandbox
        entry = await stack.enter_async_context(self.place.snapshots.use(task, runtime))
        async with entry.lock:
            if not entry.is_made:
                sandbox = await self._start(runtime, spec, stack)
                await self._prepare(sandbox)
                await sandbox.snapshot(entry.name)
                entry.is_made = True
                return sandbox
        return await self._start(runtime, replace(spec, base=entry.name), stack)

    async def _start(self, runtime: Runtime, spec: SandboxSpec, stack: AsyncExitStack) -> Sandbox:
        sandbox = await runtime.start(spec, self.place.host)
        stack.push_async_callback(self._stop, sandbox)
        return sandbox

    async def _stop(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.stop()
        except SandboxError:
            log.exception("session %s: a sandbox could not be cleared away", self.session_id)

    async def _runtime(self) -> Runtime:
        component, allowed = self.task.runtime, self.place.settings.runtimes
        if component.name not in allowed:
            raise NotInstalled(
                f"runtime {component.name!r} is not allowed on this node",
                hint=f"allowed: {', '.join(allowed)} (setting node.runtimes)",
            )
        runtime: Runtime = plugins.create("runtimes", "runtime", component)
        self._check_network(runtime)
        reason = await runtime.unavailable()
        if reason:
            raise NotInstalled(
                f"runtime {component.name!r} does not work on this machine: {reason}",
                hint="`polar doctor` says how to mend it; docs/sandboxes.md says what else there is",
            )
        return runtime

    def _check_network(self, runtime: Runtime) -> None:
        try:
            allowed = AllowList.parse(self.place.settings.network_allow)
        except ValueError as error:
            raise InvalidInput(f"node.network_allow: {error}") from None
        if beyond := runtime.reaches.beyond(allowed):
            raise InvalidInput(
                f"runtime.options.network.allow: this node does not allow {', '.join(map(str, beyond))}",
                hint="setting node.network_allow",
            )

    async def _prepare(self, sandbox: Sandbox) -> None:
        for path, content in self.task.files.items():
            await sandbox.upload(sandbox.workspace / path, content.data, executable=content.executable)
        for number, step in enumerate(self.task.prepare):
            match step:
                case Upload():
                    await _upload(sandbox, step, self.place.settings.upload_roots, f"prepare.{number}")
                case Exec():
                    await _exec(sandbox, step, f"prepare.{number}", self.task)


class Prewarmed:
    """Sandboxes for the evaluator: the first made while the agent still runs, others on demand; all end with
    the context."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._make = make
        self._stack = AsyncExitStack()
        self._early: asyncio.Task[Sandbox] | None = None

    def begin(self) -> None:
        """Start making one now; that it fails is told to whoever takes it."""
        self._early = asyncio.create_task(self._stack.enter_async_context(self._make()))

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        early, self._early = self._early, None
        if early is None:
            async with self._make() as made:
                yield made
        else:
            yield await early

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._early is not None:
            self._early.cancel()
            await asyncio.wait({self._early})
            if not self._early.cancelled():
                self._early.exception()
        await self._stack.aclose()


async def _exec(sandbox: Sandbox, step: Exec, name: str, task: TaskSpec) -> None:
    # The stage's own deadline is `init_seconds`, waiting for others not counted; this one is never first.
    result = await sandbox.exec(
        Command(("/bin/sh", "-c", step.exec)), timeout=task.budgets.init_seconds, log_name=name
    )
    if result.exit_code:
        output = await asyncio.to_thread(result.stderr.text, _ERROR_BYTES)
        raise PreparationFailed(
            f"{name}: exit code {result.exit_code} from {step.exec!r}: {output.strip()}".strip(": ")
        )


async def _upload(sandbox: Sandbox, step: Upload, roots: tuple[Path, ...], name: str) -> None:
    source = _allowed(step, roots, name)
    files = await asyncio.to_thread(lambda: list(_files(source, name)))
    for path, relative in files:
        data, executable = await asyncio.to_thread(_read, path, name)
        await sandbox.upload(sandbox.workspace / step.upload / relative, data, executable=executable)


def _allowed(step: Upload, roots: tuple[Path, ...], name: str) -> Path:
    """The source with every link resolved, if it is below an allowed root."""
    source = Path(step.source)
    try:
        resolved = source.resolve(strict=True)
    except OSError:
        resolved = None
    if resolved is None or not source.is_absolute():
        raise InvalidInput(f"{name}.source: {step.source!r} is not an absolute path that exists on this node")
    if not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise InvalidInput(
            f"{name}.source: {step.source!r} is not below a directory that this node allows",
            hint="setting node.upload_roots",
        )
    return resolved


def _files(source: Path, name: str) -> Iterator[tuple[Path, PurePosixPath]]:
    """Every regular file with its place below the target; links are refused, they could lead anywhere."""
    if source.is_file():
        yield source, PurePosixPath(".")
        return
    count = 0
    for directory, folders, names in os.walk(source):
        for entry in sorted([*folders, *names]):
            path = Path(directory) / entry
            if path.is_symlink():
                raise InvalidInput(f"{name}.source: {path} is a link")
            if not path.is_file():
                continue
            count += 1
            if count > _MAX_UPLOAD_FILES:
                raise InvalidInput(f"{name}.source: more than {_MAX_UPLOAD_FILES} files")
            yield path, PurePosixPath(path.relative_to(source).as_posix())


def _read(path: Path, name: str) -> tuple[bytes, bool]:
    try:
        return path.read_bytes(), os.access(path, os.X_OK)
    except OSError as error:
        raise InvalidInput(f"{name}.source: {path} cannot be read: {error.strerror}") from None
