"""Every attack against every registered evaluator: nothing but the work itself is worth anything."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from polar.evaluators.attacks import ATTACKS, Attack, Exam, Kind
from polar.evaluators.base import EvaluationContext, JudgeEndpoint
from polar.models.session import Verdict
from polar.runtimes.base import Command
from suites.attacks.conftest import ExamRoom
from suites.attacks.exams import Candidate, candidates, unexamined
from suites.attacks.tools import tools_of
from suites.attacks.unguarded import (
    BELIEVED,
    GRADERS,
    Grader,
    believes,
    exam_for,
    unguarded_runtime,
    unprovable_here,
)
from tests.evaluations import evaluate, evaluation, make_task
from tests.fakes.extensions import OpenAnswer, SealedAnswer, registered
from tests.sandboxes import require_runtime


class Sit(Protocol):
    """Begins an exam, in a sandbox with these options of its runtime."""

    def __call__(self, exam: Exam, **options: object) -> AbstractAsyncContextManager[EvaluationContext]: ...


@pytest.fixture
async def sit(tmp_path: Path, room: ExamRoom, scratch: Path, judges: dict[str, JudgeEndpoint]) -> Sit:
    await require_runtime(room.name)

    def begin(exam: Exam, **options: object) -> AbstractAsyncContextManager[EvaluationContext]:
        runtime = {"name": room.name, "options": {**room.options, **exam.runtime_options, **options}}
        tools = (*tools_of(exam.kind, scratch), *room.tools)
        task = make_task(exam.files, runtime=runtime)
        return evaluation(task, tmp_path, timeout=240, tools=tools, judges=judges)

    return begin


async def act(exam: Exam, context: EvaluationContext, script: str) -> None:
    """Play the agent, honest or not, to its end and that of all its processes."""
    command = Command(("/bin/sh", "-c", script), env=exam.options.get("env", {}))
    await context.sandbox.exec(command, timeout=120, log_name="agent")
    await context.sandbox.kill()


async def graded(candidate: Candidate, context: EvaluationContext) -> Verdict:
    return await evaluate(context, candidate.evaluator, **candidate.exam.options)


CANDIDATES = list(candidates())
PAIRS = [(candidate, attack) for candidate in CANDIDATES for attack in candidate.attacks]


def test_every_evaluator_is_examined() -> None:
    missing = unexamined()
    assert not missing, f"the evaluators {', '.join(missing)} have no exam: give them one by Evaluator.exams"


@pytest.mark.parametrize("candidate", CANDIDATES, ids=[candidate.id for candidate in CANDIDATES])
async def test_honest_work_is_worth_one_and_none_is_worth_nothing(candidate: Candidate, sit: Sit) -> None:
    async with sit(candidate.exam) as context:
        assert (await graded(candidate, context)).reward == 0.0
        await act(candidate.exam, context, candidate.exam.solution)
        verdict = await graded(candidate, context)
    assert verdict.reward == 1.0, verdict.report


@pytest.mark.parametrize(
    ("candidate", "attack"), PAIRS, ids=[f"{candidate.id}-{attack.name}" for candidate, attack in PAIRS]
)
async def test_an_attack_is_worth_nothing(candidate: Candidate, attack: Attack, sit: Sit) -> None:
    async with sit(candidate.exam) as context:
        await act(candidate.exam, context, attack.command)
        verdict = await graded(candidate, context)
    assert verdict.reward == 0.0, verdict.report


async def test_an_evaluator_of_a_plug_in_is_examined_by_being_registered(
    sit: Sit, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(monkeypatch, "evaluators", sealed_answer=SealedAnswer, open_answer=OpenAnswer)
    by_name = {candidate.evaluator: candidate for candidate in candidates()}
    sealed, open_ = by_name["sealed_answer"], by_name["open_answer"]
    assert sealed.meets_every_attack
    assert {attack.kind for attack in sealed.attacks} == {Kind.ANY, Kind.PYTHON}
    attack = next(attack for attack in ATTACKS if attack.name == "verdict-files")
    for candidate, rewards in ((sealed, (0.0, 0.0, 1.0)), (open_, (0.0, 1.0, 1.0))):
        found = []
        for script in ("true", attack.command, candidate.exam.solution):
            async with sit(candidate.exam) as context:
                await act(candidate.exam, context, script)
                found.append((await graded(candidate, context)).reward)
        assert tuple(found) == rewards, "the suite tells evaluators apart that can be cheated"


def test_an_evaluator_of_a_plug_in_without_an_exam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, "evaluators", unknown=type("Unknown", (SealedAnswer,), {"exams": lambda: ()}))
    assert unexamined() == ["unknown"]


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
async def test_without_guards_the_attack_succeeds(attack: Attack, sit: Sit) -> None:
    """That the suite proves something: others believe what evaluators do not."""
    if reason := unprovable_here(attack):
        pytest.skip(reason)
    exam = exam_for(attack)
    async with sit(exam, **unguarded_runtime(exam)) as context:
        assert await believes(GRADERS[BELIEVED.get(attack.name, "runner")], exam, attack.command, context)


@pytest.mark.parametrize("grader", GRADERS.values(), ids=list(GRADERS))
async def test_a_grader_without_guards_knows_work_from_none(grader: Grader, sit: Sit) -> None:
    """Or else it would prove nothing that it believes an attack."""
    attacked = [a for a in ATTACKS if GRADERS[BELIEVED.get(a.name, "runner")] is grader]
    exam = exam_for(attacked[0])
    for script, is_believed in (("true", False), (exam.solution, not grader.fails)):
        async with sit(exam, **unguarded_runtime(exam)) as context:
            assert await believes(grader, exam, script, context) is is_believed
