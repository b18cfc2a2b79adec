"""What sandboxes have in common whose processes and files are on this machine."""

from __future__ import annotations

import asyncio
import errno
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field

from polar.runtimes import cgroups, disk
from polar.runtimes.base import (
    MIB,
    Command,
    ExecResult,
    Host,
    Limit,
    Limits,
    PathRefused,
    Runtime,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    ToolDirectory,
)
from polar.runtimes.cgroups import Cgroup
from polar.runtimes.disk import FILES, IMAGE
from polar.runtimes.files import read_file, remove_tree, write_file
from polar.runtimes.network import Network
from polar.runtimes.processes import ProcessIdentity, end_strays
from polar.runtimes.supervision import GRACE_SECONDS, Launch, Supervised

DEFAULT_OUTPUT_LIMIT = 16 * 1024 * 1024
ENGINE = "engine"
"""The file below a sandbox's root that names its container engine, whose business it is to reap it."""

CONSTANT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/sh",
}


T = TypeVar("T")
S = TypeVar("S", bound=Sandbox)


class LocalOptions(BaseModel):
    """What all runtimes of this machine can be told."""

    model_config = {"extra": "forbid", "frozen": True}

    output_limit: int = Field(default=DEFAULT_OUTPUT_LIMIT, ge=1024, le=256 * MIB)
    """Bytes kept of each command's stdout and of its stderr."""
    limits: Limits = Limits()


class ClosedOptions(LocalOptions):
    """Of runtimes whose sandboxes have a network of their own."""

    network: Network = Network()


