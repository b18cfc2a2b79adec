"""What all sandboxes share whose processes and files are on this machine."""

from __future__ import annotations

import asyncio
import errno
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, TypeVar

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
"""The file below a sandbox's root that names its container engine, which is responsible for reaping it."""

CONSTANT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/sh",
}


EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
EnvironmentValue = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00\n]*$")]

T = TypeVar("T")
S = TypeVar("S", bound=Sandbox)


class LocalOptions(BaseModel):
    """Options of all runtimes of this machine."""

    model_config = {"extra": "forbid", "frozen": True}

    output_limit: int = Field(default=DEFAULT_OUTPUT_LIMIT, ge=1024, le=256 * MIB)
    """Maximum bytes stored of each command's stdout and stderr."""
    limits: Limits = Limits()
    environment: dict[EnvironmentName, EnvironmentValue] = Field(default_factory=dict, max_length=100)
    """Variables that every command begins with, such as TZ or PYTHONHASHSEED, which are UTC and 0 if unset; a
    harness's own come after."""


class ClosedOptions(LocalOptions):
    """Options of runtimes whose sandboxes have their own network."""

    network: Network = Network()


class LocalSandbox(Sandbox):
    """A sandbox of directories below its own root and supervised processes."""

    def __init__(
        self,
        spec: SandboxSpec,
        host: Host,
        options: LocalOptions,
        group: Cgroup | None = None,
        owner: int | None = None,
    ) -> None:
        """Enforce the limits that `group` can; the files belong to `owner`, or else to the node's user."""
        self.spec = spec
        self.host = host
        self.root = host.sandboxes / spec.name
        self.options = options
        self.group = group
        self.owner = owner
        self._running: set[Supervised] = set()

    @abstractmethod
    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        """Return how the host starts a command of this sandbox."""

    def host_launch(
        self, command: Command, stdout: Path, stderr: Path, argv: tuple[str, ...], **own: Any
    ) -> Launch:
        """Return a launch of `argv` with the defaults of all local sandboxes, except for `own`."""
        common: dict[str, Any] = {
            "stdin": command.stdin,
            "stdout": stdout,
            "stderr": stderr,
            "output_limit": self.options.output_limit,
            "limits": self.resource_limits,
            "groups": self.group.join_files if self.group else (),
            "watched": self.watched_limits,
            "directories": tuple(self.writable.values()),
        }
        return Launch(argv, **{**common, **own})

    def tool_path(self, tool: ToolDirectory) -> PurePosixPath:
        return tool.target

    def attend(self, running: Supervised) -> AbstractAsyncContextManager[None]:
        """Return a context for what the node does while a command runs."""
        return nullcontext()

    @property
    def env(self) -> dict[str, str]:
        """The environment every command begins with."""
        return {**CONSTANT_ENV, "HOME": str(self.home), "TMPDIR": str(self.tmp), **self.options.environment}

    @property
    def writable(self) -> dict[PurePosixPath, Path]:
        """Directories inside, with their paths on the host."""
        files = self.root / FILES
        return {self.workspace: files / "workspace", self.home: files / "home", self.tmp: files / "tmp"}

    @property
    def resource_limits(self) -> dict[str, int]:
        limits = {"core": 0, "nofile": 65_536}
        if self.options.limits.disk is not None:
            limits["fsize"] = int(self.options.limits.disk)
        return limits

    @property
    def watched_limits(self) -> dict[Limit, int]:
        """The limits that are only enforced by polling."""
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
        # The machine ran out of memory although the sandbox stayed below its own limit.
        is_short = self.options.limits.memory is not None and self.meters.memory_kills() > kills_before
        is_killed = is_short or self.is_killed_from_outside(exit_code)
        is_killed = is_killed and not timed_out and Limit.MEMORY not in hit and running.exceeded is None
        return ExecResult(self.exit_code(exit_code), timed_out, stdout, stderr, frozenset(hit), is_killed)

    @property
    def meters(self) -> Cgroup:
        """Where the kernel counts what it refused the sandbox."""
        return self.group or Cgroup({})

    def is_killed_from_outside(self, reported: int) -> bool:
        """Whether nothing inside can have caused this end of the sandbox's own process."""
        return reported < 0

    def _end_strays(self) -> None:
        end_strays(self.root)
        if self.group:
            self.group.kill()

    async def conclude(self, running: Supervised, timeout: float) -> tuple[int, bool]:
        """Wait for a command; return its exit code and whether it timed out."""
        return await running.run(timeout)

    def exit_code(self, reported: int) -> int:
        """Return the command's own exit code: the sandbox's process reports a signal as 128 + its number."""
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
        await asyncio.to_thread(disk.copy_files, self.root, self.host.snapshots / name)

    async def stop(self) -> None:
        await finish_despite_cancellation(asyncio.create_task(self.clear_away()))

    async def clear_away(self) -> None:
        """Kill and remove everything, even if `stop` is cancelled."""
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
            raise SandboxError(f"{self.root}: cannot be removed: {error}") from None

    def _locate(self, path: PurePosixPath) -> tuple[Path | str, tuple[str, ...]]:
        """Return the host directory that contains a path inside, and the rest of the path."""
        absolute = self.workspace / path
        if ".." in absolute.parts or "\0" in str(path):
            raise PathRefused(f"{path}: must not contain '..'")
        for inside, base in self.writable.items():
            if absolute.is_relative_to(inside) and absolute != inside:
                return base, absolute.relative_to(inside).parts
        names = ", ".join(map(str, self.writable))
        raise PathRefused(
            f"{path}: not below a writable directory of the sandbox", hint=f"use one of {names}"
        )


