"""Containers of Docker, or of podman, which takes the same commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from polar.config.settings import engine_environment
from polar.runtimes.base import Command, Host, SandboxError, SandboxSpec, SandboxUnavailable
from polar.runtimes.cgroups import node_name
from polar.runtimes.containers import ContainerOptions, ContainerRuntime, ContainerSandbox
from polar.runtimes.local import start_supervised
from polar.runtimes.processes import SANDBOX_VARIABLE
from polar.runtimes.supervision import Launch, Supervised

NODE_LABEL = "polar.node"
IMAGE = "image"
"""The file of a snapshot that names the image which holds the rest of it."""
SHM = "256m"
PULL_SECONDS = 3600.0
START_SECONDS = 120.0
INIT = 'exec 3<&0; cat <&3 >/dev/null & wait "$!"'
"""The container's main process: it ends with its stdin, which the node holds, and reaps orphans."""
ULIMITS = {"nofile": (resource.RLIMIT_NOFILE, 65_536), "nproc": (resource.RLIMIT_NPROC, 16_384)}
"""Limits that podman sets for a container if the node may have as much; its own defaults may exceed that."""


class DockerSandbox(ContainerSandbox):
    options: DockerRuntime.Options
    runtime: type[DockerRuntime]

    def exec_argv(self, command: Command, env_file: Path) -> tuple[str, ...]:
        options = ("--env-file", str(env_file), "--workdir", str(command.cwd or self.workspace))
        return (self.runtime.binary(), "exec", "--interactive", *options, self.name, *command.argv)

    async def snapshot(self, name: str) -> None:
        image = ""
        if self.options.root == "writable":
            image = await self.runtime.call("commit", self.name, timeout=PULL_SECONDS)
        await super().snapshot(name)
        if image:
            (self.host.snapshots / name / IMAGE).write_text(image)

    def create_arguments(self, *, rootless: bool) -> Iterator[str]:
        """Yield the container's options; the image and its command come last."""
        options = self.options
        yield from ("--name", self.name, "--label", f"{NODE_LABEL}={node_name(self.root.parent)}")
        yield from ("--interactive", "--network", "none", "--hostname", "sandbox")
        yield from ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--shm-size", SHM)
        yield from ("--env", f"{SANDBOX_VARIABLE}={self.root}", "--entrypoint", "/bin/sh")
        yield from ("--pull", options.pull)
        for name, (kind, wanted) in ULIMITS.items() if self.runtime.is_daemonless else ():
            hard = resource.getrlimit(kind)[1]
            value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            yield from ("--ulimit", f"{name}={value}:{value}")
        if rootless:
            # Root inside is the node's user outside; files of any other user could not be removed.
            yield from ("--user", "0:0")
        yield from self.limit_arguments()
        if options.root == "read_only":
            yield from ("--read-only", "--tmpfs", "/run:size=64m", "--tmpfs", "/var/tmp:size=64m")
        yield from self.mount_arguments()
        yield from (_snapshot_image(self.spec.base, self.host) or options.image, "-c", INIT)


