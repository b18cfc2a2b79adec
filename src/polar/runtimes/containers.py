"""What all runtimes share that start their processes with a container engine on this machine.

The engine creates the container, and the node controls it from outside. Its writable directories are the
node's own, on a disk of limited size. Its network is a loopback on which the node listens, to forward
connections to the gateway and to what the task's allow list names. The node finds and kills its processes by
their pid namespace, because killing an engine's command line leaves what it started running.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from polar.config.settings import engine_environment
from polar.runtimes import supervisor
from polar.runtimes.allow_list import AllowList
from polar.runtimes.base import (
    Command,
    Host,
    ImageNotFound,
    Limit,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
)
from polar.runtimes.cgroups import Cgroup, find_hierarchies, node_name
from polar.runtimes.disk import FILES, can_mount_images
from polar.runtimes.local import ClosedOptions, LocalRuntime, LocalSandbox, make_in_thread, make_sandbox
from polar.runtimes.network import GATEWAY_PORT
from polar.runtimes.processes import SANDBOX_VARIABLE, ProcessIdentity, has_variable, inside, signal_inside
from polar.runtimes.supervision import GRACE_SECONDS, Launch, Supervised

CALL_SECONDS = 120.0
"""Time limit of one call to the engine; downloading an image has its own."""


_NOISE = re.compile(r"\s*(See '.*--help'|Run '.*--help'|Usage:|time=\S+ level=(warning|info))", re.IGNORECASE)
_NO_IMAGE = re.compile(
    r"no such image|unable to find image|image not known|pull access denied|manifest unknown"
    r"|manifest for .* not found|invalid reference format|short-name .* did not resolve"
    r"|repository .* not found|could not open image|failed to (resolve reference|retrieve path)"
    r"|unable to pull|not found: manifest",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"cannot connect|connection (refused|reset)|i/o timeout|tls handshake timeout|deadline exceeded"
    r"|temporarily unavailable|no space left|cannot allocate memory|too many open files|unexpected eof"
    r"|toomanyrequests|service unavailable",
    re.IGNORECASE,
)


def container_name(root: Path) -> str:
    """Return a unique name that says which node the container belongs to."""
    return f"{node_name(root.parent)}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"


def _mount(source: Path, target: PurePosixPath, *more: str) -> str:
    """Return a value of `--mount`, which engines parse as a line of comma-separated values."""
    line = io.StringIO()
    fields = ("type=bind", f"source={source}", f"destination={target}", *more)
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


WORKSPACE = PurePosixPath("/workspace")
"""The default workspace, which is a directory of the session's own; initially empty."""
COMMAND_VARIABLE = "POLAR_COMMAND"
"""Distinguishes the processes of commands that run side by side."""
ATTACH_SECONDS = 5.0
EXIT_REPORT_SECONDS = 10.0
"""Time limit for the engine to report a command whose processes have ended."""


class ContainerOptions(ClosedOptions):
    """Options of all container runtimes."""

    image: str = Field(min_length=1, max_length=4096)
    """The image, by its name in the engine."""
    root: str = "read_only"
    """Whether, and where, changes to the image's own files go; engines differ."""
    workspace: PurePosixPath = WORKSPACE
    """The workspace; any other path than the default is taken from the image and must be writable."""

    @property
    def binds_workspace(self) -> bool:
        return self.workspace == WORKSPACE

    @model_validator(mode="after")
    def _workspace_can_be_written(self) -> ContainerOptions:
        if not self.binds_workspace and self.root == "read_only":
            raise ValueError("a workspace in the image requires root: writable, tmpfs or overlay")
        return self

    @field_validator("image")
    @classmethod
    def _not_an_option(cls, image: str) -> str:
        if image.startswith("-") or any(character.isspace() or character == "\0" for character in image):
            raise ValueError("must be the name of an image")
        return image

    @field_validator("workspace")
    @classmethod
    def _absolute(cls, path: PurePosixPath) -> PurePosixPath:
        if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/"):
            raise ValueError("must be an absolute path other than /, without '..'")
        return path


