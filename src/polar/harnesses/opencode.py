"""OpenCode (npm `opencode-ai`), run headless over chat completions."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from polar.assets.node import native
from polar.harnesses.base import LOCKS, Harness, HarnessContext, PinnedHarness, json_file, mcp_servers
from polar.runtimes.base import Command

VERSION = "1.18.33"
OPENCODE = PurePosixPath("/opt/polar/opencode")
STATE = ".config/opencode"
APPENDED = f"{STATE}/polar-instructions.md"

PROVIDER = "polar"
KEY_VARIABLE = "POLAR_KEY"
TOOL_MS = 120_000
"""How long a tool server may take to answer; OpenCode's five seconds are too short for a busy machine."""

Tool = Literal["bash", "read", "edit", "glob", "grep", "task", "skill", "todowrite", "webfetch"]


class OpenCode(PinnedHarness):
    """OpenCode with its configuration in HOME; it does not read the workspace's `opencode.json`."""

    class Options(Harness.Options):
        tools: tuple[Tool, ...] | None = None
        """Tools to offer; OpenCode's default if unset, none if empty. `edit` includes write."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces OpenCode's own system prompt."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Appended to OpenCode's own system prompt."""
        max_turns: int | None = Field(default=None, ge=1)
        """Maximum number of model calls before OpenCode asks for a final answer without tools."""
        reasoning: bool = False
        """Whether to declare the model as a reasoning model, so that its reasoning is sent back to it."""
        compaction: bool = True
        """Whether to summarise a context that is nearly full, which takes a separate model call."""
        title: bool = False
        """Whether to ask the model for a title of the session, which takes a separate model call."""
        output: Literal["default", "json"] = "default"
        """Content of the run's log: the conversation as text, or every event as JSON lines."""

    options: Options
    version = VERSION
    takes_tools = True

    def fetch(self) -> dict[PurePosixPath, Path]:
        # The locked build is the baseline, which also runs on processors without AVX2.
        return {OPENCODE: native("opencode", VERSION, LOCKS / "opencode.json")}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        state = context.home / STATE
        # Without this file OpenCode downloads its plugin library in the background.
        fetched = {"lockfileVersion": 3, "packages": {"": {"dependencies": {"@opencode-ai/plugin": VERSION}}}}
        files = {
            state / "opencode.json": json_file(self._config(context)),
            state / "package-lock.json": json_file(fetched),
            state / "node_modules" / ".package-lock.json": json_file({"lockfileVersion": 3, "packages": {}}),
        }
        if self.options.append_system_prompt is not None:
            files[context.home / APPENDED] = self.options.append_system_prompt.encode()
        return files

    def command(self, context: HarnessContext) -> Command:
        return Command(
            argv=(
                str(context.paths[OPENCODE] / "bin" / "opencode"),
                *("run", "--auto", "--pure", "--format", self.options.output),
            ),
            env={
                "XDG_CONFIG_HOME": str(context.home / ".config"),
                "XDG_DATA_HOME": str(context.home / ".local" / "share"),
                "XDG_STATE_HOME": str(context.home / ".local" / "state"),
                "XDG_CACHE_HOME": str(context.home / ".cache"),
                "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_SHARE": "1",
                KEY_VARIABLE: context.key,
            },
            # An argument would reach the model in literal quotes.
            stdin=context.instruction.encode(),
        )

    def _config(self, context: HarnessContext) -> dict[str, Any]:
        options = self.options
        model = f"{PROVIDER}/{context.model}"
        config: dict[str, Any] = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "lsp": False,
            "formatter": False,
            "permission": self._permission(context),
            "model": model,
            "small_model": model,
            "enabled_providers": [PROVIDER],
            "provider": {PROVIDER: self._provider(context)},
            "agent": {"build": self._agent(), "title": {"disable": not options.title}},
            "compaction": {"auto": options.compaction},
            "mcp": {name: self._server(server) for name, server in mcp_servers(context).items()},
        }
        if options.append_system_prompt is not None:
            config["instructions"] = [str(context.home / APPENDED)]
        return config

    def _permission(self, context: HarnessContext) -> str | dict[str, str]:
        """Return the permissions; denied tools are not offered to the model."""
        if self.options.tools is None:
            return "allow"
        allowed = (*self.options.tools, *(f"{server}_*" for server in context.tools))
        return {"*": "deny", "external_directory": "allow", **dict.fromkeys(allowed, "allow")}

    def _server(self, server: dict[str, Any]) -> dict[str, Any]:
        if "command" not in server:
            return {"type": "remote", "oauth": False, "timeout": TOOL_MS, **server}
        return {"type": "local", "command": [server["command"], *server["args"]], "timeout": TOOL_MS}

    def _provider(self, context: HarnessContext) -> dict[str, Any]:
        return {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{context.gateway_url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
            "models": {
                context.model: {
                    "limit": {"context": context.max_context, "output": context.max_tokens},
                    "tool_call": True,
                    "reasoning": self.options.reasoning,
                }
            },
        }

    def _agent(self) -> dict[str, Any]:
        agent: dict[str, Any] = {}
        if self.options.system_prompt is not None:
            agent["prompt"] = self.options.system_prompt
        if self.options.max_turns is not None:
            agent["steps"] = self.options.max_turns
        return agent
