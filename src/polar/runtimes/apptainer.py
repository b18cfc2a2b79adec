"""Apptainer instances: containers without a daemon, as on shared clusters."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import model_validator

from polar.config.settings import engine_environment
from polar.runtimes.allow_list import AllowList
from polar.runtimes.base import (
    Command,
    Host,
    ImageNotFound,
    Sandbox,
    SandboxError,
    SandboxSpec,
)
from polar.runtimes.containers import ContainerOptions, ContainerSandbox
from polar.runtimes.disk import can_mount_images, make_disk
from polar.runtimes.engine import Engine, csv_fields, name_prefix
from polar.runtimes.local import ENGINE, LocalRuntime, make_root, reap_sandbox, started_whole

START_SECONDS = 3600.0
"""Long, because an image named by its address is fetched and converted first."""
NAME = "apptainer"


class ApptainerOptions(ContainerOptions):
    """What a task can ask of Apptainer; `image` is a SIF file, a directory, or an address such as docker://…."""

    root: Literal["tmpfs", "overlay", "read_only"] = "tmpfs"
    """Where changes of the image's own files go: memory, the sandbox's disk, or nowhere."""
    nv: bool = False
    """Whether the host's NVIDIA driver and devices are there inside."""

    @model_validator(mode="after")
    def _workspace_has_room(self) -> ApptainerOptions:
        if self.root == "read_only" and not self.binds_workspace:
            raise ValueError("a workspace of the image needs root: tmpfs or overlay")
        return self


class ApptainerEngine(Engine):
    """`apptainer`."""

    def exec_argv(self, name: str, command: Command, cwd: PurePosixPath, env_file: Path) -> tuple[str, ...]:
        options = ("--cleanenv", "--no-eval", "--no-privs", "--env-file", str(env_file), "--pwd", str(cwd))
        return (self.binary, "exec", *options, f"instance://{name}", *command.argv)

    async def remove(self, name: str) -> None:
        if name in await self.instances(name):
            await self.call("instance", "stop", "--signal", "SIGKILL", name)

    async def instances(self, pattern: str) -> dict[str, int]:
        """Running instances by name, with the host's pid of their first process."""
        told = await self.call("instance", "list", "--json", pattern)
        try:
            document: Any = json.loads(told)
            return {str(item["instance"]): int(item["pid"]) for item in document["instances"] or ()}
        except (ValueError, TypeError, KeyError):
            raise SandboxError(f"apptainer instance list: cannot be understood: {told[:200]!r}") from None


class ApptainerSandbox(ContainerSandbox):
    options: ApptainerOptions

    async def snapshot(self, name: str) -> None:
        if self.options.root == "overlay":
            raise SandboxError("a snapshot does not hold what is in an overlay", hint="use root: tmpfs")
        await super().snapshot(name)

    def start_arguments(self) -> Iterator[str]:
        """How the instance is described; the image and its name come last."""
        limits, options = self.options.limits, self.options
        yield from ("--containall", "--cleanenv", "--no-home", "--no-privs", "--no-eval")
        yield from ("--net", "--network", "none", "--hostname", "sandbox")
        if options.nv:
            yield "--nv"
        match options.root:
            case "tmpfs":
                yield "--writable-tmpfs"
            case "overlay":
                yield from ("--overlay", str(self.overlay))
            case "read_only":
                pass
        if limits.memory is not None:
            yield from ("--memory", str(int(limits.memory)), "--memory-swap", str(int(limits.memory)))
        if limits.pids is not None:
            yield from ("--pids-limit", str(limits.pids))
        if limits.cpus is not None:
            yield from ("--cpus", f"{limits.cpus:g}")
        for inside, host in self.writable.items():
            yield from ("--mount", csv_fields("type=bind", f"source={host}", f"destination={inside}"))
        for tool in self.spec.tools:
            source = f"source={tool.source.absolute()}"
            yield from ("--mount", csv_fields("type=bind", source, f"destination={tool.target}", "ro"))
        yield from (options.image, self.name)

    @property
    def overlay(self) -> Path:
        """On the sandbox's disk, so that its limit holds for it too."""
        return self.root / "files" / "overlay"


class ApptainerRuntime(LocalRuntime):
    engine_name = NAME

    class Options(ApptainerOptions):
        pass

    options: Options
    supports_snapshots = True

    @property
    def reaches(self) -> AllowList:
        return self.options.network.allowed

    @classmethod
    def engine(cls) -> ApptainerEngine:
        found = shutil.which(NAME, path=engine_environment().get("PATH"))
        if found is None:
            raise SandboxError("apptainer is not installed", hint="see docs/sandboxes.md")
        return ApptainerEngine(found)

    @classmethod
    async def unavailable(cls) -> str | None:
        if sys.platform != "linux":
            return "apptainer sandboxes need Linux"
        try:
            await cls.engine().call("version", timeout=30.0)
        except SandboxError as error:
            return str(error)
        return None

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        kept = dict.fromkeys(("cpu", "memory", "pids"), "apptainer's control groups")
        disk = "ext4 image" if await asyncio.to_thread(can_mount_images) else "watched"
        return kept | {"disk": disk, "snapshots": "without changes of the image's files"}

    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        engine = self.engine()
        self._check_image(host)
        sandbox = ApptainerSandbox(spec, host, self.options, engine)
        await started_whole(lambda: self._with_files(sandbox))
        try:
            await engine.call("instance", "start", *sandbox.start_arguments(), timeout=START_SECONDS)
            running = await engine.instances(sandbox.name)
            if sandbox.name not in running:
                raise SandboxError(f"instance {sandbox.name} ended as soon as it was started")
            await sandbox.attach(running[sandbox.name], own_processes=0, is_marked=False)
        except BaseException:
            await asyncio.shield(self._undo(sandbox))
            raise
        return sandbox

    @classmethod
    async def reap(cls, host: Host) -> int:
        if shutil.which(NAME, path=engine_environment().get("PATH")) is not None:
            engine = cls.engine()
            for name in await engine.instances(f"{name_prefix(host.sandboxes)}*"):
                await engine.remove(name)
        return await super().reap(host)

    def _check_image(self, host: Host) -> None:
        """Of the host's files, an image can only be one that the node's operator meant to be seen."""
        image = self.options.image
        if re.match(r"(docker|oras|library|shub)://", image):
            return
        resolved = Path(image).resolve()
        if not any(resolved.is_relative_to(root.resolve()) for root in host.image_roots):
            raise SandboxError(
                f"image {image}: not below node.upload_roots", hint="which the node's operator sets"
            )
        if not resolved.exists():
            raise ImageNotFound(f"apptainer: no such image: {image}")

    def _with_files(self, sandbox: ApptainerSandbox) -> ApptainerSandbox:
        root = make_root(sandbox.spec, sandbox.host)
        try:
            (root / ENGINE).write_text(NAME)
            make_disk(sandbox.spec, sandbox.host, self.options.limits.disk, None)
            if self.options.root == "overlay":
                sandbox.overlay.mkdir()
        except BaseException:
            reap_sandbox(root)
            raise
        return sandbox

    async def _undo(self, sandbox: ApptainerSandbox) -> None:
        await sandbox.close()
        await asyncio.to_thread(reap_sandbox, sandbox.root)