class ContainerSandbox(LocalSandbox):
    options: ContainerOptions
    home = PurePosixPath("/home/agent")
    tmp = PurePosixPath("/tmp")
    gateway_url = f"http://127.0.0.1:{GATEWAY_PORT}"

    def __init__(
        self, spec: SandboxSpec, host: Host, options: ContainerOptions, runtime: type[ContainerRuntime]
    ) -> None:
        super().__init__(spec, host, options)
        self.workspace = options.workspace
        self.runtime = runtime
        self.name = container_name(self.root)
        self.holder: Supervised | None = None
        """The engine's command whose end ends the container, if there is one."""
        self._init: ProcessIdentity | None = None
        self._spared: set[int] = set()
        self._meters = Cgroup({})
        self._attached = AsyncExitStack()

    @abstractmethod
    def exec_argv(self, command: Command, env_file: Path) -> tuple[str, ...]:
        """Return the engine's command line for a command in the container."""

    @property
    def env(self) -> dict[str, str]:
        """The environment, without PATH, which the image sets."""
        return {name: value for name, value in super().env.items() if name != "PATH"}

    async def attach(self, pid: int, *, own_processes: int, is_marked: bool = True) -> None:
        """Take control of a container whose first process has our variable and `own_processes` children."""
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                # Until then it is still the engine's process, about to become the container's.
                while is_marked and not has_variable(pid, SANDBOX_VARIABLE, str(self.root)):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                init = ProcessIdentity.of(pid)
                while init and len(inside(init)) < own_processes:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            init = None
        if init is None:
            raise SandboxError(
                f"container {self.name}: its processes cannot be controlled from here",
                hint="run the engine on the node's machine, as the node's user, or run the node as root",
            )
        self._init = init
        self._spared = inside(init)
        self._meters = _meters(pid)
        self.owner = _adopt(self.root / FILES, pid)
        network = self.options.network
        listeners = await container_listeners(pid, network.ports)
        await self._attached.enter_async_context(network.serve(listeners, self.spec))

    @property
    def writable(self) -> dict[PurePosixPath, Path]:
        """The directories mounted into the container; a workspace in the image is not one of them."""
        given = super().writable
        if not self.options.binds_workspace:
            del given[self.workspace]
        return given

    def _locate(self, path: PurePosixPath) -> tuple[Path | str, tuple[str, ...]]:
        absolute = self.workspace / path
        is_in_image = not self.options.binds_workspace and absolute.is_relative_to(self.workspace)
        if not is_in_image or absolute == self.workspace or ".." in absolute.parts or "\0" in str(path):
            return super()._locate(path)
        if self._init is None:
            raise SandboxError(f"container {self.name} is not running")
        # Walked from the container's root, since a link on the way would lead to the host's files.
        return f"/proc/{self._init.pid}/root/.", absolute.parts[1:]

    @property
    def watched_limits(self) -> dict[Limit, int]:
        """Only the disk; the engine enforces the other limits."""
        return {limit: size for limit, size in super().watched_limits.items() if limit is Limit.DISK}

    @property
    def meters(self) -> Cgroup:
        return self._meters

    def limit_arguments(self) -> Iterator[str]:
        limits = self.options.limits
        if limits.memory is not None:
            yield from ("--memory", str(int(limits.memory)), "--memory-swap", str(int(limits.memory)))
        if limits.pids is not None:
            yield from ("--pids-limit", str(limits.pids))
        if limits.cpus is not None:
            yield from ("--cpus", f"{limits.cpus:g}")

    def mount_arguments(self) -> Iterator[str]:
        for target, source in self.writable.items():
            yield from ("--mount", _mount(source, target))
        for tool in self.spec.tools:
            yield from ("--mount", _mount(tool.source.absolute(), tool.target, "ro"))

    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        if not command.argv or any("\0" in text for text in command.argv):
            raise SandboxError("the command is empty or contains a null byte")
        token = secrets.token_hex(8)
        env = {**self.env, **self.options.network.env, **command.env, COMMAND_VARIABLE: token}
        return self.host_launch(
            *(command, stdout, stderr, self.exec_argv(command, self._env_file(env, token))),
            env=engine_environment(),
            cwd=Path("/"),
            is_wrapped=True,
            label=token,
            limits={},
            directories=(self.root / FILES,),
        )

    async def conclude(self, running: Supervised, timeout: float) -> tuple[int, bool]:
        """End the command's processes, after which the engine's command line ends by itself."""
        timed_out = False
        try:
            done, _ = await asyncio.wait({running.ended}, timeout=timeout)
            timed_out = not done
            if timed_out:
                await asyncio.to_thread(self._send_signal, self._other_labels(running), signal.SIGTERM)
                await asyncio.wait({running.ended}, timeout=GRACE_SECONDS)
        finally:
            await asyncio.shield(self._end_command(running))
        if self.holder is not None and self.holder.ended.done():
            raise SandboxUnavailable(f"container {self.name} ended while a command was running")
        return running.ended.result(), timed_out

    async def kill(self) -> None:
        await asyncio.to_thread(self._kill_all_but, set())
        await super().kill()

    async def clear_away(self) -> None:
        await self.kill()
        await self._attached.aclose()
        await self.runtime.remove(self.name)
        if self.holder is not None:
            await self.holder.end()
        await asyncio.to_thread(self._remove)

    def _other_labels(self, running: Supervised) -> set[str]:
        return {other.label for other in self._running if other is not running}

    async def _end_command(self, running: Supervised) -> None:
        """Kill every process that no other running command can have started."""
        others = self._other_labels(running)
        deadline = time.monotonic() + EXIT_REPORT_SECONDS
        await asyncio.to_thread(self._kill_all_but, others)
        while not running.ended.done() and time.monotonic() < deadline:
            # The engine may only now have started it.
            await asyncio.wait({running.ended}, timeout=0.1)
            await asyncio.to_thread(self._kill_all_but, others)
        if not running.ended.done():
            await running.end()
            await asyncio.to_thread(self._kill_all_but, others)
        (self.root / f"env-{running.label}").unlink(missing_ok=True)

    def _kill_all_but(self, labels: Iterable[str]) -> None:
        for _ in range(_KILL_ROUNDS):
            left = self._send_signal(labels, signal.SIGKILL)
            if not left:
                return
        raise SandboxError(f"container {self.name}: processes {sorted(left)} cannot be ended")

    def _send_signal(self, spared: Iterable[str], number: signal.Signals) -> set[int]:
        """Signal all processes except those of the commands with these labels; return their pids."""
        if self._init is None:
            return set()
        found = {
            pid
            for pid in inside(self._init) - self._spared
            if not any(has_variable(pid, COMMAND_VARIABLE, label) for label in spared)
        }
        if found:
            signal_inside(found, self._init, number)
        return found

    def _env_file(self, env: Mapping[str, str], token: str) -> Path:
        """Write the environment to a file, because every user can read the command line of a process."""
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name) or re.search(r"[\n\r\0]", value):
                raise SandboxError(f"container engines do not support the environment variable {name!r}")
        path = self.root / f"env-{token}"
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.writelines(f"{name}={value}\n" for name, value in env.items())
        return path


