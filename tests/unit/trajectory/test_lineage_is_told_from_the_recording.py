"""Main conversation, sub-agents, compacted contexts and side calls are told apart by rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar.models.chat import Message, Role, Sampling, ToolDefinition
from polar.models.completion import Completion, CompletionKind
from polar.models.trace import Lineage, Trajectory
from polar.trajectory.prefix_merging import Credit, PrefixMerging
from tests.fakes.sessions import completion
from tests.fakes.trace_oracle import assert_invariants, traces

TOOLS = (ToolDefinition("shell"),)


def call(
    index: int,
    prompt: list[int],
    *,
    parent: Completion | None = None,
    system: str = "be useful",
    **changes: Any,
) -> Completion:
    before = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()] if parent else []
    made = completion(index, [*before, *prompt], [100 + index], parent=parent.id if parent else None)
    messages = (Message(Role.SYSTEM, system), Message(Role.USER, f"question {index}"))
    return replace(made, **{"tools": TOOLS, "messages": messages} | changes)


def build(*completions: Completion, **options: Any) -> Trajectory:
    made = PrefixMerging(PrefixMerging.Options(**options)).build(completions)
    assert_invariants(completions, made)
    return made


def lineages(trajectory: Trajectory) -> dict[str, tuple[str, str | None]]:
    """First completion of each trace → its lineage, and the first completion of its parent."""
    made = traces(trajectory)
    return {
        trace.completion_ids[0]: (
            trace.lineage.value,
            None if trace.parent is None else made[trace.parent].completion_ids[0],
        )
        for trace in made
    }


def test_a_conversation_inside_another_is_a_subagent() -> None:
    first = call(0, [1])
    inner = call(1, [2], system="you search")
    more = call(2, [3], parent=inner)
    back = call(3, [4], parent=first)
    assert lineages(build(first, inner, more, back)) == {"c0": ("main", None), "c1": ("subagent", "c0")}


def test_a_context_that_takes_the_place_of_another_is_compacted() -> None:
    first = call(0, [1])
    second = call(1, [2], parent=first)
    fresh = call(2, [1, 9])
    after = call(3, [5], parent=fresh)
    assert lineages(build(first, second, fresh, after)) == {
        "c0": ("main", None),
        "c2": ("compacted", "c0"),
    }


def test_agent_ids_of_the_harness_name_parents() -> None:
    first = call(0, [1])
    one = call(1, [2], extra={"agent_id": "one"})
    two = call(2, [3], extra={"agent_id": "two", "parent_agent_id": "one"})
    assert lineages(build(first, one, two)) == {
        "c0": ("main", None),
        "c1": ("subagent", "c0"),
        "c2": ("subagent", "c1"),
    }


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"kind": CompletionKind.AUXILIARY}, "recorded"),
        ({"asked": Sampling(max_tokens=1)}, "probe"),
        ({"tools": ()}, "toolless"),
    ],
)
def test_side_calls_are_left_out_by_rule_and_counted(changes: dict[str, Any], rule: str) -> None:
    side, main = call(0, [9], system="name this", **changes), call(1, [1])
    trajectory = build(side, main)
    assert lineages(trajectory) == {"c1": ("main", None)}
    assert trajectory.stats.excluded == {"auxiliary": 1}
    assert trajectory.stats.auxiliary == {rule: 1}
    asked_for = build(side, main, include_auxiliary=True)
    assert asked_for.stats.excluded == {}
    assert asked_for.stats.lineage == {"auxiliary": 1, "main": 1}


def test_an_agent_without_tools_is_no_side_call() -> None:
    trajectory = build(call(0, [1], tools=()))
    assert lineages(trajectory) == {"c0": ("main", None)}


def test_a_conversation_without_tools_that_goes_on_is_a_subagent() -> None:
    main, first = call(0, [1]), call(1, [2], tools=(), system="judge")
    trajectory = build(main, first, call(2, [3], parent=first, tools=()), call(3, [4], parent=main))
    assert lineages(trajectory)["c1"] == ("subagent", "c0")


def test_credit_for_the_main_conversation_leaves_the_others_out_by_name() -> None:
    first = call(0, [1])
    inner = call(1, [2], system="you search")
    trajectory = build(first, inner, call(2, [3], parent=first), credit=Credit.MAIN)
    assert [ref.lineage for ref in trajectory.traces] == [Lineage.MAIN]
    assert trajectory.stats.excluded == {"uncredited": 1}


def test_an_evaluator_may_reward_a_trace_by_any_completion_it_trains() -> None:
    first = call(0, [1])
    inner = call(1, [2], system="you search")
    trajectory = build(first, inner, call(2, [3], parent=first), credit=Credit.DIVIDED)
    scored = trajectory.with_reward(1.0, {"c1": 0.25})
    assert [ref.reward for ref in scored.traces] == [0.5, 0.25]
    assert [ref.reward for ref in trajectory.with_reward(1.0, {"c0": 3, "c2": 4}).traces] == [4, 0.5]
