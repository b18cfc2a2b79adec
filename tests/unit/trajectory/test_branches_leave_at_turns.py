"""Strategies choose turns of the main conversation, the same ones whenever they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.chat import FinishReason, Message, Role, Sampling, ToolDefinition
from polar.models.completion import REPLAYED, Completion
from polar.models.component import Component
from polar.models.trace import Lineage
from polar.recordings.tree import TokenTree
from polar.trajectory.branching import BranchingStrategy, turns
from polar.trajectory.lineage import trace_ancestry
from tests.captures import grow
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.sessions import completion, sessions

CALLS = st.integers(-20, 20).filter(bool)
COMPONENTS = st.one_of(
    st.builds(lambda calls: ("calls", {"calls": calls}), st.lists(CALLS, min_size=1, max_size=4)),
    st.builds(
        lambda count, seed: ("uniform", {"count": count, "seed": seed}),
        st.integers(1, 8),
        st.none() | st.integers(),
    ),
    st.builds(lambda count: ("entropy", {"count": count}), st.integers(1, 8)),
    st.builds(lambda commands: ("first_failure", {"commands": commands}), st.booleans()),
)


def strategy(name: str, **options: Any) -> BranchingStrategy:
    made: BranchingStrategy = plugins.create("branchings", "at", Component(name=name, options=options))
    return made


def points(name: str, completions: Sequence[Completion], **options: Any) -> tuple[int, ...]:
    return strategy(name, **options).points(grow(completions))


def side_call(index: int) -> Completion:
    """A title, asked for without the history and in one token."""
    made = completion(index, [7_000 + index], [1], logprobs=[-20.0])
    return replace(made, asked=Sampling(max_tokens=1))


def talk(
    results: Sequence[str], *, surprises: Sequence[float] | None = None, after: int = 0
) -> list[Completion]:
    """A conversation with a turn before each tool result and one after the last.

    `after` side calls come before it, so that places and turns are told apart.
    """
    made = [side_call(index) for index in range(after)]
    messages: tuple[Message, ...] = (Message(Role.USER, "Repair it."),)
    prompt = [1, 2, 3]
    surprises = surprises or [1.0] * (len(results) + 1)
    for turn, surprise in enumerate(surprises):
        index, answer = after + turn, Message(Role.ASSISTANT, f"turn {turn}")
        sampled = [100 + turn, 200 + turn]
        one = completion(index, prompt, sampled, logprobs=[-surprise, -surprise])
        made.append(replace(one, messages=messages, response=answer, tools=(ToolDefinition("bash"),)))
        if turn < len(results):
            messages = (*messages, answer, Message(Role.TOOL, results[turn]))
            prompt = [*prompt, *sampled, 300 + turn]
    return made


def replayed(completions: Sequence[Completion], calls: int) -> list[Completion]:
    """The same, with its first calls given from the recording of another session."""
    return [replace(one, extra={REPLAYED: "other.0"}) if one.index < calls else one for one in completions]


def assert_sound(tree: TokenTree, chosen: tuple[int, ...]) -> None:
    assert list(chosen) == sorted(set(chosen))
    ancestry = trace_ancestry(tree)
    for point in chosen:
        one = tree.completions[point]
        assert 1 <= point < len(tree.completions)
        assert ancestry.lineage(point) in (Lineage.MAIN, Lineage.COMPACTED)
        assert one.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
        assert REPLAYED not in one.extra
        own = [place for place in turns(tree) if REPLAYED not in tree.completions[place].extra]
        assert point in own[1:], "before its first own turn a session is another one"


@given(agent_sessions() | sessions(), COMPONENTS, st.integers(0, 6))
def test_points_are_turns_and_always_the_same(
    completions: list[Completion], asked: tuple[str, dict[str, Any]], given_calls: int
) -> None:
    tree = grow(replayed(completions, given_calls))
    name, options = asked
    chosen = strategy(name, **options).points(tree)
    assert_sound(tree, chosen)
    assert strategy(name, **options).points(tree) == chosen


@given(agent_sessions())
def test_a_turn_is_a_prompt_of_the_main_conversation(completions: list[Completion]) -> None:
    tree = grow(completions)
    asked = [completions[place].prompt_ids.tolist() for place in turns(tree)]
    assert len(asked) == len({tuple(prompt) for prompt in asked})


def test_fixed_calls_count_turns_from_either_end() -> None:
    session = talk([""] * 4, after=2)
    assert points("calls", session, calls=[1, 3]) == (3, 5)
    assert points("calls", session, calls=[-1, 1, -4]) == (3, 6)
    assert points("calls", session, calls=[5, -9]) == ()
    with pytest.raises(InvalidInput, match="`samples` counts such sessions"):
        strategy("calls", calls=[0])


def test_a_branch_is_left_at_turns_of_its_own() -> None:
    session = replayed(talk([""] * 5), 2)
    assert points("calls", session, calls=[1, 2, 4]) == (4,)
    assert points("uniform", session, count=9) == (3, 4, 5)


def test_uniform_places_are_spread_or_drawn() -> None:
    session = talk([""] * 8)
    assert points("uniform", session) == (5,)
    assert points("uniform", session, count=2) == (3, 7)
    assert points("uniform", session, count=4) == (2, 4, 6, 8)
    drawn = {points("uniform", session, count=2, seed=seed) for seed in range(40)}
    assert len(drawn) > 10
    other = [*session[:-1], replace(session[-1], id="another")]
    seeds = range(10)
    assert [points("uniform", session, seed=seed) for seed in seeds] != [
        points("uniform", other, seed=seed) for seed in seeds
    ]


def test_entropy_finds_the_least_certain_turns() -> None:
    session = talk([""] * 4, surprises=[9.0, 0.5, 2.0, 0.1, 1.5], after=1)
    assert points("entropy", session) == (3,)
    assert points("entropy", session, count=2) == (3, 5)
    unknown = [replace(one, logprobs=one.logprobs[:0]) if one.index == 3 else one for one in session]
    assert points("entropy", unknown) == (5,)


def test_retries_are_one_turn() -> None:
    first, second, third = talk(["", ""])
    gone = replace(second, finish_reason=FinishReason.CANCELLED)
    again = replace(second, id="again", index=2)
    late = replace(third, index=3)
    assert points("uniform", [first, gone, again, late], count=9) == (2, 3)
    assert points("uniform", [first, second, again, late], count=9) == (1, 3)


COMMANDS = {
    "claude_code": "Error: Exit code 3\nout\nerr",
    "codex": "Chunk ID: 06a7b4\nWall time: 0.0000 seconds\nProcess exited with code 3\n"
    "Original token count: 2\nOutput:\nout\nerr\n",
    "gemini_cli": "<untrusted_context>\nOutput: out\nerr\nExit Code: 3\nProcess Group PGID: 11012\n"
    "</untrusted_context>",
    "mini_swe_agent": '{\n  "returncode": 3,\n  "output": "out\\nerr\\n"\n}',
    "mini_swe_agent 1": "<returncode>3</returncode>\n<output>\nout\n</output>",
    "pi": "out\nerr\n\n\nCommand exited with code 3",
    "qwen_code": "Command: false\nDirectory: (root)\nOutput: out\nerr\nError: (none)\nExit Code: 3\n"
    "Signal: (none)\nProcess Group PGID: 11627",
}
"""What harnesses tell the model of a command that ended with exit code 3."""
TESTS = (
    "F.\n=== 1 failed, 1 passed in 0.03s ===",
    "1 passed, 2 errors in 1.20s",
    '{\n  "returncode": 0,\n  "output": "F\\n1 failed in 0.03s\\n"\n}',
    "\x1b[31m=== \x1b[1m1 failed\x1b[0m, 1 passed in 0.03s ===",
    "Ran 2 tests in 0.001s\n\nFAILED (failures=1)",
    "--- FAIL: TestSum (0.00s)\nFAIL\nFAIL\texample.com/sum\t0.002s",
    "test result: FAILED. 1 passed; 1 failed; 0 ignored",
    "Tests:       1 failed, 2 passed, 3 total",
    "  2 passing (4ms)\n  1 failing\n",
    "TAP version 13\nnot ok 1 - adds",
    "[ERROR] Tests run: 3, Failures: 0, Errors: 1, Skipped: 0",
    "67% tests passed, 1 tests failed out of 3",
    "3 examples, 1 failure",
)
FINE = (
    "(Bash completed with no output)",
    "Chunk ID: 0\nWall time: 0.0000 seconds\nProcess exited with code 0\nOriginal token count: 0\nOutput:\n",
    "Output: (empty)\nExit Code: 0\nSignal: (none)",
    '{\n  "returncode": 0,\n  "output": ""\n}',
    "a\nb\nc\nd\nExit code 1 means that a test failed.\ne\nf\ng\nh",
    "a\nb\nc\nd\ne\nexit code: 3\nf\ng\nh\ni",
    "=== 12 passed in 0.03s ===",
    "assert failed == 1  # 1 failed in the past",
    "Tests:       0 total",
    "Tests run: 3, Failures: 0, Errors: 0",
    "not ok 2 - later # TODO",
    "100% tests passed, 0 tests failed out of 3",
)


@pytest.mark.parametrize("result", [*COMMANDS.values(), *TESTS])
def test_first_failure_is_found_in_what_harnesses_show(result: str) -> None:
    session = talk(["fine", "fine", result, result, "fine"], after=1)
    assert points("first_failure", session) == (3,)
    assert points("first_failure", session, commands=False) == ((3,) if result in TESTS else ())


@pytest.mark.parametrize("result", FINE)
def test_success_and_mere_mention_are_no_failure(result: str) -> None:
    assert points("first_failure", talk([result, result, result])) == ()


def test_failures_in_a_shared_beginning_are_not_found_again() -> None:
    session = talk(["fine", TESTS[0], "fine", TESTS[0], "fine"])
    assert points("first_failure", session) == (1,)
    assert points("first_failure", replayed(session, 2)) == (3,)


def test_a_failure_of_the_first_turn_is_the_first_and_leaves_no_place() -> None:
    session = talk([TESTS[0], "fine", TESTS[0], "fine"])
    assert points("first_failure", session) == ()


def test_what_a_user_says_of_failures_is_no_result() -> None:
    session = talk(["fine", TESTS[0], "fine"])
    assert points("first_failure", session) == (1,)
    said = [
        replace(one, messages=tuple(replace(message, role=Role.USER) for message in one.messages))
        for one in session
    ]
    assert points("first_failure", said) == ()
