"""Scores a session with the verifier of a Harbor task, in the paths that its scripts expect."""

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
from polar.evaluators.workspace import (
    GradedWorkspace,
    SandboxOptions,
    WorkspaceEvaluator,
    graded_workspace,
)
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import ExecResult, PathRefused, Sandbox, SandboxError

REWARD_BYTES = 1024 * 1024
REWARD_FILES = ("reward.json", "reward.txt")


class HarborEvaluator(WorkspaceEvaluator):
    """Runs /tests/test.sh and reads the reward from the file in /logs/verifier that its tests name."""

    class Options(SandboxOptions):
        tests: dict[WorkspacePath, FileContent]
        """The task's `tests` directory, unpacked as /tests after the agent has ended."""
        reward_key: str = "reward"
        """The reward's name in a reward.json with several numbers, all of which become components."""

        @field_validator("tests")
        @classmethod
        def _has_script(cls, tests: dict[str, FileContent]) -> dict[str, FileContent]:
            if "test.sh" not in tests:
                raise ValueError("must contain test.sh")
            return tests

    options: Options

    @property
    def _reward_files(self) -> tuple[str, ...]:
        """The reward files that the tests mention, or both if they mention neither."""
        tests = [file.data for file in self.options.tests.values()]
        named = tuple(name for name in REWARD_FILES if any(name.encode() in data for data in tests))
        return named or REWARD_FILES

    async def grade(self, context: EvaluationContext) -> Verdict:
        async with graded_workspace(context, self.options) as prepared:
            return await self._verify(context, prepared)

    async def _verify(self, context: EvaluationContext, work: GradedWorkspace) -> Verdict:
        result = await self._run(context, work.sandbox)
        if result.timed_out or result.exit_code < 0:
            ending = "timed out" if result.timed_out else "was killed"
            verdict = Verdict(reward=self.lowest_reward, report=f"the verifier {ending}")
            return work.explain(verdict, result)
        try:
            rewards = self._merge_rewards(await self._rewards(context, work.sandbox))
        except EvaluationFailed as error:
            kind = NoVerdict if error.__cause__ is None else EvaluationFailed
            raise kind(
                f"{TESTS}/test.sh left no valid reward: {error.message}\n{report_of(result)[-2000:]}",
                hint=error.hint or f"write {LOGS}/verifier/reward.txt or reward.json",
            ) from error
        return work.explain(Verdict(reward=self._select_reward(rewards), components=rewards), result)

    async def _run(self, context: EvaluationContext, sandbox: Sandbox) -> ExecResult:
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
        check = await run_script(sandbox, "harbor-open", LOGS, timeout=context.seconds_left)
        if check.exit_code != 0:
            raise EvaluationFailed("the reward directory was made unreadable while the verifier ran")
        found = []
        for name in self._reward_files:
            try:
                data = await sandbox.download(PurePosixPath(LOGS, "verifier", name), max_bytes=REWARD_BYTES)
            except SandboxError:
                continue
            if data.strip():
                found.append(_numbers(name, data.decode(errors="replace")))
        return found

    def _merge_rewards(self, found: list[dict[str, float]]) -> dict[str, float]:
        """Return the rewards; raise EvaluationFailed if there are none or two files disagree."""
        if not found:
            raise EvaluationFailed("the verifier wrote no reward")
        if len({self._select_reward(rewards) for rewards in found}) > 1:
            raise EvaluationFailed("reward.json and reward.txt disagree")
        return found[0]

    def _select_reward(self, rewards: dict[str, float]) -> float:
        if self.options.reward_key in rewards:
            return rewards[self.options.reward_key]
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        raise EvaluationFailed(
            f"reward.json has no {self.options.reward_key!r}",
            hint=f"it has {', '.join(rewards) or 'nothing'}",
        )


async def _require_places(sandbox: Sandbox) -> None:
    """Raise EvaluationFailed if the runtime lacks these directories, before anything touches the host's."""
    for directory in (TESTS, LOGS):
        try:
            await sandbox.upload(PurePosixPath(directory, f".polar-{secrets.token_hex(8)}"), b"")
        except PathRefused:
            raise EvaluationFailed(
                f"this sandbox has no writable {directory}",
                hint=f"use bubblewrap with option directories: [{TESTS}, {LOGS}], or a runtime with images",
            ) from None
        except SandboxError as error:
            raise EvaluationFailed(f"{directory}: {error}") from error


def _numbers(name: str, text: str) -> dict[str, float]:
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
