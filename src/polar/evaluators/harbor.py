"""Scores a session with the verifier of a Harbor task, in the places where its scripts expect things."""

from __future__ import annotations

import json
import math
import secrets
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, Field, field_validator

from polar.evaluators.base import EvaluationContext, EvaluationFailed, Evaluator
from polar.evaluators.harbor_task import LOGS, TESTS
from polar.evaluators.inside import Spoiled, must_run, place
from polar.evaluators.output import cut, report_of
from polar.evaluators.snapshot import pack, replace_workspace
from polar.evaluators.tampering import (
    Finding,
    TamperPolicy,
    compare,
    inventory_before,
    take_inventory,
    tampering_remarks,
    undo,
)
from polar.evaluators.test_plan import LOG_NAME, SHARE_OF_TIME, spoiled
from polar.evaluators.tests import Place
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import Command, ExecResult, PathRefused, Sandbox, SandboxError

REWARD_BYTES = 1024 * 1024
_CLEAR = f"find {TESTS} {LOGS} -mindepth 1 -maxdepth 1 -exec rm -rf {{}} + && mkdir -p {LOGS}/verifier"


class HarborEvaluator(Evaluator):
    """Runs /tests/test.sh and takes the reward from /logs/verifier/reward.json or reward.txt."""

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        tests: dict[WorkspacePath, FileContent]
        """The task's `tests` directory; laid out as /tests once the agent is gone."""
        env: dict[str, str] = Field(default_factory=dict)
        """Environment variables of the script."""
        sandbox: Place = Place.LIVE
        reward_key: str = "reward"
        """Which number of a reward.json that holds several is the reward; all are components."""
        tampering: TamperPolicy = TamperPolicy.REPORT
        """What becomes of files that bend test runners; Harbor itself leaves them."""
        timeout_seconds: float | None = Field(default=None, gt=0)
        """How long the script may take; None: nearly all of `budgets.evaluate_seconds`."""

        @field_validator("tests")
        @classmethod
        def _has_script(cls, tests: dict[str, FileContent]) -> dict[str, FileContent]:
            if "test.sh" not in tests:
                raise ValueError("must hold test.sh")
            return tests

    options: Options

    @property
    def wants_fresh_sandbox(self) -> bool:
        return self.options.sandbox is Place.FRESH

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        try:
            if self.options.sandbox is Place.LIVE:
                return await self._verify(context, context.sandbox)
            archive = await pack(context)
            async with context.fresh_sandbox() as fresh:
                await replace_workspace(fresh, archive, timeout=context.seconds_left)
                return await self._verify(context, fresh)
        except Spoiled as error:
            return spoiled(error)

    async def _verify(self, context: EvaluationContext, sandbox: Sandbox) -> Verdict:
        findings = await self._guard(context, sandbox)
        if findings and self.options.tampering is TamperPolicy.ZERO:
            return Verdict(reward=0.0, report=_remarks(findings))
        result = await self._run(context, sandbox)
        if result.timed_out:
            report = f"the verifier did not end in time\n{report_of(result)}"
            return Verdict(reward=0.0, report=cut(report))
        rewards = await _rewards(sandbox)
        if rewards is None:
            await self._blame(context)
            report = f"the verifier left no reward\n{report_of(result)}"
            return Verdict(reward=0.0, report=cut(report))
        reward = self._chosen(rewards)
        components = {**rewards, "tampering": float(len(findings))}
        return Verdict(
            reward=reward, components=components, report=cut(_remarks(findings) + report_of(result))
        )

    async def _guard(self, context: EvaluationContext, sandbox: Sandbox) -> tuple[Finding, ...]:
        after = await take_inventory(sandbox, (), timeout=context.seconds_left)
        before = await inventory_before(context, (), after)
        findings = compare(before, after)
        if self.options.tampering is TamperPolicy.NEUTRALISE:
            await undo(sandbox, findings, before, timeout=context.seconds_left)
        return findings

    async def _run(self, context: EvaluationContext, sandbox: Sandbox) -> ExecResult:
        """Lay out /tests over whatever the agent left in these places, and run its script."""
        await _require_places(sandbox)
        await must_run(sandbox, _CLEAR, timeout=context.seconds_left, name="evaluator-clear")
        files = {
            path: file.model_copy(update={"executable": True}) if path.endswith(".sh") else file
            for path, file in self.options.tests.items()
        }
        await place(sandbox, files, PurePosixPath(TESTS))
        limit = min(self.options.timeout_seconds or context.timeout, SHARE_OF_TIME * context.seconds_left)
        command = Command(("/bin/sh", "-c", f"exec {TESTS}/test.sh"), env=self.options.env)
        try:
            return await sandbox.exec(command, timeout=limit, log_name=LOG_NAME)
        except SandboxError as error:
            raise EvaluationFailed(f"the verifier could not be run: {error}") from error

    async def _blame(self, context: EvaluationContext) -> None:
        """EvaluationFailed if the verifier leaves no reward where no agent has been either."""
        async with context.fresh_sandbox() as fresh:
            result = await self._run(context, fresh)
            if await _rewards(fresh) is None:
                raise EvaluationFailed(
                    f"{TESTS}/test.sh leaves no reward, whatever the agent did: {report_of(result)[-2000:]}",
                    hint=f"it must write {LOGS}/verifier/reward.txt or reward.json",
                )

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


async def _rewards(sandbox: Sandbox) -> dict[str, float] | None:
    """What the verifier wrote; None if it wrote nothing."""
    for name, parse in (("reward.json", _from_json), ("reward.txt", _from_text)):
        try:
            data = await sandbox.download(PurePosixPath(LOGS, "verifier", name), max_bytes=REWARD_BYTES)
        except SandboxError:
            continue
        if data.strip():
            return parse(data.decode(errors="replace"))
    return None


def _from_text(text: str) -> dict[str, float]:
    return {"reward": _number("reward.txt", text.strip())}


def _from_json(text: str) -> dict[str, float]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EvaluationFailed(f"reward.json: not JSON: {error}") from None
    if not isinstance(document, dict):
        document = {"reward": document}
    return {str(name): _number(f"reward.json: {name}", value) for name, value in document.items()}


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise EvaluationFailed(f"{what}: must be a finite number, not {str(value)[:200]!r}")
    return number


def _remarks(findings: tuple[Finding, ...]) -> str:
    return "".join(f"{remark}\n" for remark in tampering_remarks(findings))
