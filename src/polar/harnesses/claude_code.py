"""Claude Code (npm `@anthropic-ai/claude-code`), run headless over Anthropic's Messages API."""

from __future__ import annotations

import asyncio
from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, Field

from polar.assets.node import Build, native
from polar.harnesses.base import Harness, HarnessContext, Installation
from polar.runtimes.base import Command, ToolDirectory

VERSION = "2.1.325"
BUILDS = {
    "linux-x86_64": Build(
        "@anthropic-ai/claude-code-linux-x64",
        VERSION,
        "sha512-BqZzMvP/zgLLL34S+7OzbG+cyoFp7gwWHU5koVwsyMlTAz+0zZAmbY+UkzvtN2RXxp6AcMenbYIjQJxoXfUY3w==",
    ),
    "linux-aarch64": Build(
        "@anthropic-ai/claude-code-linux-arm64",
        VERSION,
        "sha512-NCvQcOxr685Y4mkYUjQT8l/Ouzw0k2xWloWeyzfsUtWiOedHosPkaW6XCSpzAl1dMuvDNBF97qpWgVDrSdK2Vw==",
    ),
    "darwin-x86_64": Build(
        "@anthropic-ai/claude-code-darwin-x64",
        VERSION,
        "sha512-+wTK42IT/b5GZHxAVVMLNnCHG/CtngztTE6fNn5s4h47LNXrDQz2RpPLsY5XHr8astNzk7GWPU8GecCG+5EEIQ==",
    ),
    "darwin-arm64": Build(
        "@anthropic-ai/claude-code-darwin-arm64",
        VERSION,
        "sha512-Ds1f1B+qy2BWDI+VnmDHwkNyTbXCwFrBtrinPD95RBmUubFJu9nCzMgn+wrg5VwwF6vtkkzGexogneZIYZKb6A==",
    ),
}

CLAUDE = PurePosixPath("/opt/polar/claude-code")

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
"""Every name under which Claude Code may choose a model, for side calls and sub-agents too."""


class ClaudeCode(Harness):
    """Claude Code with a private configuration directory in HOME and every permission given."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        tools: tuple[str, ...] | None = None
        """Which built-in tools (Bash, Edit, Read, …) are offered; None: Claude Code's default, (): none."""
        max_turns: int | None = Field(default=None, ge=1)
        """How many model calls a run may make; then it ends with exit code 1."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Claude Code's own."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Added after Claude Code's own."""
        bare: bool = False
        """Claude Code's minimal mode: a short prompt, no memory, no CLAUDE.md, no background work."""
        effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
        """Claude Code's `--effort`; None: its default."""
        compaction: bool = True
        """Whether a context that is nearly full is summarised, which is a model call of its own."""
        retries: int = Field(default=10, ge=0, le=100)
        """How often a model call that failed for a passing reason is repeated."""
        output: Literal["text", "json", "stream-json"] = "text"
        """What the log of the run holds: the final answer, one summary, or every event as JSON lines."""

    options: Options

    async def install(self) -> Installation:
        root = await asyncio.to_thread(native, "claude-code", VERSION, BUILDS)
        return Installation(version=VERSION, tools=(ToolDirectory(root, CLAUDE),))

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        return {path: text.encode() for path, text in self._prompts(context).values()}

    def command(self, context: HarnessContext) -> Command:
        return Command(
            argv=(str(context.paths[CLAUDE] / "claude"), *self._arguments(context)),
            env=self._environment(context),
            # As an argument it could be too long or begin with a dash.
            stdin=_not_a_command(context.instruction).encode(),
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
        for flag, (path, _) in self._prompts(context).items():
            arguments += [flag, str(path)]
        return arguments

    def _environment(self, context: HarnessContext) -> dict[str, str]:
        env = {
            "ANTHROPIC_BASE_URL": context.gateway_url,
            "ANTHROPIC_API_KEY": context.key,
            **dict.fromkeys(MODEL_VARIABLES, context.model),
            "CLAUDE_CONFIG_DIR": str(_state(context)),
            "CLAUDE_CODE_TMPDIR": str(context.tmp),
            # A model it does not know is taken for one with a context of a million tokens.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.max_context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            "CLAUDE_CODE_MAX_RETRIES": str(self.options.retries),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # The billing header in the system prompt would differ from call to call.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            # As root it skips permissions only where it is told that it is in a sandbox.
            "IS_SANDBOX": "1",
        }
        if not self.options.compaction:
            env["DISABLE_COMPACT"] = "1"
        return env

    def _prompts(self, context: HarnessContext) -> dict[str, tuple[PurePosixPath, str]]:
        """Flag → file and its text."""
        texts = {
            "--system-prompt-file": self.options.system_prompt,
            "--append-system-prompt-file": self.options.append_system_prompt,
        }
        return {
            flag: (_state(context) / f"{flag.strip('-').removesuffix('-file')}.md", text)
            for flag, text in texts.items()
            if text is not None
        }


def _not_a_command(instruction: str) -> str:
    """Claude Code would run `/word …` as its own command; after a line break it is text for the model."""
    return f"\n{instruction}" if instruction.startswith("/") else instruction


def _state(context: HarnessContext) -> PurePosixPath:
    return context.home / ".claude"
