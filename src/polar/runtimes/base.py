"""A sandbox for one session: start, exec, upload, download, stop, reap. Knows nothing of harnesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import BaseModel

from polar.errors import PolarError, Unavailable
from polar.runtimes.allow_list import AllowList
from polar.runtimes.limits import Limit


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


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory shown read-only inside the sandbox."""

    source: Path
    target: PurePosixPath
    """Runtimes without a file system of their own (process) use `source` as it is."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a prepared sandbox, from which others of the same runtime begin."""

    runtime: str
    """The registered name of the runtime that can use it."""
    directory: Path
    """Host directory that holds it; never written to again."""
    owner: int | None = None
    """The host's user id that its files belong to, where that is not the node's."""
    image: str | None = None
    """What the container engine calls the rest of it."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a session's sandbox is made of."""

    session_id: str
    root: Path
    """Private host directory of this session; the runtime owns everything below it."""
    gateway_host: str
    gateway_port: int
    """Where the gateway listens on the host; the only address a closed sandbox reaches."""
    mounts: tuple[Mount, ...] = ()
    base: Snapshot | None = None
    """What is in the writable directories from the start; None: nothing."""
    disk_reserve: int = 0
    """Bytes of the host's disk that the sandbox must leave free."""
    image_roots: tuple[Path, ...] = ()
    """Host directories below which an image may lie that is a file or directory of this machine."""


@dataclass(frozen=True, slots=True)
class Command:
    """One program to run inside a sandbox."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's own minimal environment (PATH, HOME, TMPDIR, LANG); nothing is inherited."""
    cwd: PurePosixPath | None = None
    """None: the workspace."""
    stdin: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecResult:
    exit_code: int
    """Negative: ended by that signal."""
    timed_out: bool
    stdout: Path
    """Complete output on the host, cut at the runtime's limit (a last line says so)."""
    stderr: Path
    limits_hit: frozenset[Limit] = frozenset()
    """What the sandbox ran out of while the command ran."""
    killed_from_outside: bool = False
    """Something that is neither the command nor one of its limits ended it, or processes of its sandbox: the
    machine ran out of memory, or somebody killed it. Nothing inside a closed sandbox can bring that about."""


class Sandbox(ABC):
    """A started sandbox. Paths are as seen from inside unless they say host."""

    workspace: PurePosixPath
    home: PurePosixPath
    tmp: PurePosixPath
    gateway_url: str
    """`http://host:port` of the gateway as seen from inside, without a trailing slash."""

    @abstractmethod
    def path_inside(self, mount: Mount) -> PurePosixPath:
        """Where a mount of the spec is found inside."""

    @abstractmethod
    async def exec(self, command: Command, *, timeout: float, log_name: str) -> ExecResult:
        """Run a command to its end or to the timeout, then end everything it started.

        Cancelling the call ends the command's whole process tree before it returns.
        """

    @abstractmethod
    async def upload(self, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
        """Write a file (parents made) at an absolute path, or one relative to the workspace."""

    @abstractmethod
    async def download(self, path: PurePosixPath, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        """Read a regular file; never follows a link out of the sandbox. SandboxError if absent."""

    @abstractmethod
    async def kill(self) -> None:
        """End every process of the sandbox, daemons included; files stay."""

    async def snapshot(self, into: Path) -> Snapshot:
        """Keep the files as they are now in a new directory `into`; no command may be running."""
        raise SandboxError("this runtime keeps no snapshots")

    @abstractmethod
    async def stop(self) -> None:
        """`kill`, then remove mounts and the writable files below the spec's root, logs kept."""


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
        """Why this runtime cannot work on this machine (with what to do), or None if it can. Cached."""

    @property
    def reaches(self) -> AllowList:
        """What its sandboxes reach besides the gateway because the task asks for it."""
        return AllowList()

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        """How this machine keeps sandboxes within bounds: "memory" → "cgroup v2" and so on."""
        return {}

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Make the sandbox of a session."""

    async def discard(self, snapshot: Snapshot) -> None:
        """Remove a snapshot that no sandbox uses any more."""
        raise SandboxError("this runtime keeps no snapshots")

    @classmethod
    @abstractmethod
    async def reap(cls, sessions_root: Path) -> int:
        """End what a previous life of this node left behind below `sessions_root`; returns how many."""