class LocalSandbox(Sandbox):
    """A sandbox made of directories below a root of its own and supervised processes."""

    def __init__(
        self,
        spec: SandboxSpec,
        host: Host,
        options: LocalOptions,
        group: Cgroup | None = None,
        owner: int | None = None,
    ) -> None:
        """`group` keeps the limits it can; the files belong to `owner`, or else to the node's user."""
        self.spec = spec
        self.host = host
        self.root = host.sandboxes / spec.name
        self.options = options
        self.group = group
        self.owner = owner
        self._running: set[Supervised] = set()

    @abstractmethod
    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        """How the host starts a command of this sandbox."""

    def host_launch(
        self, command: Command, stdout: Path, stderr: Path, argv: tuple[str, ...], **own: Any
    ) -> Launch:
        """A launch of `argv` as every command of this machine's sandboxes is launched, but for `own`."""
        common: dict[str, Any] = {
            "stdin": command.stdin,
            "stdout": stdout,
            "stderr": stderr,
            "output_limit": self.options.output_limit,
            "limits": self.resource_limits,
            "groups": self.group.entrances if self.group else (),
            "watched": self.watched,
            "directories": tuple(self.writable.values()),
        }
        return Launch(argv, **{**common, **own})

    def tool_path(self, tool: ToolDirectory) -> PurePosixPath:
        return tool.target

    def attend(self, running: Supervised) -> AbstractAsyncContextManager[None]:
        """What the node does for a command while it runs."""
        return nullcontext()

    @property
    def env(self) -> dict[str, str]:
        """The environment every command begins with."""
        return {**CONSTANT_ENV, "HOME": str(self.home), "TMPDIR": str(self.tmp)}

    @property
    def writable(self) -> dict[PurePosixPath, Path]:
        """Directories inside → where they are on the host."""
        files = self.root / FILES
        return {self.workspace: files / "workspace", self.home: files / "home", self.tmp: files / "tmp"}

    @property
    def resource_limits(self) -> dict[str, int]:
        """What the kernel keeps each process to."""
        limits = {"core": 0, "nofile": 65_536}
        if self.options.limits.disk is not None:
            limits["fsize"] = int(self.options.limits.disk)
        return limits

    @property
    def watched(self) -> dict[Limit, int]:
        """The limits that nothing but looking keeps."""
        limits = self.options.limits
        enforced = self.group.enforces if self.group else frozenset()
        wanted = {Limit.MEMORY: limits.memory, Limit.PIDS: limits.pids, Limit.DISK: limits.disk}
        if (self.root / IMAGE).exists():
            del wanted[Limit.DISK]
        return {limit: int(value) for limit, value in wanted.items() if value and limit not in enforced}

    async def exec(self, command: Command, *, timeout: float, log_name: str) -> ExecResult:
        stdout, stderr = self.host.outputs(self.spec.name, log_name)
        before, kills_before = self.meters.refusals(), self.meters.memory_kills()
        running = start_supervised(self.launch(command, stdout.log, stderr.log), self.root)
        self._running.add(running)
        try:
            async with self.attend(running):
                exit_code, timed_out = await self.conclude(running, timeout)
        except SandboxError:
            await asyncio.to_thread(self._end_strays)
            raise
        finally:
            await running.end()
            self._running.discard(running)
        hit = {limit for limit, count in self.meters.refusals().items() if count > before.get(limit, 0)}
        hit |= {Limit.DISK} if disk.is_full(self.root) else set()
        hit |= {running.exceeded} if running.exceeded else set()
        # The machine had no memory for a sandbox that kept to its own limit.
        is_short = self.options.limits.memory is not None and self.meters.memory_kills() > kills_before
        is_killed = is_short or self.is_killed_from_outside(exit_code)
        is_killed = is_killed and not timed_out and Limit.MEMORY not in hit and running.exceeded is None
        return ExecResult(self.exit_code(exit_code), timed_out, stdout, stderr, frozenset(hit), is_killed)

    @property
    def meters(self) -> Cgroup:
        """Where the kernel counts what it refused the sandbox."""
        return self.group or Cgroup({})

    def is_killed_from_outside(self, reported: int) -> bool:
        """Whether an end was none that the command itself, or a process beside it, could have brought about.

        What is reported is the end of what holds the sandbox: a signal inside shows as an exit code.
        """
        return reported < 0

    def _end_strays(self) -> None:
        end_strays(self.root)
        if self.group:
            self.group.kill()

    async def conclude(self, running: Supervised, timeout: float) -> tuple[int, bool]:
        """See a command to its end: its exit code, and whether the timeout ended it."""
        return await running.run(timeout)

    def exit_code(self, reported: int) -> int:
        """The command's own: what holds a sandbox passes a signal on as 128 + its number, as shells do."""
        return 128 - reported if 128 < reported <= 128 + 64 else reported

    async def upload(self, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
        base, parts = self._locate(path)
        mode = 0o755 if executable else 0o644
        await asyncio.to_thread(write_file, base, parts, data, mode, self.owner)

    async def download(self, path: PurePosixPath, *, max_bytes: int = 64 * MIB) -> bytes:
        base, parts = self._locate(path)
        return await asyncio.to_thread(read_file, base, parts, max_bytes)

    async def kill(self) -> None:
        await asyncio.gather(*(running.end() for running in set(self._running)))
        if self.group:
            await asyncio.to_thread(self.group.kill)

    async def snapshot(self, name: str) -> None:
        await asyncio.to_thread(disk.keep, self.root, self.host.snapshots / name)

    async def stop(self) -> None:
        await to_its_end(asyncio.create_task(self.clear_away()))

    async def clear_away(self) -> None:
        """What `stop` does, whether or not it is cancelled."""
        await self.kill()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        try:
            if self.group:
                self.group.remove()
            if self.root.is_dir():
                disk.remove_disk(self.root)
                remove_tree(self.root)
        except OSError as error:
            raise SandboxError(f"{self.root}: could not be removed: {error}") from None

    def _locate(self, path: PurePosixPath) -> tuple[Path | str, tuple[str, ...]]:
        """The host directory that holds a path inside, and the way from there."""
        absolute = self.workspace / path
        if ".." in absolute.parts or "\0" in str(path):
            raise PathRefused(f"{path}: must not contain '..'")
        for inside, base in self.writable.items():
            if absolute.is_relative_to(inside) and absolute != inside:
                return base, absolute.relative_to(inside).parts
        names = ", ".join(map(str, self.writable))
        raise PathRefused(f"{path}: not below a writable directory of the sandbox", hint=f"these are {names}")


async def to_its_end(working: asyncio.Task[T]) -> T:
    """Do what must not be left half done: a cancellation takes effect only when it is finished."""
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


async def started_whole(make: Callable[[], S]) -> S:
    """A sandbox made in a thread; if the call is cancelled meanwhile, the sandbox is stopped again."""
    making = asyncio.create_task(asyncio.to_thread(make))
    try:
        return await to_its_end(making)
    except asyncio.CancelledError:
        if making.exception() is None:
            await making.result().stop()
        raise


class LocalRuntime(Runtime):
    """A runtime whose sandboxes are on the node's machine."""

    engine_name: ClassVar[str | None] = None
    """The container engine whose sandboxes these are; None: this machine's own."""

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        return await asyncio.to_thread(enforcement)

    async def discard(self, snapshot: str, host: Host) -> None:
        await asyncio.to_thread(remove_tree, host.snapshots / snapshot)

    @classmethod
    async def reap(cls, host: Host) -> int:
        return await asyncio.to_thread(reap_sandboxes, host, cls.engine_name)


def start_supervised(launch: Launch, root: Path) -> Supervised:
    try:
        return Supervised(launch, root / "pids")
    except OSError as error:
        raise SandboxError(f"a command could not be started in {root}: {error}") from None
    except ValueError as error:
        raise SandboxError(f"the command cannot be run as it is: {error}") from None


def _make_root(spec: SandboxSpec, host: Host) -> Path:
    root = host.sandboxes / spec.name
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # First what a sandbox is reaped by, so that one half made is not left behind either.
        (root / "pids").mkdir()
        (host.logs / spec.name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise SandboxError(f"{root}: already holds a sandbox", hint="stop or reap it first") from None
    except OSError as error:
        raise _no_sandbox(root, error) from None
    return root


def make_sandbox(
    spec: SandboxSpec, host: Host, limits: Limits, owner: int | None = None, engine: str | None = None
) -> Cgroup | None:
    """Root, disk and, unless an engine keeps the limits, group of a new sandbox; all or nothing."""
    root = _make_root(spec, host)
    try:
        if engine is not None:
            (root / ENGINE).write_text(engine)
        disk.make_disk(spec, host, limits.disk, owner)
        return Cgroup.make(root, limits) if engine is None and cgroups.usable_hierarchies() else None
    except BaseException as error:
        reap_sandbox(root)
        if isinstance(error, OSError):
            raise _no_sandbox(root, error) from None
        raise


def _no_sandbox(root: Path, error: OSError) -> SandboxError:
    passing = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
    kind = SandboxUnavailable if passing else SandboxError
    return kind(f"no sandbox can be made in {root}: {error.strerror}")


def enforcement() -> dict[str, str]:
    """How the limits of sandboxes are kept on this machine."""
    kept = dict.fromkeys((Limit.MEMORY, Limit.PIDS), "watched")
    kept[Limit.CPU] = "not limited: control groups are not writable"
    for hierarchy in cgroups.usable_hierarchies():
        kept |= {
            limit: hierarchy.name
            for limit, controller in cgroups.CONTROLLERS.items()
            if controller in hierarchy.controllers
        }
    kept[Limit.DISK] = "ext4 image" if disk.can_mount_images() else "watched"
    return {str(limit): kept[limit] for limit in Limit} | {
        "snapshots": "overlay" if disk.can_mount_overlays() else "copied"
    }


def reap_sandbox(root: Path) -> None:
    """End the processes of one sandbox of a previous life and remove all that is left of it."""
    for pid_file in (root / "pids").glob("*.json"):
        if leftover := ProcessIdentity.load(pid_file):
            leftover.end(grace=GRACE_SECONDS + 5.0)
    for group in cgroups.recorded_groups(root):
        cgroups.remove_group(group)
    end_strays(root)
    disk.remove_disk(root)
    remove_tree(root)


def reap_sandboxes(host: Host, engine: str | None = None) -> int:
    """Reap every sandbox of an engine (None: of this machine itself), and all snapshots; how many."""
    reaped = 0
    for root in host.sandboxes.iterdir() if host.sandboxes.is_dir() else ():
        if root.is_symlink() or not (root / "pids").is_dir():
            continue
        if ((root / ENGINE).read_text() if (root / ENGINE).is_file() else None) == engine:
            reap_sandbox(root)
            reaped += 1
    if engine is None:
        cgroups.reap_groups(host.sandboxes)
    remove_tree(host.snapshots)
    return reaped
