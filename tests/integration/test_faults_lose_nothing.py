"""Servers, nodes, engine, database, network, disk and clock fail; every session ends, and ends once.

A short form of suites/faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.trial import trial

pytestmark = pytest.mark.timeout(400)


async def test_two_servers_on_postgres_through_every_fault(tmp_path: Path) -> None:
    done = await trial(tmp_path, seed=7, sessions=60, faults=10, servers=2, nodes=2, on_postgres=True)
    assert done
