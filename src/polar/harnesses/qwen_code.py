"""Qwen Code (npm `@qwen-code/qwen-code`), run headless over chat completions."""

from __future__ import annotations

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

PACKAGE = "@qwen-code/qwen-code"
VERSION = "0.24.4"
LOCK = LOCKS / "qwen_code.json"
QWEN = PurePosixPath("/opt/polar/qwen-code")
PROMPT = ".qwen/system-prompt.md"
SETTINGS = ".qwen/system-settings.json"

LONGEST_PROMPT = 30_000
"""A limit in characters of up to four bytes; the kernel refuses arguments of 128 KiB or more."""

OF_EVERY_SERVER: dict[str, Any] = {"trust": True, "alwaysLoadTools": True, "discoveryTimeoutMs": 120_000}
"""What Qwen Code is told of each tool server; else the model would have to search for its tools."""

Tool = Literal[
    "agent",
    "edit",
    "get_goal",
    "glob",
    "grep_search",
    "list_agents",
    "list_directory",
    "notebook_edit",
    "read_file",
    "run_shell_command",
    "skill",
    "todo_write",
    "tool_call",
    "tool_search",
    "update_goal",
    "write_file",
]


class QwenCode(PinnedHarness):
    """Qwen Code with settings that override the workspace's `.qwen/settings.json`."""

    class Options(Harness.Options):
        disabled_tools: tuple[Tool, ...] = ()
        """Default tools that are not offered."""
        skills: bool = True
        """Whether the skills that come with Qwen Code are listed in the prompt."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Qwen Code's own system prompt."""
        append_system_prompt: str | None = Field(default=None, min_length=1, max_length=LONGEST_PROMPT)
        """Appended to Qwen Code's own system prompt."""
        max_turns: int | None = Field(default=None, ge=1)
        """Maximum number of model calls; a run that reaches it ends with exit code 53."""
        retries: int = Field(default=3, ge=0, le=100)
        """Number of retries for a model call that fails for a transient reason."""
        shell_timeout_seconds: int | None = Field(default=None, ge=0)
        """Time limit of each foreground command; Qwen Code's two minutes if unset, none if 0."""
        output: Literal["text", "json", "stream-json"] = "text"
        """Content of the run's log: the final answer, or every message as JSON."""

    options: Options
    version = VERSION
    takes_tools = True

    def fetch(self) -> dict[PurePosixPath, Path]:
        return {NODE: node(), QWEN: asset(f"qwen-code-{VERSION}-{lock_tag(LOCK)}", _make)}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        files = {context.home / SETTINGS: json_file(self._settings(context))}
        if self.options.system_prompt is not None:
            files[context.home / PROMPT] = self.options.system_prompt.encode()
        return files

    def command(self, context: HarnessContext) -> Command:
        options = self.options
        arguments = ["--approval-mode", "yolo", "--output-format", options.output]
        if options.max_turns is not None:
            arguments += ["--max-session-turns", str(options.max_turns)]
        if options.append_system_prompt is not None:
            arguments.append(f"--append-system-prompt={options.append_system_prompt}")
        env = {
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(context.home / SETTINGS),
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
            "QWEN_TELEMETRY_ENABLED": "false",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "1",
            # A slow engine is not a failed one: the session's budgets decide when to stop waiting.
            "QWEN_STREAM_MAX_LIFETIME_MS": "0",
            "OPENAI_BASE_URL": f"{context.gateway_url}/v1",
            "OPENAI_API_KEY": context.key,
            "OPENAI_MODEL": context.model,
        }
        if options.system_prompt is not None:
            env["QWEN_SYSTEM_MD"] = str(context.home / PROMPT)
        return Command(
            argv=(
                str(context.paths[NODE] / "bin" / "node"),
                # Qwen Code's own launcher would add these.
                "--expose-gc",
                str(context.paths[QWEN] / "node_modules" / PACKAGE / "cli.js"),
                *arguments,
            ),
            env=env,
            stdin=plain_text(context.instruction),
        )

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        options = self.options
        tools: dict[str, Any] = {"disabled": list(options.disabled_tools)}
        if options.shell_timeout_seconds is not None:
            tools["shell"] = {"defaultTimeoutMs": options.shell_timeout_seconds * 1000}
        return {
            "general": {"enableAutoUpdate": False, "chatRecording": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "ide": {"enabled": False},
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
            # Memories are useless in a temporary home, and collecting them costs a model call.
            "memory": {
                "enableManagedAutoMemory": False,
                "enableManagedAutoDream": False,
                "enableAutoSkill": False,
            },
            "agents": {"crossSessionMessaging": False},
            "skills": {"disabledLevels": [] if options.skills else ["bundled"]},
            "tools": tools,
            "mcpServers": mcp_servers(context, url="httpUrl", **OF_EVERY_SERVER),
            "model": {
                "generationConfig": {
                    "contextWindowSize": context.max_context,
                    "maxRetries": options.retries,
                    "timeout": 0,
                    "streamIdleTimeoutMs": 0,
                    "samplingParams": {"max_tokens": context.max_tokens},
                }
            },
        }


def _make(into: Path) -> None:
    install_npm(LOCK, into)
    for ripgrep in (into / "node_modules" / PACKAGE / "vendor" / "ripgrep").glob("*/rg"):
        # It lacks its exec bit in the tarball, and Qwen Code cannot set it on a read-only mount.
        ripgrep.chmod(0o755)
