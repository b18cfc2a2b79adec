"""The sandbox contract: start, exec, upload, download, snapshot, stop, reap. Knows nothing of harnesses.

Nothing in it says where a sandbox is. Paths are as seen from inside, files travel as bytes, and the output of
commands flows into logs on the node, so a sandbox may be a directory of this machine or a machine elsewhere.
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
    """The machine or its container engine could not do it now: no memory, no answer, killed from outside."""


class ImageNotFound(SandboxError):
    """The image a sandbox is to be made of does not exist, or may not be fetched."""


class SandboxFull(SandboxError):
    """The sandbox has no room left for a file."""


class PathRefused(SandboxError):
    """A path inside cannot be used as a plain file: a link, or something else, stands in its way."""


class Limit(StrEnum):
    """One thing that a sandbox can run out of."""

    CPU = "cpu"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"


class Limits(BaseModel):
    """Of one sandbox, all its processes together; None: as much as the machine has."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpus: float | None = Field(default=None, ge=0.01, le=4096)
    """How many cores' worth of time; None: an equal share with the other sandboxes."""
    memory: ByteSize | None = Field(default=ByteSize(8 * GIB), ge=16 * MIB)
    """Bytes, or a text such as "4GiB"; what is written to /dev/shm counts too."""
    pids: int | None = Field(default=2048, ge=8, le=4_194_304)
    """Processes and threads."""
    disk: ByteSize | None = Field(default=ByteSize(10 * GIB), ge=16 * MIB)
    """Everything the sandbox may write, in bytes or as a text."""


@dataclass(frozen=True, slots=True)
class ToolDirectory:
    """A directory of programs on the node that sandboxes use read-only, such as an installed harness.

    Its content never changes. A runtime of this machine mounts it; one elsewhere sends it there once.
    """

    source: Path
    target: PurePosixPath
    """Where it is wanted inside; `Sandbox.tool_path` says where it is."""


@dataclass(frozen=True, slots=True)
class Host:
    """The node that asks for sandboxes, and its own machine for runtimes that make them there."""

    directory: Path
    """Absolute, private to the node; what is in it outlives the node's process, so that `reap` finds it."""
    disk_reserve: int = 0
    """Bytes of the host's disk that sandboxes must leave free."""
    image_roots: tuple[Path, ...] = ()
    """Directories below which an image may lie that is a file or directory of this machine."""

    @property
    def sandboxes(self) -> Path:
        """What runtimes of this machine keep of each sandbox while it lives."""
        return self.directory / "sessions"

    @property
    def snapshots(self) -> Path:
        return self.directory / "snapshots"

    @property
    def logs(self) -> Path:
        """The output of commands: one directory for each sandbox, by its name, which the node removes."""
        return self.directory / "logs"

    def outputs(self, sandbox: str, log_name: str) -> tuple[Output, Output]:
        """Where a runtime writes what a command prints, stdout and stderr."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", log_name):
            raise SandboxError(f"{log_name!r} cannot be the name of a log")
        logs = self.logs / sandbox
        return Output(logs / f"{log_name}.stdout"), Output(logs / f"{log_name}.stderr")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of."""

    name: str
    """Unique on its node, and a plain file name."""
    gateway_host: str
    gateway_port: int
    """Where the node reaches the gateway; the only address a closed sandbox reaches. Port 0: none."""
    tools: tuple[ToolDirectory, ...] = ()
    base: str | None = None
    """The snapshot whose files it begins with; None: empty directories."""


@dataclass(frozen=True, slots=True)
class Command:
    """One program to run inside a sandbox."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's own minimal environment (PATH, HOME, TMPDIR, LANG); nothing is inherited."""
    cwd: PurePosixPath | None = None
    """None: the workspace."""
    stdin: bytes = b""


_CUT = re.compile(rb"\n\[polar: output beyond \d+ bytes was discarded\]\n\Z")
"""What `runtimes/supervisor.py` ends output with that it cut."""


