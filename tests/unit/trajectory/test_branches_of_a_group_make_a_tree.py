"""Where sessions of a group share their beginning, credit goes to what they did differently."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.trajectory.group_tree import GroupTree
from polar.trajectory.learnable import MIN_STD, Advantage, baselines

TREES = st.sampled_from([Advantage.TREE, Advantage.TURN])
REWARDS = st.floats(-4, 4, width=16)


Paths = list[list[str]]
"""The completions of each session, in order; a branch begins with those of another."""


@st.composite
def groups(draw: st.DrawFn, branches: int = 6) -> Paths:
    made: Paths = []

    def add(turns: int, before: list[str]) -> None:
        made.append([*before, *(f"{len(made)}.{turn}" for turn in range(turns))])

    for _ in range(draw(st.integers(1, 4))):
        add(draw(st.integers(1, 4)), [])
    for _ in range(draw(st.integers(0, branches))):
        origin = made[draw(st.integers(0, len(made) - 1))]
        add(draw(st.integers(0, 3)), origin[: draw(st.integers(0, len(origin)))])
    return made


def rewards_for(draw: st.DataObject, made: Paths) -> list[float]:
    return draw.draw(st.lists(REWARDS, min_size=len(made), max_size=len(made)))


def credits(
    paths: Sequence[Sequence[str]],
    rewards: Sequence[float],
    kind: Advantage = Advantage.TREE,
    min_std: float | None = None,
) -> dict[str, float]:
    """The advantage of each completion, wherever it is asked for."""
    tree = GroupTree(paths)
    found = tree.advantages(rewards, kind, min_std)
    assert found is not None
    credited: dict[str, set[float]] = defaultdict(set)
    for session, path in enumerate(paths):
        for id in path:
            credited[id].add(found[tree.stretch_of(session, id)])
    assert all(len(values) == 1 for values in credited.values()), "one completion, one advantage"
    return {id: values.pop() for id, values in credited.items()}


SPLIT = (["a0", "a1"], ["a0", "b1"], ["c0", "c1"])
"""A sample, a branch that leaves it after its first call, and another sample."""


def test_what_sessions_share_is_worth_the_mean_of_what_came_of_it() -> None:
    found = credits(SPLIT, [1.0, 0.0, 0.0], Advantage.TURN)
    assert found == {"a0": 0.25, "a1": 0.5, "b1": -0.5, "c0": -0.25, "c1": -0.25}


def test_a_stretch_is_compared_with_those_beside_it() -> None:
    """At the root three samples part, below the first two sessions do: a mean of two is as good as one of
    three, once each is compared with the others alone."""
    paths = (*SPLIT, ["d0"])
    found = credits(paths, [1.0, 0.0, 0.0, 0.0])
    assert found["a1"] == pytest.approx(2 / 3 * (1.0 - 0.0))
    assert found["a0"] == pytest.approx(2 / 3 * (0.5 - 0.0))
    assert found["d0"] == pytest.approx(2 / 3 * (0.0 - 0.25))


def test_more_branches_do_not_mean_more_weight() -> None:
    """Whichever of two is tried more often: what lies above is worth the same."""
    few = credits((["a0", "a1"], ["a0", "b1"], ["c0"]), [1.0, 0.0, 0.5])
    many = credits(
        (["a0", "a1", "a2"], ["a0", "b1"], ["c0"], *[["a0", "a1", f"d{n}"] for n in range(5)]),
        [1.0, 0.0, 0.5, *[1.0] * 5],
    )
    assert few["a0"] == many["a0"] == 0.0
    assert few["b1"] == many["b1"]


def test_where_all_sessions_begin_alike_their_beginning_is_compared_with_itself() -> None:
    found = credits((["a0", "a1"], ["a0", "b1"]), [1.0, 0.0])
    assert found == {"a0": 0.0, "a1": 0.5, "b1": -0.5}


def test_rewards_are_divided_by_the_spread_that_plain_samples_would_have() -> None:
    """Half of what the policy does is worth 0, whether one session or three show it."""
    plain = credits((["a0"], ["b0"]), [1.0, 0.0], min_std=MIN_STD)
    branched = credits((["a0"], ["b0", "b1"], ["b0", "c1"], ["b0", "d1"]), [1.0, 0, 0, 0], min_std=MIN_STD)
    assert plain["a0"] == branched["a0"] == 1.0


@given(groups(), REWARDS, TREES)
def test_one_reward_for_all_teaches_nothing(made: Paths, reward: float, kind: Advantage) -> None:
    assert GroupTree(made).advantages([reward] * len(made), kind) is None


@given(st.data(), groups(branches=0), TREES, st.sampled_from([None, MIN_STD, 0.5]))
def test_without_branches_it_is_grpo(
    draw: st.DataObject, made: Paths, kind: Advantage, min_std: float | None
) -> None:
    rewards = rewards_for(draw, made)
    plain = Advantage.MEAN if min_std is None else Advantage.GROUP
    expected = baselines([[reward] for reward in rewards], plain, min_std or MIN_STD)
    tree = GroupTree(made)
    found = tree.advantages(rewards, kind, min_std)
    if found is None:
        assert expected == [None] * len(rewards)
        return
    for session, (reward, against) in enumerate(zip(rewards, expected, strict=True)):
        assert against is not None
        for id in made[session]:
            at = tree.stretch_of(session, id)
            assert found[at] == pytest.approx(against.advantage(reward), rel=1e-12, abs=1e-12)
            assert tree.stretches[at].share == 1.0


@given(st.data(), groups())
def test_over_a_session_turns_add_up_to_what_grpo_gives_all_of_it(draw: st.DataObject, made: Paths) -> None:
    tree, rewards = GroupTree(made), rewards_for(draw, made)
    found = tree.advantages(rewards, Advantage.TURN)
    if found is None:
        return
    for session, reward in enumerate(rewards):
        path = [at for at, one in enumerate(tree.stretches) if session in one.holders]
        assert sum(found[at] for at in path) == pytest.approx(reward - tree.values(rewards)[0], abs=1e-9)


@given(st.data(), groups(), TREES)
def test_what_parts_at_one_place_adds_up_to_nothing(
    draw: st.DataObject, made: Paths, kind: Advantage
) -> None:
    tree, rewards = GroupTree(made), rewards_for(draw, made)
    found = tree.advantages(rewards, kind)
    for one in tree.stretches if found else ():
        assert found is not None
        assert math.fsum(found[child] for child in one.children) == pytest.approx(0, abs=1e-9)


@given(st.data(), groups(), TREES)
def test_the_order_of_sessions_and_of_their_calls_changes_nothing(
    draw: st.DataObject, made: Paths, kind: Advantage
) -> None:
    rewards = rewards_for(draw, made)
    if GroupTree(made).advantages(rewards, kind) is None:
        return
    order = draw.draw(st.permutations(range(len(rewards))))
    paths = [draw.draw(st.permutations(made[place])) for place in order]
    found = credits(paths, [rewards[place] for place in order], kind, MIN_STD)
    assert found == pytest.approx(credits(made, rewards, kind, MIN_STD))


@given(groups())
def test_a_sample_and_its_branches_are_one(made: Paths) -> None:
    tree = GroupTree(made)
    shares: dict[int, float] = defaultdict(float)
    for session, path in enumerate(made):
        first = tree.sample_of(session)
        assert first == session or path[0] == made[first][0]
        shares[first] += tree.stretches[tree.stretch_of(session, "of no other")].share
    assert list(shares.values()) == pytest.approx([1.0] * tree.samples)


@given(st.lists(st.none() | st.sets(st.sampled_from("abcdef")), max_size=6))
def test_whatever_is_shared_there_is_a_tree(held: list[set[str] | None]) -> None:
    """Also where branches left one recording at different calls and hold what others lack."""
    tree = GroupTree(held)
    placed = {place for place, ids in enumerate(held) if ids is not None}
    assert tree.stretches[0].holders == placed
    for at, one in enumerate(tree.stretches):
        parts = [tree.stretches[child].holders for child in one.children]
        assert all(tree.stretches[child].parent == at for child in one.children)
        assert sum(map(len, parts)) == (len(one.holders) if parts else 0)
        assert not parts or frozenset().union(*parts) == one.holders
        assert parts or len(one.holders) <= 1
    for session in placed:
        for id in held[session] or ():
            holders = {place for place in placed if id in (held[place] or ())}
            assert session in tree.stretches[tree.stretch_of(session, id)].holders <= holders
