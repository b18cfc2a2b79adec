"""A plan comes closer to the wanted number: one node a machine, the dead removed, the idlest drained."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from polar.app.fleet.planning import SILENCE_SECONDS, Machine, NodeState, PlacedNode, make_plan, node_name

MACHINES = tuple(Machine(f"m{number}", f"host{number}", {"CPU": 4.0}) for number in range(5))


def placed(machine: str, state: NodeState = NodeState.READY, seconds: float = 0.0) -> PlacedNode:
    return PlacedNode(f"{machine}-1", machine, machine, state, seconds)


def test_nodes_are_spread_over_machines_and_the_rest_is_missing() -> None:
    plan = make_plan((), MACHINES[:2], wanted=3, drain_seconds=60)
    assert [machine.id for machine in plan.start] == ["m0", "m1"]
    assert plan.missing == 1


def test_a_lost_node_is_replaced_on_another_machine_while_its_own_rests() -> None:
    nodes = (placed("m0", NodeState.ENDED), placed("m1"))
    plan = make_plan(nodes, MACHINES[:3], wanted=2, resting=("m0",), drain_seconds=60)
    assert [node.name for node in plan.remove] == ["m0-1"]
    assert [machine.id for machine in plan.start] == ["m2"]


def test_a_node_whose_machine_is_gone_is_not_waited_for() -> None:
    plan = make_plan((placed("dead", NodeState.SILENT),), MACHINES[:1], wanted=1, drain_seconds=60)
    assert [node.machine for node in plan.remove] == ["dead"]
    assert [machine.id for machine in plan.start] == ["m0"]


def test_a_silent_node_is_given_time_to_come_back() -> None:
    for seconds, is_removed in ((SILENCE_SECONDS, False), (SILENCE_SECONDS + 1, True)):
        plan = make_plan((placed("m0", NodeState.SILENT, seconds),), MACHINES[:1], wanted=1, drain_seconds=60)
        assert bool(plan.remove) is is_removed


def test_the_idlest_nodes_are_drained() -> None:
    nodes = (placed("m0"), placed("m1"), placed("m2"), placed("m3", NodeState.STARTING))
    busy = {"m0-1": 3, "m2-1": 1, "m3-1": 9}
    plan = make_plan(nodes, MACHINES, wanted=1, busy=busy, drain_seconds=60)
    assert [node.name for node in plan.drain] == ["m3-1", "m1-1", "m2-1"]


def test_a_node_that_does_not_end_is_removed_in_the_end() -> None:
    late = placed("m0", NodeState.DRAINING, 60 + SILENCE_SECONDS + 1)
    assert make_plan((late,), MACHINES, wanted=0, drain_seconds=60).remove == (late,)
    assert not make_plan((late,), MACHINES, wanted=0, drain_seconds=120).remove


NODES = st.lists(
    st.builds(
        placed,
        st.sampled_from(["m0", "m1", "m2", "m3", "m4", "elsewhere"]),
        st.sampled_from(NodeState),
        st.floats(0, 200),
    ),
    unique_by=lambda node: node.machine,
)


@given(NODES, st.integers(0, 7), st.sets(st.sampled_from([machine.id for machine in MACHINES])))
def test_no_machine_ever_has_two_nodes_and_no_more_are_drained_than_are_too_many(
    nodes: list[PlacedNode], wanted: int, resting: set[str]
) -> None:
    plan = make_plan(nodes, MACHINES, wanted=wanted, resting=resting, drain_seconds=60)
    standing = [node for node in nodes if node not in plan.remove]
    after = [node.machine for node in standing] + [machine.id for machine in plan.start]
    assert max(Counter(after).values(), default=0) <= 1
    assert not resting & {machine.id for machine in plan.start}
    serving = {node for node in standing if node.state not in (NodeState.DRAINING, NodeState.ASIDE)}
    aside = {node for node in standing if node.state is NodeState.ASIDE}
    assert set(plan.drain) - serving == (set() if wanted else aside)
    assert len(serving - set(plan.drain)) + len(plan.start) + plan.missing == wanted


def test_who_comes_after_a_failed_node_takes_its_name() -> None:
    assert node_name("host", {"host-1", "host-3"}) == "host-2"
    assert node_name("_böse/x", ()) == "b-se-x-1"