@dataclass(frozen=True, slots=True)
class Output:
    """One output stream of a command, in a log on the node.

    The runtime writes it while the command runs, so no output waits in memory, however long it is.
    """

    log: Path

    def read(self) -> bytes:
        """All of it, which is at most what the runtime's options allow."""
        return self.log.read_bytes()

    def tail(self, size: int) -> bytes:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)

    def text(self, size: int | None = None) -> str:
        """All of it, or its last `size` bytes."""
        return (self.read() if size is None else self.tail(size)).decode(errors="replace")

    def lines(self) -> Iterator[bytes]:
        with self.log.open("rb") as file:
            yield from file

    @property
    def is_cut(self) -> bool:
        """Whether the command wrote more than is kept; a last line says so too."""
        return bool(_CUT.search(self.tail(128)))

    def remove(self) -> None:
        self.log.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ExecResult:
    exit_code: int
    """Negative: ended by that signal."""
    timed_out: bool
    stdout: Output
    stderr: Output
    limits_hit: frozenset[Limit] = frozenset()
    """What the sandbox ran out of while the command ran."""
    killed_from_outside: bool = False
    """Something that is neither the command nor one of its limits ended it, or processes of its sandbox: the
    machine ran out of memory, or somebody killed it. Nothing inside a closed sandbox can bring that about."""


class Sandbox(ABC):
    """A started sandbox. Paths are as seen from inside."""

    workspace: PurePosixPath
    home: PurePosixPath
    tmp: PurePosixPath
    gateway_url: str
    """`http://host:port` of the gateway as seen from inside, without a trailing slash. How connections get
    from there to the node is the runtime's business."""

    @abstractmethod
    def tool_path(self, tool: ToolDirectory) -> PurePosixPath:
        """Where a tool directory of the spec is found inside."""

    @abstractmethod
    async def exec(self, command: Command, *, timeout: float, log_name: str) -> ExecResult:
        """Run a command to its end or to the timeout, then end everything it started.

        Cancelling the call ends the command's whole process tree before it returns. Its output is written to
        `Host.logs` as `log_name.stdout` and `log_name.stderr` while it runs.
        """

    @abstractmethod
    async def upload(self, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
        """Write a file (parents made) at an absolute path, or one relative to the workspace."""

    @abstractmethod
    async def download(self, path: PurePosixPath, *, max_bytes: int = 64 * MIB) -> bytes:
        """Read a regular file; never follows a link out of the sandbox. SandboxError if absent."""

    @abstractmethod
    async def kill(self) -> None:
        """End every process of the sandbox, daemons included; files stay."""

    async def snapshot(self, name: str) -> None:
        """Keep the files as they are now under a new name; no command may be running."""
        raise SandboxError("this runtime keeps no snapshots")

    @abstractmethod
    async def stop(self) -> None:
        """`kill`, then remove everything but logs and snapshots. A cancellation waits for its end."""


class Runtime(ABC):
    """One way of making sandboxes."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

    supports_snapshots: ClassVar[bool] = False
    """Whether its sandboxes have `snapshot`, and `SandboxSpec.base` may be set."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @classmethod
    @abstractmethod
    async def unavailable(cls) -> str | None:
        """Why this runtime cannot be used from this machine (with what to do), or None if it can. Cached."""

    @property
    def reaches(self) -> AllowList:
        """What its sandboxes reach besides the gateway because the task asks for it."""
        return AllowList()

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        """How sandboxes are kept within bounds: "memory" → "cgroup v2" and so on."""
        return {}

    @abstractmethod
    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        """Make a sandbox; one that is cancelled or fails leaves nothing behind."""

    async def discard(self, snapshot: str, host: Host) -> None:
        """Remove a snapshot that no sandbox uses."""
        raise SandboxError("this runtime keeps no snapshots")

    @classmethod
    @abstractmethod
    async def reap(cls, host: Host) -> int:
        """End what a previous life of this node left behind, snapshots included; how many sandboxes."""