_KILL_ROUNDS = 2000


class ContainerRuntime(LocalRuntime):
    options: ContainerOptions
    supports_snapshots = True
    engine_name: ClassVar[str]
    install_hint: ClassVar[str]

    @property
    def reaches(self) -> AllowList:
        return self.options.network.allowed

    @classmethod
    def binary(cls) -> str:
        """Return the engine's program; raise SandboxError if it is not installed."""
        found = cls._find()
        if found is None:
            raise SandboxError(f"{cls.engine_name} is not installed", hint=cls.install_hint)
        return found

    @classmethod
    def _find(cls) -> str | None:
        return shutil.which(cls.engine_name, path=engine_environment().get("PATH"))

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        kept = dict.fromkeys(("cpu", "memory", "pids"), f"{cls.engine_name}'s control groups")
        return kept | {"disk": "ext4 image" if await asyncio.to_thread(can_mount_images) else "watched"}

    @classmethod
    async def call(cls, *arguments: str, timeout: float = CALL_SECONDS) -> str:
        binary = cls.binary()
        try:
            process = await asyncio.create_subprocess_exec(
                binary,
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=engine_environment(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{binary}: cannot run: {error.strerror}") from None
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            order = f"{cls.engine_name} {arguments[0]}"
            raise SandboxUnavailable(f"{order}: no answer within {timeout:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise cls.failure(arguments[0], stderr.decode(errors="replace"))
        return stdout.decode(errors="replace").strip()

    @classmethod
    def failure(cls, order: str, stderr: str) -> SandboxError:
        lines = [line.strip() for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
        message = f"{cls.engine_name} {order}: {' '.join(lines)[-600:] or 'failed without a message'}"
        if _NO_IMAGE.search(stderr):
            return ImageNotFound(message, hint="check the image's name and the `pull` option")
        if _PASSING.search(stderr):
            return SandboxUnavailable(message)
        return SandboxError(message)

    @classmethod
    @abstractmethod
    async def remove(cls, name: str) -> None:
        """Remove a container, if it exists."""

    @abstractmethod
    async def describe(self, spec: SandboxSpec, host: Host) -> ContainerSandbox:
        """Return the sandbox that `begin` will start."""

    @abstractmethod
    async def begin(self, sandbox: Any) -> None:
        """Create the container and attach to it."""

    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        sandbox = await self.describe(spec, host)

        def make() -> ContainerSandbox:
            make_sandbox(spec, host, self.options.limits, engine=self.engine_name)
            return sandbox

        await make_in_thread(make)
        try:
            await self.begin(sandbox)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    @classmethod
    async def reap(cls, host: Host) -> int:
        if cls._find() is not None:
            await cls.remove_containers(host)
        return await super().reap(host)

    @classmethod
    @abstractmethod
    async def remove_containers(cls, host: Host) -> None:
        """Remove the containers that an earlier process of this node left."""


async def container_listeners(pid: int, ports: Sequence[int]) -> list[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arguments = [str(theirs.fileno()), str(pid), *map(str, ports)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(supervisor.__file__),
            *arguments,
            pass_fds=[theirs.fileno()],
            env={},
            cwd="/",
        )
        theirs.close()
        await process.wait()
        message, descriptors, _, _ = socket.recv_fds(ours, 65536, len(ports))
    if not descriptors:
        reason = message.decode(errors="replace").removeprefix("failed ") or "the listener died"
        raise SandboxError(f"cannot connect the container to the gateway: {reason}")
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _meters(pid: int) -> Cgroup:
    try:
        own = Path(f"/proc/{pid}/cgroup").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return Cgroup({})
    return Cgroup({hierarchy.directory: hierarchy for hierarchy in find_hierarchies(own, mounts)})


def _adopt(files: Path, pid: int) -> int | None:
    """Give the writable directories to the container's user as the host sees it; None if it is the node's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (user,) = (int(line.split()[1]) for line in lines if line.startswith("Uid:"))
    if user == os.geteuid():
        return None
    for directory in files.iterdir():
        if directory.stat().st_uid != user:
            os.chown(directory, user, user)
    return user
