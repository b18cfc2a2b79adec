"""Scores a session by running a command over the agent's work once the agent is gone."""

from __future__ import annotations

import json
import math
import re
import secrets
from enum import StrEnum
from typing import Any

from pydantic import Field

from polar.evaluators.base import EvaluationContext, EvaluationFailed, NoVerdict
from polar.evaluators.inside import SCRIPTS, cut, place, report_of, run_grader
from polar.evaluators.tampering import rivals, tampering_remarks
from polar.evaluators.workspace import Placed, WorkspaceEvaluator, graded_workspace
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import ExecResult, Sandbox

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


class RewardSource(StrEnum):
    """Where the reward is read from. Another exit code than 0 gets the lowest reward."""

    AUTO = "auto"
    """What the command stated, else 1.0."""
    EXIT_CODE = "exit_code"
    """1.0, whatever it stated."""
    STATED = "stated"
    """What the command stated; nothing stated is a failed evaluation."""


class Run:
    """What the command did; `key` begins the lines by which it states its reward."""

    def __init__(self, result: ExecResult, key: str) -> None:
        self.result = result
        self._key = key

    @property
    def report(self) -> str:
        """For people; the key is left out of what the command printed."""
        ending = "the command did not end in time\n" if self.result.timed_out else ""
        return ending + report_of(self.result).replace(f"{self._key} ", "reward ")

    @property
    def stated(self) -> str | None:
        """The last reward that was stated; None if none was."""
        start = f"{self._key} ".encode()
        found = [line for line in self.result.stdout.lines() if line.startswith(start)]
        return found[-1][len(start) :].decode(errors="replace").strip() if found else None

    def reward(self) -> tuple[float, dict[str, float]]:
        """The reward that was stated, with its components; EvaluationFailed if there is none."""
        if self.stated is None:
            raise EvaluationFailed(
                f"the evaluator's command states no reward: {self.report[-2000:]}",
                hint="state it with: reward NUMBER; or set reward: exit_code",
            )
        return parse_reward(self.stated)


class CommandEvaluator(WorkspaceEvaluator):
    """Runs `command` over the agent's work, with `files` put over it.

    A command states a reward with the shell's function `reward`, which every string has: `reward 0.5`, or
    `reward '{"reward": 0.5, "components": {"style": 1}}'`. A list has no shell: its program reads a key, the
    first line of its input, and prints a line of the key, a blank and the reward. Nothing else that is
    printed counts, since the agent's own code may have printed it.
    """

    class Options(Placed):
        command: str | list[str] = Field(min_length=1)
        """A string is run by `/bin/sh -c`, a list as it is."""
        files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
        """Put into the workspace only now, so the agent never saw them."""
        reward: RewardSource = RewardSource.AUTO

    options: Options

    @property
    def _may_state(self) -> bool:
        """Whether a statement may be missing from output that was cut; only the shell itself makes one."""
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
            report=cut("\n".join([*tampering_remarks(findings), run.report])),
        )

    async def _run(self, context: EvaluationContext, sandbox: Sandbox) -> Run:
        await place(sandbox, self.options.files)
        key = secrets.token_hex(16)
        command, limit = self.options.command, self.options.limit(context)
        if isinstance(command, str):
            command = SCRIPTS["reward.sh"] + command
        stdin = f"{key}\n".encode()
        result = await run_grader(command, sandbox, env=self.options.env, timeout=limit, stdin=stdin)
        return Run(result, key)

    def _judge(self, run: Run) -> tuple[float, dict[str, float]]:
        source = self.options.reward
        if run.result.timed_out or run.result.exit_code != 0:
            return self.lowest_reward, {}
        if source is RewardSource.EXIT_CODE:
            return 1.0, {}
        is_whole = not (self._may_state and run.result.stdout.is_cut)
        if source is RewardSource.AUTO and run.stated is None and is_whole:
            return 1.0, {}
        try:
            return run.reward()
        except EvaluationFailed as error:
            raise NoVerdict(error.message, hint=error.hint) from None


def parse_reward(text: str) -> tuple[float, dict[str, float]]:
    """The reward and its components that a command stated."""
    if _NUMBER.fullmatch(text):
        return _finite(float(text), "the reward"), {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "reward" not in document:
        raise EvaluationFailed(
            f"the evaluator's command states what is no reward: {text[:200]!r}",
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
        value = "an integer beyond all floats"
    raise EvaluationFailed(f"{what}: must be a finite number, not {str(value)[:200]}")