async def finish_despite_cancellation(working: asyncio.Task[T]) -> T:
    """Wait for a task even if cancelled; the cancellation takes effect once it is done."""
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


async def make_in_thread(make: Callable[[], S]) -> S:
    """Make a sandbox in a thread; if the call is cancelled meanwhile, stop the sandbox again."""
    making = asyncio.create_task(asyncio.to_thread(make))
    try:
        return await finish_despite_cancellation(making)
    except asyncio.CancelledError:
        if making.exception() is None:
            await making.result().stop()
        raise


class LocalRuntime(Runtime):
    engine_name: ClassVar[str | None] = None
    """The container engine of these sandboxes; None if they have none."""

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
        raise SandboxError(f"cannot start a command in {root}: {error}") from None
    except ValueError as error:
        raise SandboxError(f"invalid command: {error}") from None


def _make_root(spec: SandboxSpec, host: Host) -> Path:
    root = host.sandboxes / spec.name
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written first, so that even a half-made sandbox can be reaped.
        (root / "pids").mkdir()
        (host.logs / spec.name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise SandboxError(f"{root}: already contains a sandbox", hint="stop or reap it first") from None
    except OSError as error:
        raise _creation_error(root, error) from None
    return root


def make_sandbox(
    spec: SandboxSpec, host: Host, limits: Limits, owner: int | None = None, engine: str | None = None
) -> Cgroup | None:
    """Create root, disk and, unless an engine enforces the limits, group of a sandbox; all or nothing."""
    root = _make_root(spec, host)
    try:
        if engine is not None:
            (root / ENGINE).write_text(engine)
        disk.make_disk(spec, host, limits.disk, owner)
        return Cgroup.make(root, limits) if engine is None and cgroups.usable_hierarchies() else None
    except BaseException as error:
        reap_sandbox(root)
        if isinstance(error, OSError):
            raise _creation_error(root, error) from None
        raise


def _creation_error(root: Path, error: OSError) -> SandboxError:
    passing = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
    kind = SandboxUnavailable if passing else SandboxError
    return kind(f"cannot create a sandbox in {root}: {error.strerror}")


def enforcement() -> dict[str, str]:
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
    """End the processes of a sandbox that an earlier process left, and remove it."""
    for pid_file in (root / "pids").glob("*.json"):
        if leftover := ProcessIdentity.load(pid_file):
            leftover.end(grace=GRACE_SECONDS + 5.0)
    for group in cgroups.recorded_groups(root):
        cgroups.remove_group(group)
    end_strays(root)
    disk.remove_disk(root)
    remove_tree(root)


def reap_sandboxes(host: Host, engine: str | None = None) -> int:
    """Reap every sandbox of an engine (None: of no engine) and all snapshots; return how many."""
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
