"""A sample and its branches: every token is trained once, for what came of it, and together they are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.models.completion import RESUMED, Completion
from polar.models.session import AgentEnd
from polar.training.material import Material, PolicyVersions, material
from polar.training.settings import BatchSettings, Level, ObjectiveSettings, Pack
from polar.trajectory.base import Builder
from polar.trajectory.group_tree import group_tree
from polar.trajectory.learnable import EndedSession, Excluded, Group
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import Credit, PrefixMerging
from tests.fakes.scripted_rollouts import MERGING, group, replayed, sample, turns

PROMPT = (1, 2, 3)
APART = PerRequest(PerRequest.Options())
TREE = ObjectiveSettings.model_validate({"advantage": "tree", "normalise": False})
TURN = ObjectiveSettings.model_validate({"advantage": "turn", "normalise": False})
ALONE = BatchSettings(pack=Pack.ALONE)

FIRST = turns(PROMPT, [[10], [11, 12], [13]], name="a")
SECOND = turns(PROMPT, [[20], [21]], name="b")
BRANCH = turns(PROMPT, [[30, 31]], name="c", before=replayed(FIRST[:1]))
"""It leaves the first after one call."""


def sessions(
    paths: Sequence[tuple[Completion, ...]], rewards: Sequence[float | None], builder: Builder = MERGING
) -> Group:
    made = (
        sample(path, reward, number=number, builder=builder)
        for number, (path, reward) in enumerate(zip(paths, rewards, strict=True))
    )
    return Group("task", tuple(made))


BRANCHED = sessions((FIRST, SECOND, BRANCH), (1.0, 0.0, 0.0))


def made(one: Group, objective: ObjectiveSettings = TREE) -> Material:
    return material([one], objective, ALONE, PolicyVersions(0))


def by_token(found: Material, what: str = "advantages") -> dict[int, float]:
    """The answers' tokens all differ, so that each is one term."""
    terms = [
        (int(label), float(number))
        for batch in found.packing.batches
        for label, number in zip(batch.labels, getattr(batch.terms, what), strict=True)
    ]
    assert len(dict(terms)) == len(terms), "every token is trained once"
    return dict(terms)


def left_out(found: Material) -> dict[str, int]:
    return {name: count for name, count in found.excluded.items() if count}


@pytest.mark.parametrize("builder", [MERGING, APART])
def test_a_beginning_is_trained_once_for_all_that_came_of_it(builder: Builder) -> None:
    found = made(sessions((FIRST, SECOND, BRANCH), (1.0, 0.0, 0.0), builder), TURN)
    later = dict.fromkeys((11, 12, 13), 0.5) | dict.fromkeys((30, 31), -0.5)
    assert by_token(found) == {10: 0.25, 20: -0.25, 21: -0.25} | later
    assert left_out(found) == {}


def test_of_two_samples_each_part_is_compared_with_the_other() -> None:
    later = dict.fromkeys((11, 12, 13), 0.5) | dict.fromkeys((30, 31), -0.5)
    assert by_token(made(BRANCHED)) == {10: 0.25, 20: -0.25, 21: -0.25} | later


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("advantage", ["tree", "turn", "group"])
def test_branches_add_no_weight_to_their_sample(level: Level, advantage: str) -> None:
    """Whatever rewards are compared with: what follows a place where two part counts as half."""
    objective = ObjectiveSettings.model_validate(
        {"advantage": advantage, "level": level, "session_tokens": 10}
    )
    weights = by_token(made(BRANCHED, objective), "weights")
    assert [weights[token] for token in (11, 12, 13, 30, 31)] == pytest.approx([weights[10] / 2] * 5)
    # 1 + 3 × ½ + 2 × ½ and 2 tokens.
    first = {Level.TOKEN: 1 / 5.5, Level.SEQUENCE: 1 / (2 * 3.5), Level.CONSTANT: 1 / 20}[level]
    second = {Level.TOKEN: 1 / 5.5, Level.SEQUENCE: 1 / (2 * 2), Level.CONSTANT: 1 / 20}[level]
    assert (weights[10], weights[20]) == pytest.approx((first, second))


