"""How an agent harness is installed, configured and started. Harnesses are never patched."""

from __future__ import annotations

import asyncio
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.task import TaskSpec, ToolServer
from polar.runtimes.allow_list import Destination
from polar.runtimes.base import Command, Runtime, ToolDirectory

NODE = PurePosixPath("/opt/polar/node")
"""Where Node.js is mounted for harnesses that need it."""
LOCKS = Path(__file__).parent / "locks"
"""Lock files of the pinned harnesses, with a hash for each package."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A harness prepared once on a node and shared read-only by all its sandboxes."""

    version: str | None
    """None if it cannot be known, as for a command of the task's own."""
    tools: tuple[ToolDirectory, ...] = ()


@dataclass(frozen=True, slots=True)
class HarnessContext:
    """What a harness may know about its session."""

    instruction: str
    model: str
    """The name under which the gateway serves the policy."""
    gateway_url: str
    """The gateway's `http://host:port` as seen from inside the sandbox."""
    key: str
    """The session's secret, which opens only this session's model calls."""
    workspace: PurePosixPath
    home: PurePosixPath
    tmp: PurePosixPath
    max_context: int
    max_tokens: int
    """Maximum number of tokens per answer."""
    paths: Mapping[PurePosixPath, PurePosixPath] = field(default_factory=dict)
    """Maps the target of each tool directory to its path inside this sandbox."""
    tools: Mapping[str, ToolServer] = field(default_factory=dict)
    """The task's own tools, which are offered besides the harness's."""

    def launcher(self, tool: str) -> PurePosixPath:
        """Return the script that starts a tool server's command."""
        return self.home / ".polar" / "tools" / f"{tool}.sh"


class Harness(ABC):
    """One agent harness; `install` may download, everything else is pure."""

    asks_by_any_name: ClassVar[bool] = False
    """Whether it may request its model under other names, all of which the session's model then answers."""
    takes_tools: ClassVar[bool] = False
    """Whether it offers the servers of `context.tools`, by its own documented configuration."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    async def install(self) -> Installation:
        """Prepare the harness in the cache, cheaply if it is already there; NotInstalled says what to do."""

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        """Return configuration files by their absolute path inside the sandbox."""
        return {}

    @abstractmethod
    def command(self, context: HarnessContext) -> Command:
        """Return the command that runs the instruction headless."""


class PinnedHarness(Harness):
    """A harness with a pinned version, downloaded once and mounted at fixed paths."""

    version: ClassVar[str]

    async def install(self) -> Installation:
        directories = await asyncio.to_thread(self.fetch)
        tools = tuple(ToolDirectory(source, target) for target, source in directories.items())
        return Installation(self.version, tools)

    @abstractmethod
    def fetch(self) -> dict[PurePosixPath, Path]:
        """Return its directories by their target inside the sandbox, downloading what is not in the cache."""


def check_tools(task: TaskSpec) -> None:
    """Raise InvalidInput if its harness takes no tools, or its sandboxes do not reach a server of them."""
    if not task.tools:
        return
    if not plugins.load("harnesses", task.harness.name).takes_tools:
        raise InvalidInput(
            f"tools: harness {task.harness.name!r} takes no tools besides its own",
            hint="docs/tasks.md#tools says which harnesses do",
        )
    runtime: Runtime = plugins.create("runtimes", "runtime", task.runtime)
    for name, tool in task.tools.items():
        if tool.url is not None and runtime.is_closed:
            wanted = _destination(name, tool.url)
            if not runtime.reaches.names(wanted):
                raise InvalidInput(
                    f"tools.{name}.url: sandboxes of this task do not reach {wanted}",
                    hint="name it in runtime.options.network.allow, and in node.network_allow of the nodes",
                )


def _destination(name: str, url: str) -> Destination:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
        return Destination.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except ValueError as error:
        raise InvalidInput(f"tools.{name}.url: {error}") from None


def launchers(context: HarnessContext) -> dict[PurePosixPath, bytes]:
    """Return a script for each tool server that is a command.

    Harnesses differ in the working directory and the variables that they pass on, and in what they expand.
    """
    scripts = {}
    for name, tool in context.tools.items():
        if tool.command is not None:
            # Some variables are the shell's own, which it would not let be set.
            own = (f"{variable}={value}" for variable, value in tool.env.items())
            command = shlex.join(("env", "--", *own, tool.command, *tool.args))
            script = f"cd {shlex.quote(str(context.workspace))} || exit\nexec {command}\n"
            scripts[context.launcher(name)] = script.encode()
    return scripts


def mcp_servers(
    context: HarnessContext, *, url: str = "url", headers: str = "headers", **more: Any
) -> dict[str, dict[str, Any]]:
    """Return the tool servers as most harnesses configure them; `url` and `headers` are its own keys."""
    return {
        name: {url: tool.url, headers: tool.headers, **more}
        if tool.command is None
        else {"command": "/bin/sh", "args": [str(context.launcher(name))], **more}
        for name, tool in context.tools.items()
    }


def plain_text(instruction: str) -> bytes:
    """Encode the instruction so that a leading slash is not taken for one of the harness's commands."""
    return (f"\n{instruction}" if instruction.startswith("/") else instruction).encode()


def json_file(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


def prompt_files(
    directory: PurePosixPath, prompts: Mapping[str, str | None]
) -> dict[str, tuple[PurePosixPath, bytes]]:
    """Return flag → (file, content) for every given prompt, since an argument could be too long."""
    return {
        flag: (directory / f"{flag.strip('-')}.md", text.encode())
        for flag, text in prompts.items()
        if text is not None
    }


def provider_environment(url: str, key: str, model: str) -> dict[str, str]:
    """Return base URL, key and model for every provider's API, and Polar's own variables."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "CODEX_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "GOOGLE_API_KEY": key,
        "GOOGLE_GENERATIVE_AI_API_KEY": key,
        "GEMINI_MODEL": model,
        "POLAR_GATEWAY_URL": url,
        "POLAR_KEY": key,
        "POLAR_MODEL": model,
    }
