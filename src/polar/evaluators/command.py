"""Scores a session by running a command in its sandbox once the agent is gone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, Field

from polar.evaluators.base import EvaluationContext, EvaluationFailed, Evaluator
from polar.evaluators.output import is_cut, report_of, tail
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import Command, ExecResult, PathRefused, SandboxError

LOG_NAME = "evaluator"
LAST_LINE_BYTES = 1024 * 1024
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


class RewardSource(StrEnum):
    """Where the reward is read from."""

    AUTO = "auto"
    """First of: a JSON object with a `reward` on the last line, whatever the exit code; a number on
    the last line, if the exit code is 0; the exit code."""
    EXIT_CODE = "exit_code"
    """1.0 for exit code 0, else 0.0."""
    LAST_LINE = "last_line"
    """The last line of stdout that is not blank: a number, or a JSON object
    `{"reward": number, "components": {name: number}}`. Anything else is a failed evaluation."""


class CommandEvaluator(Evaluator):
    """Runs `command` in the workspace as the agent left it, with `files` put over it."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        command: str | list[str] = Field(min_length=1)
        """A string is run by `/bin/sh -c`, a list as it is."""
        files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
        """Put into the workspace only now, so the agent never saw them."""
        reward: RewardSource = RewardSource.AUTO

    options: Options

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        try:
            for name, file in self.options.files.items():
                await context.sandbox.upload(PurePosixPath(name), file.data, executable=file.executable)
        except PathRefused as error:
            # Only the agent can have put a link or a file there, and must not escape its score by it.
            return Verdict(reward=0.0, report=f"the evaluator's files could not be put in place: {error}")
        except SandboxError as error:
            raise EvaluationFailed(f"the evaluator's files could not be put in place: {error}") from error
        result = await self._run(context)
        reward, components = self._judge(result)
        return Verdict(reward=reward, components=components, report=report_of(result))

    async def _run(self, context: EvaluationContext) -> ExecResult:
        command = self.options.command
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        try:
            result = await context.sandbox.exec(Command(argv), timeout=context.timeout, log_name=LOG_NAME)
        except SandboxError as error:
            raise EvaluationFailed(f"the evaluator's command could not be run: {error}") from error
        if result.timed_out:
            raise EvaluationFailed(
                f"the evaluator's command did not end within {context.timeout:g} s",
                hint="raise budgets.evaluate_seconds",
            )
        return result

    def _judge(self, result: ExecResult) -> tuple[float, dict[str, float]]:
        source = self.options.reward
        by_exit_code = 1.0 if result.exit_code == 0 else 0.0
        if source is RewardSource.EXIT_CODE:
            return by_exit_code, {}
        if is_cut(result.stdout):
            # Code under test may have printed so much just to hide what is said of it at the end.
            raise EvaluationFailed(
                "the evaluator's command printed more than is kept, and its last line is not known",
                hint="print less, raise runtime.options.output_limit, or set reward: exit_code",
            )
        line = _last_line(result.stdout)
        if source is RewardSource.LAST_LINE:
            return _parse(line)
        if _is_verdict(line) or (result.exit_code == 0 and _NUMBER.fullmatch(line)):
            return _parse(line)
        return by_exit_code, {}


def _is_verdict(line: str) -> bool:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "reward" in document


def _parse(line: str) -> tuple[float, dict[str, float]]:
    """The reward and its components that a line states."""
    if _NUMBER.fullmatch(line):
        return _finite(float(line), "the last line"), {}
    if not _is_verdict(line):
        raise EvaluationFailed(
            f"the last line of the evaluator's output is no reward: {line[:200]!r}",
            hint='print a number or {"reward": number, "components": {name: number}}',
        )
    document: Mapping[str, Any] = json.loads(line)
    components = document.get("components", {})
    if not isinstance(components, dict):
        raise EvaluationFailed("components: must be an object of numbers")
    return _finite(document["reward"], "reward"), {
        name: _finite(value, f"components.{name}") for name, value in components.items()
    }


def _finite(value: Any, what: str) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        value = "an integer beyond all floats"
    raise EvaluationFailed(f"{what}: must be a finite number, not {str(value)[:200]}")


def _last_line(path: Path) -> str:
    lines = tail(path, LAST_LINE_BYTES).decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