def test_what_branches_there_were_is_told() -> None:
    numbers = made(BRANCHED).numbers
    assert (numbers["branches"], numbers["replayed_tokens"]) == (1, 1)
    assert numbers["branched_tokens"] == 5 / 8
    assert numbers["reward"] == 0.5, "of the policy by itself, not of the places that somebody chose"
    plain = made(group(([[10]], [[20]]), (1.0, 0.0)), TREE).numbers
    assert "branches" not in plain


def test_a_failed_branch_is_as_if_it_were_not() -> None:
    found = made(sessions((FIRST, SECOND, BRANCH), (1.0, 0.0, None)))
    assert set(by_token(found).values()) == {0.5, -0.5}
    assert left_out(found) == {Excluded.SESSIONS_FAILED: 1}


def test_a_branch_outlives_its_sample() -> None:
    found = made(sessions((FIRST, SECOND, BRANCH), (None, 0.0, 1.0)))
    assert by_token(found) == {20: -0.5, 21: -0.5, 30: 0.5, 31: 0.5}
    assert left_out(found) == {Excluded.SESSIONS_FAILED: 1}


def test_a_session_that_its_recording_ended_says_nothing() -> None:
    stopped = BRANCHED.samples[2]
    result = stopped.result.model_copy(update={"agent_end": AgentEnd.REPLAYED})
    found = made(Group("task", (*BRANCHED.samples[:2], replace(stopped, result=result))))
    assert set(by_token(found).values()) == {0.5, -0.5}
    assert left_out(found) == {Excluded.SESSIONS_REPLAYED: 1}


def test_an_unreadable_branch_has_no_place_in_the_tree() -> None:
    """Its reward would be worth something only if one knew of what."""
    lost = replace(BRANCHED.samples[2], recording=None)
    found = made(Group("task", (*BRANCHED.samples[:2], lost)))
    assert set(by_token(found).values()) == {0.5, -0.5}
    assert left_out(found) == {Excluded.SESSIONS_UNREADABLE: 1}


def test_an_unreadable_sample_is_still_compared_with() -> None:
    lost = replace(BRANCHED.samples[1], recording=None)
    found = made(Group("task", (BRANCHED.samples[0], lost, BRANCHED.samples[2])))
    assert by_token(found)[10] == 0.25
    assert left_out(found) == {Excluded.SESSIONS_UNREADABLE: 1}


def test_where_only_the_unplaced_differs_there_is_nothing_to_learn() -> None:
    alike = sessions((FIRST, SECOND, BRANCH), (1.0, 1.0, 0.0))
    found = made(Group("task", (*alike.samples[:2], replace(alike.samples[2], recording=None))))
    assert by_token(found) == {}
    assert left_out(found) == {Excluded.SESSIONS_UNREADABLE: 1, Excluded.TRACES_EQUAL: 2}


def test_a_resumed_session_is_one_sample_that_trains_all_it_sampled() -> None:
    resumed = tuple(replace(one, extra={RESUMED: "yes"}) for one in FIRST[:2]) + FIRST[2:]
    found = made(sessions((resumed, SECOND), (1.0, 0.0)))
    assert by_token(found) == dict.fromkeys((10, 11, 12, 13), 0.5) | dict.fromkeys((20, 21), -0.5)


def test_a_resumed_branch_is_still_a_branch() -> None:
    resumed = tuple(replace(one, extra={**one.extra, RESUMED: "yes"}) for one in BRANCH)
    assert by_token(made(sessions((FIRST, SECOND, resumed), (1.0, 0.0, 0.0)))) == by_token(made(BRANCHED))


def test_a_branch_of_a_branch_is_part_of_the_same_sample() -> None:
    deeper = turns(PROMPT, [[50]], name="e", before=replayed(BRANCH, "task-2"))
    found = made(sessions((FIRST, SECOND, BRANCH, deeper), (1.0, 0.0, 0.0, 1.0)), TURN)
    credit = by_token(found)
    assert credit[10] == pytest.approx(0.75 - 0.375), "the mean of 1 and ½, against 0"
    assert credit[30] == pytest.approx(0.5 - 0.75)
    assert credit[50] == pytest.approx(0.5)


