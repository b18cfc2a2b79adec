"""Scores a session with the verifier of a Harbor task, in the places where its scripts expect things."""

from __future__ import annotations

import json
import math
import secrets
from pathlib import PurePosixPath
from typing import Any

from pydantic import field_validator

from polar.evaluators.base import EvaluationContext, EvaluationFailed, NoVerdict
from polar.evaluators.harbor_task import LOGS, TESTS
from polar.evaluators.inside import ANY_PLUGIN, place, report_of, run_grader, run_script
from polar.evaluators.workspace import GradedWorkspace, Placed, WorkspaceEvaluator, graded_workspace
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import ExecResult, PathRefused, Sandbox, SandboxError

REWARD_BYTES = 1024 * 1024
REWARD_FILES = ("reward.json", "reward.txt")


class HarborEvaluator(WorkspaceEvaluator):
    """Runs /tests/test.sh and takes the reward from the file in /logs/verifier that its tests name."""

    class Options(Placed):
        tests: dict[WorkspacePath, FileContent]
        """The task's `tests` directory; laid out as /tests once the agent is gone."""
        reward_key: str = "reward"
        """Which number of a reward.json that holds several is the reward; all are components."""

        @field_validator("tests")
        @classmethod
        def _has_script(cls, tests: dict[str, FileContent]) -> dict[str, FileContent]:
            if "test.sh" not in tests:
                raise ValueError("must hold test.sh")
            return tests

    options: Options

    @property
    def _reward_files(self) -> tuple[str, ...]:
        """The files that the tests speak of; either, where they speak of none."""
        tests = [file.data for file in self.options.tests.values()]
        named = tuple(name for name in REWARD_FILES if any(name.encode() in data for data in tests))
        return named or REWARD_FILES

    async def grade(self, context: EvaluationContext) -> Verdict:
        async with graded_workspace(context, self.options) as prepared:
            return await self._verify(context, prepared)

    async def _verify(self, context: EvaluationContext, work: GradedWorkspace) -> Verdict:
        result = await self._run(context, work.sandbox)
        if result.timed_out or result.exit_code < 0:
            ending = "did not end in time" if result.timed_out else "was killed"
            verdict = Verdict(reward=self.lowest_reward, report=f"the verifier {ending}")
            return work.explained(verdict, result)
        try:
            rewards = self._agreed(await self._rewards(context, work.sandbox))
        except EvaluationFailed as error:
            kind = NoVerdict if error.__cause__ is None else EvaluationFailed
            raise kind(
                f"{TESTS}/test.sh leaves no reward that counts: {error.message}\n{report_of(result)[-2000:]}",
                hint=error.hint or f"it must write {LOGS}/verifier/reward.txt or reward.json",
            ) from error
        return work.explained(Verdict(reward=self._chosen(rewards), components=rewards), result)

    async def _run(self, context: EvaluationContext, sandbox: Sandbox) -> ExecResult:
        """Lay out /tests over whatever the agent left in these places, and run its script."""
        await _require_places(sandbox)
        left = context.seconds_left
        await run_script(sandbox, "harbor-clear", TESTS, LOGS, timeout=left, must_succeed=True)
        files = {
            path: file.model_copy(update={"executable": True}) if path.endswith(".sh") else file
            for path, file in self.options.tests.items()
        }
        await place(sandbox, files, PurePosixPath(TESTS))
        limit = self.options.limit(context)
        env = {**ANY_PLUGIN, **self.options.env}
        return await run_grader(f"exec {TESTS}/test.sh", sandbox, env=env, timeout=limit)

    async def _rewards(self, context: EvaluationContext, sandbox: Sandbox) -> list[dict[str, float]]:
        """What the verifier wrote, file by file."""
        check = await run_script(sandbox, "harbor-open", LOGS, timeout=context.seconds_left)
        if check.exit_code != 0:
            raise EvaluationFailed("the place of the reward was locked while the verifier ran")
        found = []
        for name in self._reward_files:
            try:
                data = await sandbox.download(PurePosixPath(LOGS, "verifier", name), max_bytes=REWARD_BYTES)
            except SandboxError:
                continue
            if data.strip():
                found.append(_numbers(name, data.decode(errors="replace")))
        return found

    def _agreed(self, found: list[dict[str, float]]) -> dict[str, float]:
        """What was written; EvaluationFailed if that is nothing, or two files contradict each other."""
        if not found:
            raise EvaluationFailed("the verifier left no reward")
        if len({self._chosen(rewards) for rewards in found}) > 1:
            raise EvaluationFailed("reward.json and reward.txt contradict each other")
        return found[0]

    def _chosen(self, rewards: dict[str, float]) -> float:
        if self.options.reward_key in rewards:
            return rewards[self.options.reward_key]
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        raise EvaluationFailed(
            f"reward.json: has no {self.options.reward_key!r}",
            hint=f"it has {', '.join(rewards) or 'nothing'}",
        )


async def _require_places(sandbox: Sandbox) -> None:
    """EvaluationFailed where the runtime has no such directories, before anything touches the host's."""
    for directory in (TESTS, LOGS):
        try:
            await sandbox.upload(PurePosixPath(directory, f".polar-{secrets.token_hex(8)}"), b"")
        except PathRefused:
            raise EvaluationFailed(
                f"this sandbox has no {directory} that can be written to",
                hint=f"runtime bubblewrap with options directories: [{TESTS}, {LOGS}], or one with images",
            ) from None
        except SandboxError as error:
            raise EvaluationFailed(f"{directory}: {error}") from error


def _numbers(name: str, text: str) -> dict[str, float]:
    """What a reward file holds: a number, or in JSON several by their names."""
    document: Any = text.strip()
    if name == "reward.json":
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EvaluationFailed(f"{name}: not JSON: {error}") from None
    numbers = document if isinstance(document, dict) else {"reward": document}
    return {str(key): _number(f"{name}: {key}", value) for key, value in numbers.items()}


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise EvaluationFailed(f"{what}: must be a finite number, not {str(value)[:200]!r}")
    return number
