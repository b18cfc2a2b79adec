"""What sandboxes have in common whose processes and files are on this machine."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path, PurePosixPath

from polar.runtimes.base import Command, ExecResult, PathRefused, Sandbox, SandboxError, SandboxSpec
from polar.runtimes.files import read_file, remove_tree, write_file
from polar.runtimes.processes import ProcessIdentity, end_strays
from polar.runtimes.supervision import GRACE_SECONDS, Launch, Supervised

DEFAULT_OUTPUT_LIMIT = 16 * 1024 * 1024
WRITABLE = ("workspace", "home", "tmp")
"""The directories below a sandbox's root that its processes may write to."""

LIMITS = {"core": 0, "nofile": 65_536, "nproc": 16_384, "fsize": 64 * 1024**3}
"""Generous for honest work, an end for runaways; memory is the business of cgroups."""

CONSTANT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/sh",
}


class LocalSandbox(Sandbox):
    """A sandbox made of directories below the spec's root and supervised processes."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._running: set[Supervised] = set()

    @abstractmethod
    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        """How the host starts a command of this sandbox."""

    def attend(self, running: Supervised) -> AbstractAsyncContextManager[None]:
        """What the node does for a command while it runs."""
        return nullcontext()

    @property
    def env(self) -> dict[str, str]:
        """The environment every command begins with."""
        return {**CONSTANT_ENV, "HOME": str(self.home), "TMPDIR": str(self.tmp)}

    @property
    def writable(self) -> Mapping[PurePosixPath, Path]:
        """Directories inside → where they are on the host."""
        root = self.spec.root
        return {self.workspace: root / "workspace", self.home: root / "home", self.tmp: root / "tmp"}

    async def exec(self, command: Command, *, timeout: float, log_name: str) -> ExecResult:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", log_name):
            raise SandboxError(f"{log_name!r} cannot be the name of a log")
        logs = self.spec.root / "logs"
        stdout, stderr = logs / f"{log_name}.stdout", logs / f"{log_name}.stderr"
        running = _start(self.launch(command, stdout, stderr), self.spec.root)
        self._running.add(running)
        try:
            async with self.attend(running):
                exit_code, timed_out = await running.run(timeout)
        except SandboxError:
            await asyncio.to_thread(end_strays, self.spec.root)
            raise
        finally:
            if not running.ended.done():
                await running.end()
            self._running.discard(running)
        return ExecResult(self.exit_code(exit_code), timed_out, stdout, stderr)

    def exit_code(self, reported: int) -> int:
        """The command's own exit code."""
        return reported

    async def upload(self, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
        base, parts = self._locate(path)
        await asyncio.to_thread(write_file, base, parts, data, 0o755 if executable else 0o644)

    async def download(self, path: PurePosixPath, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        base, parts = self._locate(path)
        return await asyncio.to_thread(read_file, base, parts, max_bytes)

    async def kill(self) -> None:
        await asyncio.gather(*(running.end() for running in set(self._running)))

    async def stop(self) -> None:
        await self.kill()
        await asyncio.to_thread(self._remove_all_but_logs)

    def _remove_all_but_logs(self) -> None:
        root = self.spec.root
        try:
            for path in list(root.iterdir()) if root.is_dir() else ():
                if path.name != "logs":
                    remove_tree(path)
        except OSError as error:
            raise SandboxError(f"{root}: could not be removed: {error}") from None

    def _locate(self, path: PurePosixPath) -> tuple[Path, tuple[str, ...]]:
        """The host directory that holds a path inside, and the way from there."""
        absolute = self.workspace / path
        if ".." in absolute.parts or "\0" in str(path):
            raise PathRefused(f"{path}: must not contain '..'")
        for inside, base in self.writable.items():
            if absolute.is_relative_to(inside) and absolute != inside:
                return base, absolute.relative_to(inside).parts
        names = ", ".join(map(str, self.writable))
        raise PathRefused(f"{path}: not below a writable directory of the sandbox", hint=f"these are {names}")


def _start(launch: Launch, root: Path) -> Supervised:
    try:
        return Supervised(launch, root / "pids")
    except OSError as error:
        raise SandboxError(f"a command could not be started in {root}: {error}") from None
    except ValueError as error:
        raise SandboxError(f"the command cannot be run as it is: {error}") from None


def make_directories(spec: SandboxSpec) -> None:
    """Lay out an empty sandbox below the spec's root."""
    try:
        spec.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # First what a sandbox is reaped by, so that one half made is not left behind either.
        for name in ("pids", "logs", *WRITABLE):
            (spec.root / name).mkdir(exist_ok=name == "logs")
    except FileExistsError:
        raise SandboxError(f"{spec.root}: already holds a sandbox", hint="stop or reap it first") from None
    except OSError as error:
        raise SandboxError(f"no sandbox can be made in {spec.root}: {error.strerror}") from None


def reap_sessions(sessions_root: Path) -> int:
    """End the processes and remove the directories of every sandbox `sessions_root/*`; how many it were."""
    reaped = 0
    for root in sessions_root.iterdir() if sessions_root.is_dir() else ():
        if root.is_symlink() or not (root / "pids").is_dir():
            continue
        for pid_file in (root / "pids").glob("*.json"):
            if leftover := ProcessIdentity.load(pid_file):
                leftover.end(grace=GRACE_SECONDS + 5.0)
        end_strays(root)
        remove_tree(root)
        reaped += 1
    return reaped