def test_the_answer_to_another_request_joins_nobody() -> None:
    """Two branches that were given it share its id, but not what stood before it."""
    again = replace(FIRST[1], id="a1-again", untrainable="it is the recorded answer to another request")
    paths = [
        turns(PROMPT, [answer], name=name, before=replayed([*FIRST[:1], again]))
        for name, answer in (("c", [30]), ("d", [40]))
    ]
    found = made(sessions((FIRST, SECOND, *paths), (1.0, 0.0, 0.0, 1.0)), TURN)
    assert by_token(found)[30] == pytest.approx(0.0 - 2 / 3)


def test_what_goes_on_after_other_tokens_shares_no_beginning() -> None:
    """The branch repeats the first call, and its engine rendered the conversation in another way."""
    again, new = BRANCH
    for start, shared in (((1, 2, 3), 0.25), ((9, 2, 3), 2 / 3)):
        prompt = np.array([*start, *new.prompt_ids[3:]], np.int32)
        apart = (again, replace(new, parent=None, follows=again.id, prompt_ids=prompt))
        found = made(sessions((FIRST, SECOND, apart), (1.0, 0.0, 0.0)), TURN)
        assert by_token(found)[10] == pytest.approx(shared)


def beside(name: str, answers: Sequence[Sequence[int]]) -> tuple[Completion, ...]:
    """A sub-agent's conversation."""
    return turns((4, 5, 6), answers, name=name)


@pytest.mark.parametrize(("credit", "part"), [(Credit.OUTCOME, 1.0), (Credit.DIVIDED, 0.5)])
def test_sub_agents_are_credited_where_they_worked(credit: Credit, part: float) -> None:
    """One of the beginning that two share, and one of each after they have parted."""
    builder = PrefixMerging(PrefixMerging.Options(credit=credit))
    helper = beside("h", [[60]])
    with_helper = (FIRST[0], helper[0], *FIRST[1:])
    branch = turns(PROMPT, [[30, 31]], name="c", before=replayed(FIRST[:1]))
    branch = (branch[0], replayed(helper)[0], branch[1], *beside("i", [[70]]))
    found = made(sessions((with_helper, SECOND, branch), (1.0, 0.0, 0.0), builder))
    credited = by_token(found)
    assert (credited[60], credited[10]) == (0.25 * part, 0.25 * part)
    assert (credited[70], credited[30]) == (-0.5 * part, -0.5 * part)


def judged(one: EndedSession, named: dict[str, float]) -> EndedSession:
    assert one.result.verdict is not None
    verdict = one.result.verdict.model_copy(update={"trace_rewards": named})
    return replace(one, result=one.result.model_copy(update={"verdict": verdict}))


def test_a_trace_with_a_reward_of_its_own_is_compared_with_others_of_the_kind() -> None:
    """And the others in the tree: here the calls of the branch alone are judged by themselves."""
    apart = sessions((FIRST, SECOND, BRANCH), (1.0, 0.0, 0.0), APART).samples
    named = (judged(apart[0], {"a2": 0.8}), apart[1], judged(apart[2], {"c1": 0.2, "a0": 9.0}))
    credited = by_token(made(Group("task", named)))
    assert (credited[13], credited[30]) == pytest.approx((0.3, -0.3))
    assert (credited[10], credited[11], credited[20]) == (0.25, 0.5, -0.25)


@pytest.mark.parametrize("objective", [TREE, TURN])
def test_turns_with_rewards_of_their_own_are_compared_with_each_other(objective: ObjectiveSettings) -> None:
    """A branch is judged for what it sampled itself, and its turns share the weight of their sample."""
    apart = sessions((FIRST, SECOND, BRANCH), (1.0, 0.0, 0.0), APART).samples
    rewards = {"a0": 0.0, "a1": 0.6, "a2": 1.0, "b0": 0.2, "b1": 0.0, "c1": 0.6}
    one = Group("task", tuple(judged(session, rewards) for session in apart))
    found = made(one, objective)
    mean = sum(rewards.values()) / len(rewards)
    tokens = {10: "a0", 11: "a1", 12: "a1", 13: "a2", 20: "b0", 21: "b1", 30: "c1", 31: "c1"}
    assert by_token(found) == pytest.approx({token: rewards[turn] - mean for token, turn in tokens.items()})
    weights = by_token(found, "weights")
    assert [weights[token] for token in (11, 12, 13, 30, 31)] == pytest.approx([weights[10] / 2] * 5)


PATHS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
BRANCHES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)), max_size=4)


