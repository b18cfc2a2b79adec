"""The Pi coding agent (npm `@earendil-works/pi-coding-agent`), run headless."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, Field

from polar.assets.cache import asset
from polar.assets.node import node, unpack_npm
from polar.harnesses.base import Harness, HarnessContext, Installation
from polar.runtimes.base import Command, ToolDirectory

PACKAGE = "@earendil-works/pi-coding-agent"
VERSION = "1.5.0"
INTEGRITY = "sha512-xNDZ5kqowO6Z03FS2gwAkPEGk1ssxVcYKQ6qZId84mFEvwACvvyc2l0vAMOS+c5zvxLRMLBE9r4y44IGYkMJaQ=="

NODE = PurePosixPath("/opt/polar/node")
PI = PurePosixPath("/opt/polar/pi")

PROVIDER = "polar"
KEY_VARIABLE = "POLAR_KEY"

Tool = Literal["read", "bash", "edit", "write", "grep", "find", "ls", "codemode", "tool_search"]
Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"]


class Pi(Harness):
    """Pi with a private configuration directory in HOME; the workspace's own `.pi` is not trusted."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        tools: tuple[Tool, ...] | None = None
        """Which tools the model is offered; None: Pi's default (read, bash, edit, write), (): none."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Pi's own."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Added after Pi's own."""
        thinking: Thinking | None = None
        """None: the model is declared as one that does not think."""
        context_files: bool = True
        """Whether AGENTS.md and CLAUDE.md of the workspace are put into the prompt."""
        compaction: bool = True
        """Whether Pi summarises a context that is nearly full, which is a model call of its own."""
        retries: int = Field(default=3, ge=0, le=100)
        """How often Pi repeats a model call that failed for a passing reason."""
        output: Literal["text", "json"] = "text"
        """What the log of the run holds: the final answer, or every event as JSON lines."""

    options: Options

    async def install(self) -> Installation:
        node_root, pi_root = await asyncio.to_thread(_download)
        return Installation(
            version=VERSION, tools=(ToolDirectory(node_root, NODE), ToolDirectory(pi_root, PI))
        )

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        state = _state(context)
        files = {
            state / "models.json": _json(self._models(context)),
            state / "settings.json": _json(self._settings(context)),
        }
        for path, text in self._prompts(context).values():
            files[path] = text.encode()
        return files

    def command(self, context: HarnessContext) -> Command:
        options = self.options
        arguments = ["--print", "--mode", options.output, "--no-session", "--no-mcp", "--no-approve"]
        arguments += ["--provider", PROVIDER, "--model", context.model]
        if options.tools is not None:
            arguments += ["--tools", ",".join(options.tools)] if options.tools else ["--no-tools"]
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
                "PI_CODING_AGENT_DIR": str(_state(context)),
                KEY_VARIABLE: context.key,
            },
            # As an argument it could be too long, begin with a dash, or name a file with an @.
            stdin=context.instruction.encode(),
        )

    def _prompts(self, context: HarnessContext) -> dict[str, tuple[PurePosixPath, str]]:
        """Flag → file and its text: Pi takes a text that happens to be a path for that file."""
        texts = {
            "--system-prompt": self.options.system_prompt,
            "--append-system-prompt": self.options.append_system_prompt,
        }
        return {
            flag: (_state(context) / f"{flag.strip('-')}.md", text)
            for flag, text in texts.items()
            if text is not None
        }

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
            # Said here, because Pi would otherwise guess it from the URL.
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


def _download() -> tuple[Path, Path]:
    return node(), asset(f"pi-{VERSION}", lambda into: unpack_npm(PACKAGE, VERSION, INTEGRITY, into))


def _state(context: HarnessContext) -> PurePosixPath:
    return context.home / ".pi" / "agent"


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()
