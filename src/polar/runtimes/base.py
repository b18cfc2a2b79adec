"""The sandbox contract: start, exec, upload, download, snapshot, stop, reap. It knows nothing of harnesses.

It does not say where a sandbox is: paths are as seen from inside, files travel as bytes, and the output of
commands goes to logs on the node. So a sandbox may be a directory of this machine or another machine.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from polar.errors import PolarError, Unavailable
from polar.runtimes.allow_list import AllowList

MIB = 1024 * 1024
GIB = 1024 * MIB


class SandboxError(PolarError):
    """A sandbox could not be started or used."""


class SandboxUnavailable(SandboxError, Unavailable):
    """The machine or its container engine failed for now: out of memory, no answer, killed from outside."""


class ImageNotFound(SandboxError):
    """The image of a sandbox does not exist, or may not be downloaded."""


class SandboxFull(SandboxError):
    """The sandbox has no room left for a file."""


class PathRefused(SandboxError):
    """A path inside is not a plain file: a link or something else is in its way."""


class Limit(StrEnum):
    """A resource that a sandbox can run out of."""

    CPU = "cpu"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"


class Limits(BaseModel):
    """Limits of one sandbox, for all its processes together; an unset one leaves the machine's own limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpus: float | None = Field(default=None, ge=0.01, le=4096)
    """CPU time in cores; if unset, an equal share with the other sandboxes."""
    memory: ByteSize | None = Field(default=ByteSize(8 * GIB), ge=16 * MIB)
    """Memory in bytes, or as text such as "4GiB", including what is written to /dev/shm."""
    pids: int | None = Field(default=2048, ge=8, le=4_194_304)
    """Number of processes and threads."""
    disk: ByteSize | None = Field(default=ByteSize(10 * GIB), ge=16 * MIB)
    """Space for everything the sandbox writes, in bytes or as text."""


@dataclass(frozen=True, slots=True)
class ToolDirectory:
    """A directory of programs on the node, such as an installed harness, that sandboxes use read-only.

    Its content never changes. A local runtime mounts it; a remote one copies it once.
    """

    source: Path
    target: PurePosixPath
    """Where it should appear inside; `Sandbox.tool_path` returns where it does."""


@dataclass(frozen=True, slots=True)
class Host:
    """The node that asks for sandboxes, and its machine, for runtimes that create them there."""

    directory: Path
    """An absolute directory, private to the node, that outlives its process, so that `reap` finds it."""
    disk_reserve: int = 0
    """Bytes of the host's disk that sandboxes must leave free."""
    image_roots: tuple[Path, ...] = ()
    """Directories that may contain images given as a file or directory of this machine."""

    @property
    def sandboxes(self) -> Path:
        """What local runtimes store about each running sandbox."""
        return self.directory / "sessions"

    @property
    def snapshots(self) -> Path:
        return self.directory / "snapshots"

    @property
    def logs(self) -> Path:
        """The output of commands, with one directory per sandbox, which the node removes."""
        return self.directory / "logs"

    def outputs(self, sandbox: str, log_name: str) -> tuple[Output, Output]:
        """Return the logs to which a runtime writes a command's stdout and stderr."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", log_name):
            raise SandboxError(f"{log_name!r} is not a valid name for a log")
        logs = self.logs / sandbox
        return Output(logs / f"{log_name}.stdout"), Output(logs / f"{log_name}.stderr")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made from."""

    name: str
    """A plain file name, unique on its node."""
    gateway_host: str
    gateway_port: int
    """The gateway's port as the node reaches it; 0 if there is no gateway."""
    tools: tuple[ToolDirectory, ...] = ()
    base: str | None = None
    """The snapshot whose files it begins with; without one, its directories are empty."""


@dataclass(frozen=True, slots=True)
class Command:
    """One program to run inside a sandbox."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's minimal environment (PATH, HOME, TMPDIR, LANG); nothing is inherited."""
    cwd: PurePosixPath | None = None
    """The working directory; the workspace if unset."""
    stdin: bytes = b""


