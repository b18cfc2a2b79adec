"""Main conversation, sub-agents, compacted contexts and side calls are told apart by rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar.models.chat import Message, Role, Sampling, ToolDefinition
from polar.models.completion import Completion
from polar.models.trace import Lineage, Trajectory
from polar.trajectory.prefix_merging import Credit, PrefixMerging
from tests.captures import grow
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
    made = PrefixMerging(PrefixMerging.Options(**options)).build(grow(completions))
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


SUMMARY = """The user wants the parser to accept trailing commas.
The grammar is in grammar.py; tests are run with make check.
Two of five cases pass, the nested ones are left."""


def compacting(summary: str, begins_with: str, *, asked: str = "Summarise.") -> tuple[Completion, ...]:
    """A conversation, a call without tools, and a context that takes the conversation's place."""
    first = call(0, [1])
    question = (Message(Role.SYSTEM, "you summarise"), Message(Role.USER, asked))
    told = call(1, [7], tools=(), messages=question, response=Message(Role.ASSISTANT, summary, "thoughts"))
    again = (Message(Role.SYSTEM, "be useful"), Message(Role.USER, begins_with))
    return first, told, call(2, [1, 9], messages=again)


@pytest.mark.parametrize("credit", list(Credit))
def test_the_summary_that_a_compacted_context_begins_with_is_trained(credit: Credit) -> None:
    wrapped = "Continue from here:\n" + "\n  ".join(SUMMARY.splitlines()) + "\nGo on."
    trajectory = build(*compacting(f"<summary>\n{SUMMARY}\n</summary>", wrapped), credit=credit)
    assert lineages(trajectory) == {
        "c0": ("main", None),
        "c1": ("summary", "c0"),
        "c2": ("compacted", "c0"),
    }
    assert (trajectory.stats.excluded, trajectory.stats.auxiliary) == ({}, {})
    assert trajectory.stats.lineage == {"main": 1, "summary": 1, "compacted": 1}


@pytest.mark.parametrize(
    ("answer", "begins_with", "asked"),
    [
        ("Trailing commas", "Trailing commas\nGo on.", "Name this."),
        (SUMMARY, "Go on.", "Summarise."),
        (SUMMARY, f"{SUMMARY}\nGo on.", f"Is this about weather? {SUMMARY}"),
        (SUMMARY + "\nMore." * 60, f"{SUMMARY}\nGo on.", "Think aloud."),
    ],
)
def test_titles_and_answers_that_nothing_begins_with_stay_side_calls(
    answer: str, begins_with: str, asked: str
) -> None:
    trajectory = build(*compacting(answer, begins_with, asked=asked))
    assert trajectory.stats.auxiliary == {"toolless": 1}
    assert trajectory.stats.excluded == {"auxiliary": 1}


def test_of_two_summaries_the_one_that_was_taken_is_trained() -> None:
    first, told, after = compacting(SUMMARY, SUMMARY)
    other = replace(told, id="other", response=Message(Role.ASSISTANT, "It was about something else."))
    trajectory = build(first, other, told, after)
    assert lineages(trajectory)["c1"] == ("summary", "c0")
    assert trajectory.stats.excluded == {"auxiliary": 1}


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
