"""The number of nodes follows the queue: up at once, down with patience, never beyond what was asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.app.fleet.planning import FleetSize, ScaleDownDelay, nodes_wanted, parse_size
from polar.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "size"),
    [("per-host", None), ("3", FleetSize(3, 3)), ("1..8", FleetSize(1, 8)), ("0..2", FleetSize(0, 2))],
)
def test_a_size_is_read(text: str, size: FleetSize | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "3..1", "1..", "..3", "-1", "1.5"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="nodes"):
        parse_size(text)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 100_000), st.integers(1, 64))
def test_the_queue_decides_within_the_bounds(least: int, more: int, unended: int, per_node: int) -> None:
    wanted = nodes_wanted(
        FleetSize(least, least + more), machines=7, unended=unended, sessions_per_node=per_node
    )
    assert least <= wanted <= least + more
    if least < wanted < least + more:
        assert (wanted - 1) * per_node < unended <= wanted * per_node


@given(st.integers(0, 1000), st.integers(0, 100_000))
def test_per_host_follows_the_machines(machines: int, unended: int) -> None:
    assert nodes_wanted(None, machines=machines, unended=unended, sessions_per_node=8) == machines


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), min_size=1), st.floats(0, 30))
def test_patience_gives_the_largest_number_of_its_window(
    steps: list[tuple[float, int]], seconds: float
) -> None:
    patience, now, seen = ScaleDownDelay(seconds), 0.0, []
    for pause, number in steps:
        now += pause
        seen.append((now, number))
        assert patience.follow(now, number) == max(n for at, n in seen if at >= now - seconds)