class DockerRuntime(ContainerRuntime):
    class Options(ContainerOptions):
        """Options of Docker and podman sandboxes."""

        root: Literal["read_only", "writable"] = "read_only"
        """Whether the image's own files can be changed. Such changes do not count towards the disk limit."""
        pull: Literal["never", "missing", "always"] = "missing"
        """When to download the image from its registry."""

    options: Options
    engine_name = "docker"
    is_daemonless: ClassVar[bool] = False
    install_hint = "install Docker (Debian: docker.io) and start its daemon"
    _probed: ClassVar[dict[str, tuple[str | None, bool]]] = {}
    """What each engine said of itself, by its binary."""

    @classmethod
    async def remove(cls, name: str) -> None:
        try:
            await cls.call("rm", "--force", "--volumes", name)
        except SandboxError as error:
            if not re.search("no such container|no container with", str(error), re.IGNORECASE):
                raise

    @classmethod
    async def unavailable(cls) -> str | None:
        return (await cls._probe())[0]

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        return {**await super().enforcement(), "snapshots": f"{cls.engine_name} commit"}

    async def describe(self, spec: SandboxSpec, host: Host) -> DockerSandbox:
        reason, _ = await self._probe()
        if reason:
            raise SandboxUnavailable(reason)
        return DockerSandbox(spec, host, self.options, type(self))

    async def discard(self, snapshot: str, host: Host) -> None:
        if image := _snapshot_image(snapshot, host):
            await self.call("rmi", "--force", image)
        await super().discard(snapshot, host)

    @classmethod
    async def remove_containers(cls, host: Host) -> None:
        label = f"label={NODE_LABEL}={node_name(host.sandboxes)}"
        try:
            listed = await cls.call("ps", "--all", "--filter", label, "--format", "{{.Names}}")
        except SandboxUnavailable:
            return  # Without its engine, no container is running.
        for name in listed.split():
            if name.startswith(f"{node_name(host.sandboxes)}-"):
                await cls.remove(name)

    async def begin(self, sandbox: DockerSandbox) -> None:
        logs = sandbox.host.logs / sandbox.spec.name
        _, rootless = await self._probe()
        await self.call("create", *sandbox.create_arguments(rootless=rootless), timeout=PULL_SECONDS)
        sandbox.holder = start_supervised(
            Launch(
                argv=(self.binary(), "start", "--attach", "--interactive", sandbox.name),
                env=engine_environment(),
                cwd=Path("/"),
                stdin=None,
                stdout=logs / "container.stdout",
                stderr=logs / "container.stderr",
                output_limit=1024 * 1024,
            ),
            sandbox.root,
        )
        try:
            pid = await self._first_pid(sandbox.name, sandbox.holder)
        except TimeoutError:
            raise SandboxUnavailable(f"container {sandbox.name} did not start") from None
        except SandboxError as error:
            told = (logs / "container.stderr").read_text(errors="replace")
            raise self.failure("start", told) if told.strip() else error from None
        await sandbox.attach(pid, own_processes=1)

    async def _first_pid(self, name: str, holder: Supervised) -> int:
        """Return the host's pid of a container's first process, once it runs."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                state = await self.call("inspect", "--format", "{{.State.Pid}}", name)
                if state.isdigit() and int(state) > 0:
                    return int(state)
                if holder.ended.done():
                    raise SandboxError(f"container {name} exited immediately")
                await asyncio.sleep(0.02)

    @classmethod
    async def _probe(cls) -> tuple[str | None, bool]:
        """Return why the engine cannot be used, and whether it is rootless."""
        try:
            if (binary := cls.binary()) not in cls._probed:
                cls._probed[binary] = await cls._ask()
        except SandboxError as error:
            return str(error), False  # What is not there now may be there later.
        return cls._probed[binary]

    @classmethod
    async def _ask(cls) -> tuple[str | None, bool]:
        if sys.platform != "linux":
            return f"{cls.engine_name} sandboxes need Linux", False
        info = json.loads(await cls.call("info", "--format", "{{json .}}", timeout=30.0))
        rootless = cls.is_rootless(info)
        if not rootless and os.geteuid() != 0:
            return (
                f"{cls.engine_name} runs as root, so a node without root cannot manage its containers; "
                f"run {cls.engine_name} rootless, or the node as root",
                False,
            )
        return None, rootless

    @classmethod
    def is_rootless(cls, info: Mapping[str, object]) -> bool:
        errors = info.get("ServerErrors")
        if errors:
            raise SandboxUnavailable(f"docker: {errors}", hint=cls.install_hint)
        options = info.get("SecurityOptions")
        return isinstance(options, list) and "name=rootless" in options


class PodmanRuntime(DockerRuntime):
    engine_name = "podman"
    is_daemonless = True
    install_hint = "install podman (Debian: podman)"

    @classmethod
    def is_rootless(cls, info: Mapping[str, object]) -> bool:
        host = info.get("host")
        security = host.get("security") if isinstance(host, dict) else None
        return isinstance(security, dict) and security.get("rootless") is True


def _snapshot_image(name: str | None, host: Host) -> str | None:
    file = host.snapshots / name / IMAGE if name else None
    return file.read_text() if file and file.is_file() else None
