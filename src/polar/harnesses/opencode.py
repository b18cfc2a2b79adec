"""OpenCode (npm `opencode-ai`), run headless over chat completions."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from polar.assets.node import native
from polar.harnesses.base import LOCKS, Harness, HarnessContext, PinnedHarness, json_file
from polar.runtimes.base import Command

VERSION = "1.18.33"
OPENCODE = PurePosixPath("/opt/polar/opencode")
STATE = ".config/opencode"
APPENDED = f"{STATE}/polar-instructions.md"

PROVIDER = "polar"
KEY_VARIABLE = "POLAR_KEY"

Tool = Literal["bash", "read", "edit", "glob", "grep", "task", "skill", "todowrite", "webfetch"]


class OpenCode(PinnedHarness):
    """OpenCode with its configuration in HOME; the workspace's own `opencode.json` is not read."""

    class Options(Harness.Options):
        tools: tuple[Tool, ...] | None = None
        """Which tools the model is offered; None: OpenCode's default, (): none. `edit` includes write."""
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces OpenCode's own."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Added after OpenCode's own."""
        max_turns: int | None = Field(default=None, ge=1)
        """How many model calls OpenCode makes before it asks for a final answer without tools."""
        reasoning: bool = False
        """Whether the model is declared as one that thinks, so that its thinking is sent back to it."""
        compaction: bool = True
        """Whether OpenCode summarises a context that is nearly full, which is a model call of its own."""
        title: bool = False
        """Whether OpenCode asks the model for a title of the session, a call beside the task."""
        output: Literal["default", "json"] = "default"
        """What the log of the run holds: the conversation as text, or every event as JSON lines."""

    options: Options
    version = VERSION

    def fetch(self) -> dict[PurePosixPath, Path]:
        # The locked build is the baseline, which also runs on processors without AVX2.
        return {OPENCODE: native("opencode", VERSION, LOCKS / "opencode.json")}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        state = context.home / STATE
        # OpenCode would fetch its plugin library in the background, unless this says it has been fetched.
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
            # As an argument it would reach the model in literal quotes.
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
            "permission": self._permission(),
            "model": model,
            "small_model": model,
            "enabled_providers": [PROVIDER],
            "provider": {PROVIDER: self._provider(context)},
            "agent": {"build": self._agent(), "title": {"disable": not options.title}},
            "compaction": {"auto": options.compaction},
        }
        if options.append_system_prompt is not None:
            config["instructions"] = [str(context.home / APPENDED)]
        return config

    def _permission(self) -> str | dict[str, str]:
        """What is denied altogether is not offered to the model."""
        if self.options.tools is None:
            return "allow"
        return {"*": "deny", "external_directory": "allow", **dict.fromkeys(self.options.tools, "allow")}

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
