"""Extensions as packages of others would bring them: one that does nothing, and evaluators with an exam."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict, Field

from polar.config import plugins
from polar.evaluators.attacks import Exam, Kind
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.session import Verdict
from polar.runtimes.base import Command


class Idle:
    """Stands for any harness, runtime, evaluator or builder."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        seconds: float = Field(default=1.0, gt=0)


def register_idle_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `idle` and `other` the only names of every kind."""

    def load(_kind: str, name: str) -> Any:
        assert name in ("idle", "other")
        return Idle

    monkeypatch.setattr(plugins, "names", lambda _kind: ("idle", "other"))
    monkeypatch.setattr(plugins, "load", load)


def registered(monkeypatch: pytest.MonkeyPatch, kind: str, **extensions: Any) -> None:
    """Add extensions to those of a kind, for the length of one test."""
    load, names = plugins.load, plugins.names

    def load_also(asked: str, name: str) -> Any:
        return extensions[name] if asked == kind and name in extensions else load(asked, name)

    def names_also(asked: str) -> tuple[str, ...]:
        return tuple(sorted({*names(asked), *extensions})) if asked == kind else names(asked)

    monkeypatch.setattr(plugins, "load", load_also)
    monkeypatch.setattr(plugins, "names", names_also)


class OpenAnswer(Evaluator):
    """Believes the reward that a checker leaves in the workspace, and whoever else leaves one there."""

    is_sealed: ClassVar = False

    class Options(Evaluator.Options):
        least: int = 1

    options: Options

    @classmethod
    def exams(cls) -> tuple[Exam, ...]:
        return (Exam(Kind.PYTHON, {"least": 3}, {"answer.txt": "2\n"}, "echo 3 > answer.txt"),)

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        sandbox, least = context.sandbox, self.options.least
        if self.is_sealed:
            await sandbox.exec(Command(("rm", "-rf", "reward.txt")), timeout=30, log_name="clear")
        check = f"[ $(cat answer.txt) -ge {least} ] && echo 1 > reward.txt; cat reward.txt"
        said = await sandbox.exec(Command(("/bin/sh", "-c", check)), timeout=30, log_name="check")
        return Verdict(reward=float(said.stdout.text().strip() == "1"))


class SealedAnswer(OpenAnswer):
    """Lets nobody else leave a reward."""

    is_sealed = True
