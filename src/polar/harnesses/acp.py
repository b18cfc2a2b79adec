"""Any agent that speaks the Agent Client Protocol, driven by a small client inside the sandbox."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from polar.assets.pypi import python_program, python_root
from polar.harnesses.base import (
    Harness,
    HarnessContext,
    Installation,
    json_file,
    mcp_servers,
    plain_text,
    provider_environment,
)
from polar.runtimes.base import Command, ToolDirectory

# Python may load its shared library by absolute path, so it is mounted at the same place.
PYTHON = PurePosixPath(python_root())
CLIENT = ".polar/acp_client.py"
SETTINGS = ".polar/acp_settings.json"


class Acp(Harness):
    """Runs `command` in the workspace and speaks the Agent Client Protocol (version 1) with it over stdio.

    The instruction is the session's one prompt; what the agent asks permission for is allowed, and files and
    commands that it leaves to its client are those of the workspace. The run ends with the turn. Base URL,
    key and model are set as for `shell`, and the session's model answers under any model name.
    """

    asks_by_any_name = True
    takes_tools = True

    class Options(Harness.Options):
        command: str | list[str] = Field(min_length=1)
        """The agent's command; a string is run with `/bin/sh -c`, a list directly."""
        env: dict[str, str] = Field(default_factory=dict)
        """Additional environment variables; Polar's own take precedence."""
        auth: str | None = Field(default=None, min_length=1)
        """One of the agent's authentication methods, if it asks for authentication."""
        mode: str | None = Field(default=None, min_length=1)
        """One of the agent's session modes; its default if unset."""

    options: Options

    async def install(self) -> Installation:
        return Installation(None, (ToolDirectory(Path(PYTHON), PYTHON),))

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        settings = self.options.model_dump(include={"auth", "mode"}, exclude_none=True)
        return acp_client(context, settings)

    def command(self, context: HarnessContext) -> Command:
        options = self.options
        argv = ("/bin/sh", "-c", options.command) if isinstance(options.command, str) else options.command
        env = options.env | provider_environment(context.gateway_url, context.key, context.model)
        return acp_command(context, tuple(argv), env)


def acp_client(context: HarnessContext, settings: dict[str, Any]) -> dict[PurePosixPath, bytes]:
    servers = [_server(name, server) for name, server in mcp_servers(context).items()]
    return {
        context.home / CLIENT: Path(__file__).with_name("acp_client.py").read_bytes(),
        context.home / SETTINGS: json_file({**settings, "mcpServers": servers}),
    }


def _server(name: str, server: dict[str, Any]) -> dict[str, Any]:
    if "command" in server:
        return {"name": name, **server, "env": []}
    headers = [{"name": header, "value": value} for header, value in server["headers"].items()]
    return {"type": "http", "name": name, "url": server["url"], "headers": headers}


def acp_command(context: HarnessContext, agent: tuple[str, ...], env: dict[str, str]) -> Command:
    """Return the command that drives an agent's own command by the protocol."""
    python = (str(context.paths[PYTHON] / python_program()), "-I", "-S", str(context.home / CLIENT))
    told = (str(context.home / SETTINGS), *agent)
    return Command((*python, *told), env, stdin=plain_text(context.instruction))
