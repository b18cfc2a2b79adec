"""Plain processes with private directories: for trusted work, since nothing hides the host from them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, Field

from polar.runtimes.base import Command, Mount, Runtime, Sandbox, SandboxSpec
from polar.runtimes.forwarding import reachable_host
from polar.runtimes.local import (
    DEFAULT_OUTPUT_LIMIT,
    LIMITS,
    LocalSandbox,
    make_directories,
    reap_sessions,
)
from polar.runtimes.processes import SANDBOX_VARIABLE
from polar.runtimes.supervision import Launch


class ProcessSandbox(LocalSandbox):
    """Paths inside are paths of the host."""

    def __init__(self, spec: SandboxSpec, output_limit: int) -> None:
        super().__init__(spec)
        root = PurePosixPath(spec.root)
        self.workspace, self.home, self.tmp = root / "workspace", root / "home", root / "tmp"
        host = reachable_host(spec.gateway_host)
        self.gateway_url = f"http://{f'[{host}]' if ':' in host else host}:{spec.gateway_port}"
        self._output_limit = output_limit

    def path_inside(self, mount: Mount) -> PurePosixPath:
        return PurePosixPath(mount.source)

    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        return Launch(
            argv=command.argv,
            env={**self.env, **command.env, SANDBOX_VARIABLE: str(self.spec.root)},
            cwd=Path(command.cwd or self.workspace),
            stdin=command.stdin,
            stdout=stdout,
            stderr=stderr,
            output_limit=self._output_limit,
            # The number of processes is counted per user, so a limit here would be one for the whole host.
            limits={name: value for name, value in LIMITS.items() if name != "nproc"},
        )


class ProcessRuntime(Runtime):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        output_limit: int = Field(default=DEFAULT_OUTPUT_LIMIT, ge=1024)
        """Bytes kept of each command's stdout and of its stderr."""

    options: Options

    @classmethod
    async def unavailable(cls) -> str | None:
        return None if sys.platform == "linux" else "the process runtime needs Linux; run Polar there"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        spec = replace(spec, root=spec.root.absolute())
        await asyncio.to_thread(make_directories, spec)
        return ProcessSandbox(spec, self.options.output_limit)

    @classmethod
    async def reap(cls, sessions_root: Path) -> int:
        return await asyncio.to_thread(reap_sessions, sessions_root.absolute())
