"""Scores a session by running a command over the agent's work."""

from __future__ import annotations

import json
import math
import re
import secrets
from enum import StrEnum
from typing import Any

from pydantic import Field

from polar.evaluators.base import EvaluationContext, EvaluationFailed, NoVerdict
from polar.evaluators.inside import SCRIPTS, place, report_of, run_grader, truncate
from polar.evaluators.tampering import rivals, tampering_remarks
from polar.evaluators.workspace import SandboxOptions, WorkspaceEvaluator, graded_workspace
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import ExecResult, Sandbox

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


class RewardSource(StrEnum):
    """Where the reward is read from. A non-zero exit code gets the lowest reward."""

    AUTO = "auto"
    """The reward that the command stated, else 1.0."""
    EXIT_CODE = "exit_code"
    """Always 1.0."""
    STATED = "stated"
    """The reward that the command stated; without one, the evaluation fails."""


class CommandRun:
    """The result of the command; `key` begins the lines that state its reward."""

    def __init__(self, result: ExecResult, key: str) -> None:
        self.result = result
        self._key = key

    @property
    def report(self) -> str:
        ending = "the command timed out\n" if self.result.timed_out else ""
        return ending + report_of(self.result).replace(f"{self._key} ", "reward ")

    @property
    def stated_reward(self) -> str | None:
        """The last reward that the command stated, or None."""
        start = f"{self._key} ".encode()
        found = [line for line in self.result.stdout.lines() if line.startswith(start)]
        return found[-1][len(start) :].decode(errors="replace").strip() if found else None

    def reward(self) -> tuple[float, dict[str, float]]:
        """Return the stated reward with its components; raise EvaluationFailed if there is none."""
        if self.stated_reward is None:
            raise EvaluationFailed(
                f"the evaluator's command stated no reward: {self.report[-2000:]}",
                hint="state it with `reward NUMBER`, or set `reward: exit_code`",
            )
        return parse_reward(self.stated_reward)


class CommandEvaluator(WorkspaceEvaluator):
    """Runs `command` over the agent's work, after adding `files`.

    A string is a shell script that states a reward with the function `reward`: `reward 0.5`, or
    `reward '{"reward": 0.5, "components": {"style": 1}}'`. A list has no shell: its program reads a key from
    the first line of its input, and prints a line of the key, a space and the reward. No other output
    counts, since the agent's own code may have printed it.
    """

    class Options(SandboxOptions):
        command: str | list[str] = Field(min_length=1)
        """The command; a string is run with `/bin/sh -c`, a list directly."""
        files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
        """Hidden files, added to the workspace after the agent has ended."""
        reward: RewardSource = RewardSource.AUTO

    options: Options

    @property
    def _may_state(self) -> bool:
        """Whether truncated output may have lost a statement, which only the shell's function can make."""
        command = self.options.command
        return not isinstance(command, str) or "reward" in command or "polar_key" in command

    async def grade(self, context: EvaluationContext) -> Verdict:
        guarded = tuple(rivals(self.options.files))
        async with graded_workspace(context, self.options, guarded) as prepared:
            run = await self._run(context, prepared.sandbox)
            reward, components = self._judge(run)
        findings = prepared.findings
        return Verdict(
            reward=reward,
            components=components | ({"tampering": float(len(findings))} if findings else {}),
            report=truncate("\n".join([*tampering_remarks(findings), run.report])),
        )

    async def _run(self, context: EvaluationContext, sandbox: Sandbox) -> CommandRun:
        await place(sandbox, self.options.files)
        key = secrets.token_hex(16)
        command, limit = self.options.command, self.options.limit(context)
        if isinstance(command, str):
            command = SCRIPTS["reward.sh"] + command
        stdin = f"{key}\n".encode()
        result = await run_grader(command, sandbox, env=self.options.env, timeout=limit, stdin=stdin)
        return CommandRun(result, key)

    def _judge(self, run: CommandRun) -> tuple[float, dict[str, float]]:
        source = self.options.reward
        if run.result.timed_out or run.result.exit_code != 0:
            return self.lowest_reward, {}
        if source is RewardSource.EXIT_CODE:
            return 1.0, {}
        is_whole = not (self._may_state and run.result.stdout.is_cut)
        if source is RewardSource.AUTO and run.stated_reward is None and is_whole:
            return 1.0, {}
        try:
            return run.reward()
        except EvaluationFailed as error:
            raise NoVerdict(error.message, hint=error.hint) from None


def parse_reward(text: str) -> tuple[float, dict[str, float]]:
    if _NUMBER.fullmatch(text):
        return _finite(float(text), "the reward"), {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "reward" not in document:
        raise EvaluationFailed(
            f"the evaluator's command stated an invalid reward: {text[:200]!r}",
            hint='state a number or {"reward": number, "components": {name: number}}',
        )
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
        value = "an integer too large for a float"
    raise EvaluationFailed(f"{what}: must be a finite number, not {str(value)[:200]}")
