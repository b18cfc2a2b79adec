"""The Pi coding agent (npm `@earendil-works/pi-coding-agent`), run headless."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from polar.assets.cache import asset
from polar.assets.node import node, unpack_npm
from polar.harnesses.base import (
    NODE,
    Harness,
    HarnessContext,
    PinnedHarness,
    json_file,
    mcp_servers,
    prompt_files,
)
from polar.runtimes.base import Command

PACKAGE = "@earendil-works/pi-coding-agent"
VERSION = "1.5.0"
INTEGRITY = "sha512-xNDZ5kqowO6Z03FS2gwAkPEGk1ssxVcYKQ6qZId84mFEvwACvvyc2l0vAMOS+c5zvxLRMLBE9r4y44IGYkMJaQ=="

PI = PurePosixPath("/opt/polar/pi")
STATE = ".pi/agent"

PROVIDER = "polar"
KEY_VARIABLE = "POLAR_KEY"

Tool = Literal["read", "bash", "edit", "write", "grep", "find", "ls", "codemode", "tool_search"]
Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"]


class Pi(PinnedHarness):
    """Pi with a private configuration directory in HOME; it does not trust the workspace's `.pi`."""

    class Options(Harness.Options):
        tools: tuple[Tool, ...] | None = None
        """Tools to offer; Pi's default (read, bash, edit, write) if unset, none if empty."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Pi's own system prompt."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Appended to Pi's own system prompt."""
        thinking: Thinking | None = None
        """The thinking level; if unset, the model is declared as one that does not think."""
        context_files: bool = True
        """Whether AGENTS.md and CLAUDE.md of the workspace are included in the prompt."""
        compaction: bool = True
        """Whether to summarise a context that is nearly full, which takes a separate model call."""
        retries: int = Field(default=3, ge=0, le=100)
        """Number of retries for a model call that fails for a transient reason."""
        output: Literal["text", "json"] = "text"
        """Content of the run's log: the final answer, or every event as JSON lines."""

    options: Options
    version = VERSION
    takes_tools = True

    def fetch(self) -> dict[PurePosixPath, Path]:
        pi = asset(f"pi-{VERSION}", lambda into: unpack_npm(PACKAGE, VERSION, INTEGRITY, into))
        return {NODE: node(), PI: pi}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        state = context.home / STATE
        return {
            state / "models.json": json_file(self._models(context)),
            state / "settings.json": json_file(self._settings(context)),
            state / "mcp.json": json_file({"mcpServers": mcp_servers(context, exposure="direct")}),
            **dict(self._prompts(context).values()),
        }

    def command(self, context: HarnessContext) -> Command:
        options = self.options
        arguments = ["--print", "--mode", options.output, "--no-session", "--no-approve"]
        arguments += ["--provider", PROVIDER, "--model", context.model]
        if not context.tools:
            arguments.append("--no-mcp")
        if options.tools is not None:
            tools = (*options.tools, "mcp__*") if context.tools else options.tools
            arguments += ["--tools", ",".join(tools)] if tools else ["--no-tools"]
        if options.thinking is not None:
            arguments += ["--thinking", options.thinking]
        if not options.context_files:
            arguments.append("--no-context-files")
        for flag, (path, _) in self._prompts(context).items():
            arguments += [flag, str(path)]
        return Command(
            argv=(
                str(context.paths[NODE] / "bin" / "node"),
                str(context.paths[PI] / "dist" / "bundle" / "cli.js"),
                *arguments,
            ),
            env={
                "PI_OFFLINE": "1",
                "PI_TELEMETRY": "0",
                "PI_SKIP_VERSION_CHECK": "1",
                # Pi would spend a sixth of its time on a compile cache in /tmp that ends with the session.
                "NODE_DISABLE_COMPILE_CACHE": "1",
                "PI_CODING_AGENT_DIR": str(context.home / STATE),
                KEY_VARIABLE: context.key,
            },
            # An argument could be too long, begin with a dash, or name a file with an @.
            stdin=context.instruction.encode(),
        )

    def _prompts(self, context: HarnessContext) -> dict[str, tuple[PurePosixPath, bytes]]:
        """Return the prompts as files: Pi would read a file whose path a prompt happens to equal."""
        options = self.options
        prompts = {
            "--system-prompt": options.system_prompt,
            "--append-system-prompt": options.append_system_prompt,
        }
        return prompt_files(context.home / STATE, prompts)

    def _models(self, context: HarnessContext) -> dict[str, Any]:
        model = {
            "id": context.model,
            "reasoning": self.options.thinking is not None,
            "contextWindow": context.max_context,
            "maxTokens": context.max_tokens,
        }
        provider = {
            "baseUrl": f"{context.gateway_url}/v1",
            "api": "openai-completions",
            "apiKey": f"${KEY_VARIABLE}",
            # Pi would otherwise guess it from the URL.
            "compat": {
                "supportsStore": False,
                "supportsDeveloperRole": False,
                "supportsUsageInStreaming": True,
                "maxTokensField": "max_tokens",
            },
            "models": [model],
        }
        return {"providers": {PROVIDER: provider}}

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        return {
            "defaultProjectTrust": "never",
            "enableInstallTelemetry": False,
            "cacheWarming": "off",
            "compaction": {
                "enabled": self.options.compaction,
                # Pi's defaults are for large contexts; in a small one they would compact at every turn.
                "reserveTokens": min(16_384, max(context.max_tokens, context.max_context // 8)),
                "keepRecentTokens": min(20_000, context.max_context // 3),
            },
            "retry": {"enabled": self.options.retries > 0, "maxRetries": self.options.retries},
        }
