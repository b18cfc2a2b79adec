"""Claude Code (npm `@anthropic-ai/claude-code`), run headless over Anthropic's Messages API."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field

from polar.assets.node import native
from polar.harnesses.base import LOCKS, Harness, HarnessContext, PinnedHarness, plain_text, prompt_files
from polar.runtimes.base import Command

VERSION = "2.1.325"
CLAUDE = PurePosixPath("/opt/polar/claude-code")
STATE = ".claude"

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


class ClaudeCode(PinnedHarness):
    """Claude Code with a private configuration directory in HOME and every permission given."""

    class Options(Harness.Options):
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
    version = VERSION

    def fetch(self) -> dict[PurePosixPath, Path]:
        return {CLAUDE: native("claude-code", VERSION, LOCKS / "claude_code.json")}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        return dict(self._prompts(context).values())

    def command(self, context: HarnessContext) -> Command:
        return Command(
            argv=(str(context.paths[CLAUDE] / "claude"), *self._arguments(context)),
            env=self._environment(context),
            # As an argument it could be too long or begin with a dash.
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

    def _prompts(self, context: HarnessContext) -> dict[str, tuple[PurePosixPath, bytes]]:
        options = self.options
        prompts = {
            "--system-prompt-file": options.system_prompt,
            "--append-system-prompt-file": options.append_system_prompt,
        }
        return prompt_files(context.home / STATE, prompts)
