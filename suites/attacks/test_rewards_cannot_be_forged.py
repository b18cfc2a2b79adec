"""Every attack against every registered evaluator: nothing but the work itself is worth anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path, PurePosixPath

import pytest

from polar.config import plugins
from polar.evaluators.attacks import ATTACKS, Attack, Kind
from polar.evaluators.base import EvaluationContext, JudgeEndpoint
from polar.models.session import Verdict
from polar.runtimes.base import Command, ToolDirectory
from suites.attacks.conftest import ExamRoom
from suites.attacks.exams import EXAMS, EXEMPT, Exam
from tests.evaluations import evaluate, evaluation, make_task
from tests.sandboxes import require_runtime

Sit = Callable[[Exam], AbstractAsyncContextManager[EvaluationContext]]


@pytest.fixture
async def sit(tmp_path: Path, room: ExamRoom, runner: ToolDirectory, judges: dict[str, JudgeEndpoint]) -> Sit:
    await require_runtime(room.name)

    @asynccontextmanager
    async def begin(exam: Exam) -> AsyncIterator[EvaluationContext]:
        options = {**room.options, **exam.directories}
        task = make_task(exam.files, runtime={"name": room.name, "options": options})
        tools = (runner, *room.tools)
        async with evaluation(task, tmp_path, timeout=240, tools=tools, judges=judges) as context:
            yield context

    return begin


async def act(context: EvaluationContext, script: str) -> None:
    """Play the agent, honest or not, to its end and that of all its processes."""
    await context.sandbox.exec(Command(("/bin/sh", "-c", script)), timeout=120, log_name="agent")
    await context.sandbox.kill()


async def graded(exam: Exam, context: EvaluationContext) -> Verdict:
    return await evaluate(context, exam.evaluator, **exam.options)


def fits(exam: Exam, attack: Attack) -> bool:
    """Attacks on every kind of task are tried where Python grades; each evaluator has such an exam."""
    return attack.kind is exam.kind or (attack.kind is Kind.ANY and exam.kind is Kind.PYTHON)


PAIRS = [(exam, attack) for exam in EXAMS for attack in ATTACKS if fits(exam, attack)]


def test_every_evaluator_is_examined() -> None:
    missing = set(plugins.names("evaluators")) - {exam.evaluator for exam in EXAMS} - EXEMPT.keys()
    assert not missing, f"no exam in suites/attacks/exams.py for the evaluators {', '.join(sorted(missing))}"


@pytest.mark.parametrize("exam", EXAMS, ids=[exam.id for exam in EXAMS])
async def test_honest_work_is_worth_one_and_none_is_worth_nothing(exam: Exam, sit: Sit) -> None:
    async with sit(exam) as context:
        assert (await graded(exam, context)).reward == 0.0
        await act(context, exam.honest)
        verdict = await graded(exam, context)
    assert verdict.reward == 1.0, verdict.report


@pytest.mark.parametrize(
    ("exam", "attack"), PAIRS, ids=[f"{exam.id}-{attack.name}" for exam, attack in PAIRS]
)
async def test_an_attack_is_worth_nothing(exam: Exam, attack: Attack, sit: Sit) -> None:
    async with sit(exam) as context:
        await act(context, attack.command)
        verdict = await graded(exam, context)
    assert verdict.reward == 0.0, verdict.report
    if exam.kind is Kind.CARGO and "$HOME" not in attack.script:
        assert verdict.components["tampering"] > 0


REAL = (
    *("usercustomize-in-home", "path-file-in-home", "unittest-module", "unittest-package"),
    *("standard-library-module", "compiled-liar", "package-beside-test-module", "exit-on-import"),
    *("package-of-the-tests", "package-of-the-workspace"),
    *("plug-in-by-metadata", "plug-in-by-egg-metadata", "plug-in-by-capital-metadata"),
    *("plug-in-by-linked-metadata", "conftest-at-the-top", "conftest-by-link", "plug-in-by-pytest-ini"),
    *("plug-in-by-setup-cfg", "plug-in-by-pyproject-toml", "pytest-module"),
)


@pytest.mark.parametrize("name", REAL)
async def test_without_guards_the_attack_succeeds(name: str, sit: Sit) -> None:
    """That the suite proves something: the runner itself believes what evaluators do not."""
    attack = next(attack for attack in ATTACKS if attack.name == name)
    exam = next(exam for exam in EXAMS if exam.evaluator == "tests" and exam.kind is attack.kind)
    async with sit(exam) as context:
        await act(context, attack.command)
        for path, file in exam.options["files"].items():
            await context.sandbox.upload(PurePosixPath(path), file["text"].encode())
        command = Command(("/bin/sh", "-c", exam.options["command"]), env=exam.options.get("env", {}))
        result = await context.sandbox.exec(command, timeout=120, log_name="unguarded")
    assert result.exit_code == 0
