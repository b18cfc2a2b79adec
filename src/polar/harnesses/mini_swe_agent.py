"""mini-swe-agent (PyPI `mini-swe-agent`), run headless over chat completions."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import Field

from polar.assets.cache import asset, lock_tag
from polar.assets.pypi import PYTHON_TAG, install_python, python_program, python_root
from polar.harnesses.base import LOCKS, Harness, HarnessContext, PinnedHarness
from polar.harnesses.preset import LAUNCH
from polar.runtimes.base import Command

VERSION = "2.4.6"
LOCK = LOCKS / "mini_swe_agent.txt"

# Python may load its shared library by absolute path, so it is mounted at the same place.
PYTHON = PurePosixPath(python_root())
MINI = PurePosixPath("/opt/polar/mini-swe-agent")
STATE = ".config/mini-swe-agent"
CONFIG = f"{STATE}/polar.yaml"
PROGRAM = "minisweagent.run.mini:app"


class MiniSweAgent(PinnedHarness):
    """mini-swe-agent with its default configuration, overlaid with Polar's.

    It ends when the model runs `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`. It tells the model about
    answers without a tool call, and gives up after three in a row, with exit code 0.
    """

    class Options(Harness.Options):
        max_turns: int | None = Field(default=None, ge=1)
        """Maximum number of model calls."""
        command_timeout_seconds: int | None = Field(default=None, ge=1)
        """Time limit for each command of the model; mini-swe-agent's 30 seconds if unset."""
        system_template: str | None = Field(default=None, min_length=1)
        """Jinja template that replaces the system message."""
        instance_template: str | None = Field(default=None, min_length=1)
        """Jinja template with `{{task}}` that replaces the first user message."""
        retries: int = Field(default=3, ge=0, le=100)
        """Number of retries for a failed model call, the first after 4 seconds."""

    options: Options
    version = VERSION

    def fetch(self) -> dict[PurePosixPath, Path]:
        name = f"mini-swe-agent-{VERSION}-{lock_tag(LOCK)}-{PYTHON_TAG}"
        return {PYTHON: python_root(), MINI: asset(name, partial(install_python, LOCK))}

    def files(self, context: HarnessContext) -> dict[PurePosixPath, bytes]:
        return {context.home / CONFIG: yaml.safe_dump(self._config(context)).encode()}

    def command(self, context: HarnessContext) -> Command:
        return Command(
            argv=(
                str(context.paths[PYTHON] / python_program()),
                # Without -I and -S the workspace or the interpreter's own packages could take precedence.
                *("-I", "-S", "-c", LAUNCH, str(context.paths[MINI]), PROGRAM),
                *("--config", "mini.yaml", "--config", str(context.home / CONFIG)),
                *("--output", str(context.home / STATE / "trajectory.json")),
            ),
            env={
                "MSWEA_GLOBAL_CONFIG_DIR": str(context.home / STATE),
                "MSWEA_CONFIGURED": "true",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self.options.retries + 1),
                # Without it litellm fetches its price list from the network.
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENAI_API_KEY": context.key,
            },
        )

    def _config(self, context: HarnessContext) -> dict[str, Any]:
        options = self.options
        agent: dict[str, Any] = {"mode": "yolo", "confirm_exit": False, "cost_limit": 0}
        own = {
            "step_limit": options.max_turns,
            "system_template": options.system_template,
            "instance_template": options.instance_template,
        }
        agent |= {name: value for name, value in own.items() if value is not None}
        timeout = options.command_timeout_seconds
        return {
            "run": {"task": context.instruction},
            "agent": agent,
            "environment": {} if timeout is None else {"timeout": timeout},
            "model": {
                "model_name": f"openai/{context.model}",
                "cost_tracking": "ignore_errors",
                "model_kwargs": {
                    "api_base": f"{context.gateway_url}/v1",
                    "max_tokens": context.max_tokens,
                    # mini-swe-agent repeats failed calls itself.
                    "max_retries": 0,
                },
            },
        }
