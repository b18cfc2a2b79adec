"""Servers, nodes, engine, database, network, disk and clock fail; every session ends, and ends once.

A short form of suites/faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.mischief import Fault
from tests.faults.trial import trial

pytestmark = pytest.mark.timeout(400)


async def test_two_servers_on_postgres_through_every_fault(tmp_path: Path) -> None:
    done = await trial(tmp_path, seed=7, sessions=60, faults=10, servers=2, nodes=2, on_postgres=True)
    assert done


async def test_killed_nodes_cost_no_more_than_the_calls_in_flight(tmp_path: Path) -> None:
    kinds = (Fault.NODE_KILLED,)
    done = await trial(
        tmp_path, seed=7, sessions=30, faults=6, servers=1, nodes=2, on_postgres=False, kinds=kinds
    )
    assert done.keys() == set(kinds)
