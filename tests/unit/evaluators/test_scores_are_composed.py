"""Several evaluators as one, scores by how the agent ended, and plain functions as evaluators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from polar.config import plugins
from polar.errors import InvalidInput
from polar.evaluators.base import EvaluationContext, EvaluationFailed, RewardTooLow, evaluator
from polar.models.component import Component
from polar.models.session import AgentEnd, TrajectoryStats, Verdict
from tests.evaluations import evaluate, make_evaluator


def says(line: str, **more: Any) -> dict[str, Any]:
    return {"name": "command", "options": {"command": f"reward '{line}'"}, **more}


async def test_the_reward_is_the_weighted_sum(context: EvaluationContext) -> None:
    parts = [
        says('{"reward": 0.5, "components": {"style": 1}}', weight=2, label="first"),
        says("1", label="second"),
        says("3", weight=-0.5, label="penalty"),
    ]
    verdict = await evaluate(context, "weighted", evaluators=parts)
    assert verdict.reward == pytest.approx(0.5 * 2 + 1 - 1.5)
    assert verdict.components == {"first": 0.5, "first.style": 1.0, "second": 1.0, "penalty": 3.0}
    assert "first: 0.5 × 2" in verdict.report


async def test_the_lowest_sum_follows_from_the_parts(context: EvaluationContext) -> None:
    low = {"name": "command", "options": {"command": "exit 1", "lowest_reward": -1}, "label": "low"}
    parts = [says("1"), says("1", weight=-0.5, label="penalty"), {**low, "weight": 2}]
    whole = make_evaluator("weighted", evaluators=parts)
    assert whole.lowest_reward == -2.5
    assert (await whole.score(context)).reward == 1 - 0.5 - 2
    with pytest.raises(RewardTooLow, match="gave -3, which is below its lowest_reward of 0"):
        await make_evaluator("weighted", evaluators=[says("-3")]).score(context)


async def test_a_closed_gate_ends_the_matter(context: EvaluationContext) -> None:
    parts = [
        says("0", gate=True, label="tests"),
        {"name": "command", "options": {"command": "touch asked", "sandbox": "live"}},
    ]
    verdict = await evaluate(context, "weighted", evaluators=parts)
    assert (verdict.reward, verdict.components) == (0.0, {"tests": 0.0})
    seen = await evaluate(context, "command", command="test ! -e asked", sandbox="live")
    assert seen.reward == 1.0
    opened = await evaluate(context, "weighted", evaluators=[says("1", gate=True, label="tests"), parts[1]])
    assert opened.reward == 2.0


async def test_a_part_that_fails_fails_the_whole(context: EvaluationContext) -> None:
    part = {"name": "command", "options": {"command": "echo x", "reward": "stated"}}
    with pytest.raises(EvaluationFailed):
        await evaluate(context, "weighted", evaluators=[says("1", label="a"), part])


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "evaluators"),
        ([{"name": "nothing"}], "nothing"),
        ([{"name": "command", "options": {}}], r"evaluator\.options\.evaluators\.0\.options\.command"),
        ([{"name": "command", "options": {"command": "x"}, "weight": "heavy"}], r"evaluators\.0\.weight"),
        ([says("1"), says("1")], r"1\.label: 'command' is already used"),
    ],
    ids=str,
)
def test_bad_parts_are_named(parts: list[Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        make_evaluator("weighted", evaluators=parts)


def test_a_fresh_sandbox_is_wanted_by_the_whole_if_by_a_part() -> None:
    plan = {"command": "x", "format": "pytest"}
    assert make_evaluator("weighted", evaluators=[{"name": "diff", "options": plan}]).wants_fresh_sandbox
    live = {"name": "tests", "options": {**plan, "sandbox": "live"}}
    assert not make_evaluator("weighted", evaluators=[live]).wants_fresh_sandbox
    assert make_evaluator("tests", **plan).wants_fresh_sandbox
    assert make_evaluator("command", command="true").wants_fresh_sandbox
    assert not make_evaluator("tests", **plan, sandbox="live").wants_fresh_sandbox


@pytest.mark.parametrize(
    ("end", "exit_code", "completions", "options", "reward"),
    [
        (AgentEnd.EXITED, 1, 1, {}, 1.0),
        (AgentEnd.EXITED, 1, 1, {"exit_code": 0}, 0.0),
        (AgentEnd.EXITED, 0, 1, {"exit_code": 0}, 1.0),
        (AgentEnd.EXITED, 0, 0, {}, 0.0),
        (AgentEnd.EXITED, 0, 2, {"min_completions": 3}, 0.0),
        (AgentEnd.TIMEOUT, None, 5, {}, 0.0),
        (AgentEnd.BUDGET, None, 5, {}, 0.0),
    ],
)
async def test_a_session_is_completed_when_its_agent_ended_by_itself(
    context: EvaluationContext,
    end: AgentEnd,
    exit_code: int | None,
    completions: int,
    options: dict[str, Any],
    reward: float,
) -> None:
    stats = TrajectoryStats(completions=completions)
    ended = replace(context, agent_end=end, exit_code=exit_code, stats=stats)
    assert (await evaluate(ended, "session_completed", **options)).reward == reward


class LengthOptions(BaseModel):
    model_config = {"extra": "forbid", "frozen": True}

    wanted: int


async def length(context: EvaluationContext, options: LengthOptions) -> float:
    """How near the instruction's length comes to the wanted one."""
    return 1.0 / (1 + abs(len(context.task.instruction) - options.wanted))


async def verdict(context: EvaluationContext, options: BaseModel) -> Verdict:
    return Verdict(reward=2.0, report="fine")


async def test_a_function_of_a_package_is_an_evaluator(
    context: EvaluationContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = {"length": evaluator(length, LengthOptions), "verdict": evaluator(verdict)}
    monkeypatch.setattr(plugins, "load", lambda _kind, name: registered[name])
    assert (await evaluate(context, "length", wanted=1)).reward == 1.0
    assert (await evaluate(context, "verdict")).report == "fine"
    with pytest.raises(InvalidInput, match=r"evaluator\.options\.wanted"):
        plugins.create("evaluators", "evaluator", Component(name="length", options={"wanted": "x"}))
