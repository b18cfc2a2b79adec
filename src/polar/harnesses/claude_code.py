"""Claude Code (npm `@anthropic-ai/claude-code`), run headless over Anthropic's Messages API."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from polar.assets.node import native
from polar.harnesses.base import (
    LOCKS,
    Harness,
    HarnessContext,
    PinnedHarness,
    json_file,
    mcp_servers,
    plain_text,
    prompt_files,
)
from polar.runtimes.base import Command

VERSION = "2.1.325"
CLAUDE = PurePosixPath("/opt/polar/claude-code")
STATE = ".claude"
TOOLS = f"{STATE}/polar-tools.json"

MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Every variable by which Claude Code chooses a model, including side calls and sub-agents."""


class ClaudeCode(PinnedHarness):
    """Claude Code with a private configuration directory in HOME and all permissions granted."""

    class Options(Harness.Options):
        tools: tuple[str, ...] | None = None
        """Built-in tools to offer (Bash, Edit, Read, …); Claude Code's default if unset, none if empty."""
        max_turns: int | None = Field(default=None, ge=1)
        """Maximum number of model calls; a run that reaches it ends with exit code 1."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Claude Code's own system prompt."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Appended to Claude Code's own system prompt."""
        bare: bool = False
        """Claude Code's minimal mode: short prompt, no memory, no CLAUDE.md, no background work."""
        effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
        """Claude Code's `--effort`; its default if unset."""
        compaction: bool = True
        """Whether to summarise a context that is nearly full, which takes a separate model call."""
        retries: int = Field(default=10, ge=0, le=100)
        """Number of retries for a model call that fails for a transient reason."""
        output: Literal["text", "json", "stream-json"] = "text"
        """Content of the run's log: the final answer, one summary, or every event as JSON lines."""

    options: Options
    version = VERSION
    takes_tools = True

    def fetch(self) -> dict[PurePosixPath, Path]:
        return {CLAUDE: native("claude-code", VERSION, LOCKS / "claude_code.json")}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        files = dict(self._prompts(context).values())
        if context.tools:
            files[context.home / TOOLS] = json_file({"mcpServers": self._servers(context)})
        return files

    def command(self, context: HarnessContext) -> Command:
        return Command(
            argv=(str(context.paths[CLAUDE] / "claude"), *self._arguments(context)),
            env=self._environment(context),
            # An argument could be too long or begin with a dash.
            stdin=plain_text(context.instruction),
        )

    def _arguments(self, context: HarnessContext) -> list[str]:
        options = self.options
        arguments = ["--print", "--dangerously-skip-permissions", "--no-session-persistence"]
        arguments += ["--model", context.model, "--output-format", options.output]
        if options.output == "stream-json":
            arguments.append("--verbose")  # Without it Claude Code refuses this format.
        if options.tools is not None:
            arguments += ["--tools", ",".join(options.tools)]
        if options.max_turns is not None:
            arguments += ["--max-turns", str(options.max_turns)]
        if options.effort is not None:
            arguments += ["--effort", options.effort]
        if options.bare:
            arguments.append("--bare")
        if context.tools:
            arguments += ["--strict-mcp-config", "--mcp-config", str(context.home / TOOLS)]
        for flag, (path, _) in self._prompts(context).items():
            arguments += [flag, str(path)]
        return arguments

    def _environment(self, context: HarnessContext) -> dict[str, str]:
        env = {
            "ANTHROPIC_BASE_URL": context.gateway_url,
            "ANTHROPIC_API_KEY": context.key,
            **dict.fromkeys(MODEL_VARIABLES, context.model),
            "CLAUDE_CONFIG_DIR": str(context.home / STATE),
            "CLAUDE_CODE_TMPDIR": str(context.tmp),
            # Claude Code assumes a context of a million tokens for models it does not know.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.max_context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            "CLAUDE_CODE_MAX_RETRIES": str(self.options.retries),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # The billing header in the system prompt would differ from call to call.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            # As root it skips permissions only if it is told that it runs in a sandbox.
            "IS_SANDBOX": "1",
        }
        if not self.options.compaction:
            env["DISABLE_COMPACT"] = "1"
        return env

    def _servers(self, context: HarnessContext) -> dict[str, Any]:
        return {
            name: {"type": "stdio" if "command" in server else "http", "alwaysLoad": True, **server}
            for name, server in mcp_servers(context).items()
        }

    def _prompts(self, context: HarnessContext) -> dict[str, tuple[PurePosixPath, bytes]]:
        options = self.options
        prompts = {
            "--system-prompt-file": options.system_prompt,
            "--append-system-prompt-file": options.append_system_prompt,
        }
        return prompt_files(context.home / STATE, prompts)
