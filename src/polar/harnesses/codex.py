"""Codex CLI (npm `@openai/codex`), run headless over OpenAI's Responses API."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from polar.assets.cache import asset
from polar.assets.node import native
from polar.errors import NotInstalled
from polar.harnesses.base import LOCKS, Harness, HarnessContext, PinnedHarness, mcp_servers
from polar.runtimes.base import Command

VERSION = "0.166.0"
CODEX = PurePosixPath("/opt/polar/codex")
STATE = ".codex"
CATALOG = f"{STATE}/models.json"

PROVIDER = "polar"
KEY_VARIABLE = "POLAR_KEY"

TEMPLATE_SLUG = "gpt-5.5"
"""The bundled model that the served one is modelled on: newer ones call their tools from JavaScript."""

OF_EVERY_SERVER: dict[str, Any] = {
    "required": True,
    "startup_timeout_sec": 120,
    "default_tools_approval_mode": "approve",
}
"""What Codex is told of each of the task's tool servers, without which it would go on where one fails."""


class Codex(PinnedHarness):
    """Codex with a private CODEX_HOME, and its own sandbox and approvals off, since it runs in ours."""

    class Options(Harness.Options):
        system_prompt: str | None = Field(default=None, min_length=1)
        """Replaces Codex's own system prompt."""
        append_system_prompt: str | None = Field(default=None, min_length=1)
        """Sent as developer instructions after Codex's own prompt."""
        effort: Literal["low", "medium", "high", "xhigh"] = "medium"
        """Codex's `model_reasoning_effort`."""
        context_files: bool = True
        """Whether AGENTS.md of the workspace is included in the prompt."""
        retries: int = Field(default=4, ge=0, le=100)
        """Number of retries for a model call that fails for a transient reason."""
        output: Literal["text", "json"] = "text"
        """Content of the run's log: the conversation as text, or every event as JSON lines."""

    options: Options
    version = VERSION
    takes_tools = True

    def fetch(self) -> dict[PurePosixPath, Path]:
        _template()
        return {CODEX: _download()}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        catalog = {"models": [self._model(context)]}
        return {
            context.home / STATE / "config.toml": _toml(self._config(context)).encode(),
            context.home / CATALOG: json.dumps(catalog).encode(),
        }

    def command(self, context: HarnessContext) -> Command:
        arguments = ["exec", "--strict-config", "--skip-git-repo-check", "--ephemeral"]
        arguments += ["--dangerously-bypass-approvals-and-sandbox", "--color", "never"]
        if self.options.output == "json":
            arguments.append("--json")
        return Command(
            # The npm package's launcher only finds this binary; `-` reads stdin.
            argv=(str(context.paths[CODEX] / "bin" / "codex"), *arguments, "-"),
            env={"CODEX_HOME": str(context.home / STATE), KEY_VARIABLE: context.key},
            stdin=context.instruction.encode(),
        )

    def _model(self, context: HarnessContext) -> dict[str, Any]:
        """Describe the served model like one that Codex knows, since unknown models get no apply_patch."""
        model: dict[str, Any] = {
            **_template(),
            "slug": context.model,
            "display_name": context.model,
            "default_reasoning_level": self.options.effort,
            "context_window": context.max_context,
            "max_context_window": context.max_context,
            "supports_search_tool": False,
            "upgrade": None,
            "additional_speed_tiers": [],
            "service_tiers": [],
        }
        if self.options.system_prompt is not None:
            model |= {"base_instructions": self.options.system_prompt, "model_messages": None}
        return model

    def _config(self, context: HarnessContext) -> dict[str, Any]:
        options = self.options
        config: dict[str, Any] = {
            "model": context.model,
            "model_provider": PROVIDER,
            "model_catalog_json": str(context.home / CATALOG),
            "model_reasoning_effort": options.effort,
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
            "check_for_update_on_startup": False,
            "web_search": "disabled",
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "history": {"persistence": "none"},
            # Each of these contacts outside hosts, or offers tools that do.
            "features": dict.fromkeys(
                ("plugins", "remote_plugin", "apps", "tool_suggest", "goals", "multi_agent"), False
            ),
            "model_providers": {PROVIDER: self._provider(context)},
            "mcp_servers": mcp_servers(context, headers="http_headers", **OF_EVERY_SERVER),
        }
        if not options.context_files:
            config["project_doc_max_bytes"] = 0
        if options.append_system_prompt is not None:
            config["developer_instructions"] = options.append_system_prompt
        return config

    def _provider(self, context: HarnessContext) -> dict[str, Any]:
        return {
            "name": PROVIDER,
            "base_url": f"{context.gateway_url}/v1",
            "env_key": KEY_VARIABLE,
            "wire_api": "responses",
            "supports_websockets": False,
            "request_max_retries": self.options.retries,
            "stream_max_retries": self.options.retries,
            "stream_idle_timeout_ms": 300_000,
        }


def _download() -> Path:
    (root,) = native("codex", VERSION, LOCKS / "codex.json").glob("vendor/*")
    return root


def _template() -> dict[str, Any]:
    """Return the binary's description of the template model, cached per version."""
    kept = asset(f"codex-model-{VERSION}", _write_template) / "model.json"
    template: dict[str, Any] = json.loads(kept.read_text())
    return template


def _write_template(into: Path) -> None:
    binary = _download() / "bin" / "codex"
    with tempfile.TemporaryDirectory(dir=into) as home:
        run = subprocess.run(
            [str(binary), "debug", "models", "--bundled"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={"HOME": home, "CODEX_HOME": home},
        )
    models = json.loads(run.stdout)["models"] if run.returncode == 0 else []
    template = next((model for model in models if model["slug"] == TEMPLATE_SLUG), None)
    if template is None:
        raise NotInstalled(
            f"codex {VERSION} does not list its model {TEMPLATE_SLUG} on this machine",
            hint=f"run: {binary} debug models --bundled",
        )
    (into / "model.json").write_text(json.dumps(template))


def _toml(table: dict[str, Any], prefix: str = "") -> str:
    """Format a table as TOML; its strings, booleans, integers and lists are valid as JSON in both."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines) + "\n"


def _value(value: str | bool | int | list[str]) -> str:
    # TOML has no surrogate escapes for characters beyond 16 bits and, unlike JSON, needs DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
