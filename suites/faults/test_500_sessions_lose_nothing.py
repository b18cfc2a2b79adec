"""500 sessions while servers, nodes, engine, database, network, disk and clock fail at random.

The seed is printed, and all that goes wrong follows from it: POLAR_FAULTS_SEED=… repeats a run.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.mischief import Fault
from tests.faults.trial import trial

SEED = int(os.environ.get("POLAR_FAULTS_SEED", random.SystemRandom().randrange(10**6)))

pytestmark = pytest.mark.timeout(900)


async def test_two_servers_and_four_nodes_on_postgres(tmp_path: Path) -> None:
    done = await trial(tmp_path, seed=SEED, sessions=350, faults=60, servers=2, nodes=4, on_postgres=True)
    assert set(done) >= set(Fault) - {Fault.DISK_FULL}


async def test_one_server_and_three_nodes_on_sqlite(tmp_path: Path) -> None:
    done = await trial(tmp_path, seed=SEED, sessions=150, faults=40, servers=1, nodes=3, on_postgres=False)
    assert set(done) >= set(Fault) - {Fault.DISK_FULL, Fault.DATABASE_KILLED}


async def test_killed_nodes_cost_no_more_than_the_calls_in_flight(tmp_path: Path) -> None:
    kinds = (Fault.NODE_KILLED,)
    done = await trial(
        tmp_path, seed=SEED, sessions=150, faults=40, servers=1, nodes=4, on_postgres=False, kinds=kinds
    )
    assert done.keys() == set(kinds)
