"""Plain processes with private directories: for trusted work, since the host is fully visible to them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import model_validator

from polar.runtimes.base import Command, Host, Sandbox, SandboxError, SandboxSpec, ToolDirectory
from polar.runtimes.cgroups import Cgroup
from polar.runtimes.disk import FILES
from polar.runtimes.local import (
    LocalOptions,
    LocalRuntime,
    LocalSandbox,
    make_in_thread,
    make_sandbox,
)
from polar.runtimes.network import reachable_host
from polar.runtimes.processes import SANDBOX_VARIABLE
from polar.runtimes.supervision import Launch


class ProcessSandbox(LocalSandbox):
    """A sandbox whose paths inside are those of the host."""

    def __init__(self, spec: SandboxSpec, host: Host, options: LocalOptions, group: Cgroup | None) -> None:
        super().__init__(spec, host, options, group)
        files = PurePosixPath(self.root / FILES)
        self.workspace, self.home, self.tmp = files / "workspace", files / "home", files / "tmp"
        gateway = reachable_host(spec.gateway_host)
        self.gateway_url = f"http://{f'[{gateway}]' if ':' in gateway else gateway}:{spec.gateway_port}"

    def tool_path(self, tool: ToolDirectory) -> PurePosixPath:
        return PurePosixPath(tool.source)

    async def snapshot(self, name: str) -> None:
        raise SandboxError("this runtime keeps no snapshots")

    def exit_code(self, reported: int) -> int:
        return reported

    def is_killed_from_outside(self, reported: int) -> bool:
        """Whether it was killed with SIGKILL; nothing here prevents an agent from killing its own harness."""
        return reported == -signal.SIGKILL

    def launch(self, command: Command, stdout: Path, stderr: Path) -> Launch:
        env = {**self.env, **command.env, SANDBOX_VARIABLE: str(self.root)}
        cwd = Path(command.cwd or self.workspace)
        return self.host_launch(command, stdout, stderr, command.argv, env=env, cwd=cwd)


class ProcessRuntime(LocalRuntime):
    class Options(LocalOptions):
        @model_validator(mode="before")
        @classmethod
        def _network_is_the_hosts(cls, given: Any) -> Any:
            if isinstance(given, dict) and "network" in given:
                raise ValueError("network: plain processes cannot be restricted; use bubblewrap or docker")
            return given

    options: Options
    is_closed = False

    @classmethod
    async def unavailable(cls) -> str | None:
        return None if sys.platform == "linux" else "the process runtime needs Linux; run Polar there"

    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        return await make_in_thread(
            lambda: ProcessSandbox(spec, host, self.options, make_sandbox(spec, host, self.options.limits))
        )
