"""Apptainer instances: containers without a daemon, as on shared clusters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from polar.runtimes.base import Command, Host, ImageNotFound, SandboxError, SandboxSpec
from polar.runtimes.cgroups import node_name
from polar.runtimes.containers import ContainerOptions, ContainerRuntime, ContainerSandbox

START_SECONDS = 3600.0
"""Long, because an image given by URL is downloaded and converted first."""


class ApptainerSandbox(ContainerSandbox):
    options: ApptainerRuntime.Options

    def exec_argv(self, command: Command, env_file: Path) -> tuple[str, ...]:
        options = ("--cleanenv", "--no-eval", "--no-privs", "--env-file", str(env_file))
        place = ("--pwd", str(command.cwd or self.workspace), f"instance://{self.name}")
        return (self.runtime.binary(), "exec", *options, *place, *command.argv)

    async def snapshot(self, name: str) -> None:
        if self.options.root == "overlay":
            raise SandboxError("snapshots do not include overlays", hint="use root: tmpfs")
        await super().snapshot(name)

    def start_arguments(self) -> Iterator[str]:
        """Yield the options of the instance; the image and its name come last."""
        options = self.options
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
        yield from self.limit_arguments()
        yield from self.mount_arguments()
        yield from (options.image, self.name)

    @property
    def overlay(self) -> Path:
        """The overlay's directory, on the sandbox's disk, so that its limit applies."""
        return self.root / "files" / "overlay"


class ApptainerRuntime(ContainerRuntime):
    class Options(ContainerOptions):
        """Options of Apptainer sandboxes; `image` is a SIF file, a directory, or a URL such as docker://…."""

        root: Literal["tmpfs", "overlay", "read_only"] = "tmpfs"
        """Where changes to the image's own files go: memory, the sandbox's disk, or nowhere."""
        nv: bool = False
        """Whether the host's NVIDIA driver and devices are available inside."""

    options: Options
    engine_name = "apptainer"
    install_hint = "see docs/sandboxes.md"

    @classmethod
    async def unavailable(cls) -> str | None:
        if sys.platform != "linux":
            return "apptainer sandboxes need Linux"
        try:
            await cls.call("version", timeout=30.0)
        except SandboxError as error:
            return str(error)
        return None

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        return {**await super().enforcement(), "snapshots": "without changes of the image's files"}

    async def describe(self, spec: SandboxSpec, host: Host) -> ApptainerSandbox:
        self._check_image(host)
        return ApptainerSandbox(spec, host, self.options, type(self))

    async def begin(self, sandbox: ApptainerSandbox) -> None:
        if sandbox.options.root == "overlay":
            sandbox.overlay.mkdir()
        await self.call("instance", "start", *sandbox.start_arguments(), timeout=START_SECONDS)
        running = await self.instances(sandbox.name)
        if sandbox.name not in running:
            raise SandboxError(f"instance {sandbox.name} exited immediately")
        await sandbox.attach(running[sandbox.name], own_processes=0, is_marked=False)

    @classmethod
    async def remove_containers(cls, host: Host) -> None:
        for name in await cls.instances(f"{node_name(host.sandboxes)}-*"):
            await cls.remove(name)

    @classmethod
    async def remove(cls, name: str) -> None:
        if name in await cls.instances(name):
            await cls.call("instance", "stop", "--signal", "SIGKILL", name)

    @classmethod
    async def instances(cls, pattern: str) -> dict[str, int]:
        """Return running instances by name, with the host's pid of their first process."""
        told = await cls.call("instance", "list", "--json", pattern)
        try:
            document: Any = json.loads(told)
            return {str(item["instance"]): int(item["pid"]) for item in document["instances"] or ()}
        except (ValueError, TypeError, KeyError):
            raise SandboxError(f"apptainer instance list: cannot be parsed: {told[:200]!r}") from None

    def _check_image(self, host: Host) -> None:
        """Refuse an image on the host outside the roots that the node's operator allows."""
        image = self.options.image
        if re.match(r"(docker|oras|library|shub)://", image):
            return
        resolved = Path(image).resolve()
        if not any(resolved.is_relative_to(root.resolve()) for root in host.image_roots):
            raise SandboxError(
                f"image {image}: not below node.upload_roots",
                hint="ask the node's operator to add its directory",
            )
        if not resolved.exists():
            raise ImageNotFound(f"apptainer: no such image: {image}")
