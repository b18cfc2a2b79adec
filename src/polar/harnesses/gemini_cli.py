"""Gemini CLI (npm `@google/gemini-cli`), run headless over generateContent."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from polar.assets.cache import asset, lock_tag
from polar.assets.node import install_npm, node
from polar.harnesses.base import (
    LOCKS,
    NODE,
    Harness,
    HarnessContext,
    PinnedHarness,
    json_file,
    mcp_servers,
    plain_text,
)
from polar.runtimes.base import Command

PACKAGE = "@google/gemini-cli"
VERSION = "0.61.0"
LOCK = LOCKS / "gemini_cli.json"
GEMINI = PurePosixPath("/opt/polar/gemini-cli")
STATE = ".gemini"
PROMPT = f"{STATE}/system-prompt.md"

ASSUMED_CONTEXT = 1_048_576
"""The context that Gemini CLI assumes for every model it does not know; no setting changes it."""
COMPACTS_AT = 0.7
"""Fraction of the real context at which it may summarise the conversation."""

WEB_TOOLS = ("google_web_search", "web_fetch")
"""These tools call other Google models, which the gateway does not serve."""
SIDE_CALLS = (
    "chat-compression-default",
    "classifier",
    "edit-corrector",
    "fast-ack-helper",
    "llm-edit-fixer",
    "loop-detection",
    "loop-detection-double-check",
    "next-speaker-checker",
    "prompt-completion",
    "summarizer-default",
    "summarizer-shell",
)
"""Gemini CLI's names for its side calls, which would otherwise go to other models."""

SKILLS = ("antigravity-support",)
"""Built-in skills that are not offered: how to move to another program. With more than one left, they stand
in the prompt in the order in which they happened to be read, so that sessions begin differently."""

AGENTS = ("cli_help", "codebase_investigator")
"""Sub-agents that would call other models; the remaining one uses the session's."""

Tool = Literal[
    "activate_skill",
    "enter_plan_mode",
    "glob",
    "grep_search",
    "invoke_agent",
    "list_background_processes",
    "list_directory",
    "read_background_output",
    "read_file",
    "replace",
    "run_shell_command",
    "update_topic",
    "write_file",
]


class GeminiCli(PinnedHarness):
    """Gemini CLI with a private home; it reads the workspace's `.gemini` settings as usual.

    It summarises a long context only at a user message, of which a headless run has one: if tool calls fill
    the context, the run ends with the gateway's refusal.
    """

    class Options(Harness.Options):
        tools: tuple[Tool, ...] | None = Field(default=None, min_length=1)
        """Tools to offer; if unset, all of Gemini CLI's own except those for the web."""
        agents: bool = True
        """Whether the model may delegate work to sub-agents, which are conversations of their own."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Gemini CLI's own system prompt."""
        max_turns: int | None = Field(default=None, ge=1)
        """Maximum number of model calls; a run that reaches it ends with exit code 53."""
        retries: int = Field(default=3, ge=0, le=9)
        """Number of retries for a model call that fails for a transient reason."""
        output: Literal["text", "json", "stream-json"] = "text"
        """Content of the run's log: the final answer, the answer with statistics, or every event as JSON."""

    options: Options
    version = VERSION
    takes_tools = True

    def fetch(self) -> dict[PurePosixPath, Path]:
        gemini = asset(f"gemini-cli-{VERSION}-{lock_tag(LOCK)}", partial(install_npm, LOCK))
        return {NODE: node(), GEMINI: gemini}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        files = {context.home / STATE / "settings.json": json_file(self._settings(context))}
        if self.options.system_prompt is not None:
            files[context.home / PROMPT] = self.options.system_prompt.encode()
        return files

    def command(self, context: HarnessContext) -> Command:
        env = {
            "GEMINI_CLI_HOME": str(context.home),
            "GEMINI_CLI_NO_RELAUNCH": "true",
            "GEMINI_API_KEY": context.key,
            "GOOGLE_GEMINI_BASE_URL": context.gateway_url,
        }
        if self.options.system_prompt is not None:
            env["GEMINI_SYSTEM_MD"] = str(context.home / PROMPT)
        return Command(
            argv=(
                str(context.paths[NODE] / "bin" / "node"),
                str(context.paths[GEMINI] / "node_modules" / PACKAGE / "bundle" / "gemini.js"),
                *("--approval-mode", "yolo", "--skip-trust", "--model", context.model),
                *("--output-format", self.options.output),
            ),
            env=env,
            stdin=plain_text(context.instruction),
        )

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        options = self.options
        tools: dict[str, Any] = {"exclude": list(WEB_TOOLS), "disableLLMCorrection": True}
        if options.tools is not None:
            tools["core"] = list(options.tools)
        model: dict[str, Any] = {
            "compressionThreshold": COMPACTS_AT * context.max_context / ASSUMED_CONTEXT,
            "disableLoopDetection": True,
        }
        if options.max_turns is not None:
            model["maxSessionTurns"] = options.max_turns
        return {
            "general": {
                "enableAutoUpdate": False,
                "enableAutoUpdateNotification": False,
                "maxAttempts": options.retries + 1,
            },
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "ide": {"enabled": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "experimental": {"enableAgents": options.agents},
            "agents": {"overrides": {name: {"modelConfig": {"model": context.model}} for name in AGENTS}},
            "skills": {"disabled": list(SKILLS)},
            "tools": tools,
            "mcpServers": mcp_servers(context, url="httpUrl", trust=True),
            "model": model,
            "modelConfigs": {
                "customAliases": {name: {"modelConfig": {"model": context.model}} for name in SIDE_CALLS},
                "customOverrides": [
                    {
                        "match": {"model": context.model},
                        "modelConfig": {"generateContentConfig": {"maxOutputTokens": context.max_tokens}},
                    }
                ],
            },
        }