_CUT = re.compile(rb"\n\[polar: output beyond \d+ bytes was discarded\]\n\Z")
"""Matches the line with which `runtimes/supervisor.py` ends truncated output."""


@dataclass(frozen=True, slots=True)
class Output:
    """One output stream of a command, written to a log on the node while the command runs."""

    log: Path

    def read(self) -> bytes:
        """Return all of it, which is at most what the runtime's options allow."""
        return self.log.read_bytes()

    def tail(self, size: int) -> bytes:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)

    def text(self, size: int | None = None) -> str:
        """Return all of it as text, or its last `size` bytes."""
        return (self.read() if size is None else self.tail(size)).decode(errors="replace")

    def lines(self) -> Iterator[bytes]:
        with self.log.open("rb") as file:
            yield from file

    @property
    def is_cut(self) -> bool:
        """Whether the output was truncated, which its last line says too."""
        return bool(_CUT.search(self.tail(128)))

    def remove(self) -> None:
        self.log.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ExecResult:
    exit_code: int
    """The exit code; a negative one is the signal that ended the command."""
    timed_out: bool
    stdout: Output
    stderr: Output
    limits_hit: frozenset[Limit] = frozenset()
    """The limits that the sandbox reached while the command ran."""
    killed_from_outside: bool = False
    """Whether something other than the command or its limits ended it: the machine ran out of memory, or
    someone killed it. Nothing inside a closed sandbox can cause this."""


class Sandbox(ABC):
    """A started sandbox. Paths are as seen from inside."""

    workspace: PurePosixPath
    home: PurePosixPath
    tmp: PurePosixPath
    gateway_url: str
    """The gateway's `http://host:port` as seen from inside, without a trailing slash. The runtime carries
    connections from there to the node."""

    @abstractmethod
    def tool_path(self, tool: ToolDirectory) -> PurePosixPath:
        """Return where a tool directory of the spec is inside."""

    @abstractmethod
    async def exec(self, command: Command, *, timeout: float, log_name: str) -> ExecResult:
        """Run a command until it ends or times out, then end everything it started.

        Cancelling the call ends the whole process tree before it returns. Output is written to `Host.logs` as
        `log_name.stdout` and `log_name.stderr` while the command runs.
        """

    @abstractmethod
    async def upload(self, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
        """Write a file, creating its parents, at an absolute path or one relative to the workspace."""

    @abstractmethod
    async def download(self, path: PurePosixPath, *, max_bytes: int = 64 * MIB) -> bytes:
        """Read a regular file without following links; raise SandboxError if it is missing."""

    @abstractmethod
    async def kill(self) -> None:
        """End every process of the sandbox, including daemons; files remain."""

    async def snapshot(self, name: str) -> None:
        """Store the files as they are now under a new name; no command may be running."""
        raise SandboxError("this runtime does not support snapshots")

    @abstractmethod
    async def stop(self) -> None:
        """Kill, then remove everything but logs and snapshots; a cancellation waits until this is done."""


class Runtime(ABC):
    """One way of creating sandboxes."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

    supports_snapshots: ClassVar[bool] = False
    """Whether its sandboxes support `snapshot` and `SandboxSpec.base`."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @classmethod
    @abstractmethod
    async def unavailable(cls) -> str | None:
        """Return why this runtime cannot be used from this machine and what to do, or None. Cached."""

    is_closed: ClassVar[bool] = True
    """Whether its sandboxes reach the gateway and `reaches`, and nothing else."""

    @property
    def reaches(self) -> AllowList:
        """What its sandboxes may reach besides the gateway, as the task asks."""
        return AllowList()

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        """Return how limits are enforced, such as "memory" → "cgroup v2"."""
        return {}

    @abstractmethod
    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        """Create a sandbox; if this fails or is cancelled, nothing is left behind."""

    async def discard(self, snapshot: str, host: Host) -> None:
        """Remove a snapshot that no sandbox uses."""
        raise SandboxError("this runtime does not support snapshots")

    @classmethod
    @abstractmethod
    async def reap(cls, host: Host) -> int:
        """Remove what an earlier process of this node left; return the number of sandboxes."""