@st.composite
def groups(draw: st.DrawFn, branches: st.SearchStrategy[Any] = BRANCHES, rewards: Any = None) -> Group:
    """Samples, and branches of them and of each other; no two tokens that were sampled are the same."""
    token = iter(range(100, 1000))
    paths: list[tuple[Completion, ...]] = []

    def add(lengths: Sequence[int], before: tuple[Completion, ...] = ()) -> None:
        answers = [[next(token) for _ in range(length)] for length in lengths]
        paths.append(turns(PROMPT, answers, name=f"{len(paths)}.", before=before))

    for lengths in draw(PATHS):
        add(lengths)
    for origin, calls, turns_after in draw(branches):
        add([1] * turns_after, replayed(paths[origin % len(paths)][:calls]))
    one = rewards if rewards is not None else st.sampled_from([None, 0.0, 0.25, 1.0])
    return sessions(paths, [draw(one) for _ in paths], draw(st.sampled_from([MERGING, APART])))


@settings(max_examples=60, deadline=None)
@given(groups(), st.sampled_from([TREE, TURN]))
def test_every_trained_token_has_one_advantage(one: Group, objective: ObjectiveSettings) -> None:
    credited = by_token(made(one, objective))
    sampled = {
        int(token)
        for session in one.scored
        for completion in (session.recording.completions if session.recording else ())
        if not completion.is_replayed
        for token in completion.sampled_ids
    }
    assert set(credited) == (sampled if one.rewards_differ else set())


@settings(max_examples=40, deadline=None)
@given(groups(rewards=st.just(0.5)), st.sampled_from([TREE, TURN]))
def test_equal_rewards_give_no_gradient(one: Group, objective: ObjectiveSettings) -> None:
    found = made(one, objective)
    assert not found.packing.batches
    assert left_out(found) == {Excluded.GROUPS_EQUAL: 1}


@settings(max_examples=60, deadline=None)
@given(groups(branches=st.just([])), st.sampled_from(["tree", "turn"]), st.booleans(), st.sampled_from(Level))
def test_without_branches_a_step_is_grpos(one: Group, kind: str, normalise: bool, level: Level) -> None:
    plain = ObjectiveSettings.model_validate({"advantage": "group" if normalise else "mean", "level": level})
    tree = ObjectiveSettings.model_validate({"advantage": kind, "normalise": normalise, "level": level})
    expected, found = made(one, plain), made(one, tree)
    assert by_token(found, "weights") == by_token(expected, "weights")
    assert by_token(found) == pytest.approx(by_token(expected), rel=1e-6)
    assert (found.numbers, found.excluded) == (expected.numbers, expected.excluded)


@settings(max_examples=60, deadline=None)
@given(st.data(), groups(), st.sampled_from([TREE, TURN]), st.sampled_from(Level))
def test_the_order_of_sessions_changes_nothing(
    data: st.DataObject, one: Group, objective: ObjectiveSettings, level: Level
) -> None:
    objective = objective.model_copy(update={"level": level})
    other = replace(one, samples=tuple(data.draw(st.permutations(one.samples))))
    for what in ("advantages", "weights"):
        here, there = (by_token(made(each, objective), what) for each in (one, other))
        assert here == pytest.approx(there, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(groups())
def test_each_sample_weighs_the_same_whatever_branches_it_has(one: Group) -> None:
    found = made(one, TREE.model_copy(update={"level": Level.SEQUENCE}))
    tree, names = group_tree(one.scored), [session.result.session_id for session in one.scored]
    weights: dict[int, float] = defaultdict(float)
    for batch in found.packing.batches:
        session = names.index(batch.names[0].partition("/")[0])
        weights[tree.sample_of(session)] += float(batch.terms.weights.sum())
    assert list(weights.values()) == pytest.approx([1 / (len(weights) or 1)] * len(weights))


def test_shuffled_rewards_are_dealt_out_in_the_tree() -> None:
    objective = ObjectiveSettings.model_validate({**TREE.model_dump(), "rewards": "shuffled"})
    found: dict[int, list[float]] = defaultdict(list)
    for turn in range(400):
        for token, credit in by_token(made(replace(BRANCHED, turn=(turn, 0)), objective)).items():
            found[token].append(credit)
    assert all(abs(np.mean(values)) < 0.1 for values in found.values())
