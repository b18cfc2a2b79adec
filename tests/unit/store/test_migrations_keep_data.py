"""A database of every version that was released becomes one of today, with everything in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text

from polar.errors import Conflict
from polar.models.session import LeaseKey, SessionStatus
from polar.store import database as database_module
from polar.store.database import Database
from polar.store.migrate import configured, upgrade
from polar.store.store import Store
from polar.store.tables import metadata
from tests.fakes.control_plane import idle_task, result_of

VERSIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")


def row(**values: Any) -> dict[str, Any]:
    return values


def fill_first_tables(connection: Connection) -> None:
    """A waiting session, one that a node holds, and one that ended, as the first version stored them."""
    spec = idle_task("old", samples=3).model_dump_json()
    connection.execute(
        text(
            "INSERT INTO tasks (id, spec, spec_digest, priority, runtime, created_at)"
            " VALUES ('old', :spec, 'digest', 50, 'idle', 1.0)"
        ),
        {"spec": spec},
    )
    progress = json.dumps({"completions": 0, "sampled_tokens": 0})
    for sample, status, attempt, node, expires in (
        (0, "completed", 1, "north", None),
        (1, "running", 1, "north", 2_000.0),
        (2, "queued", 0, None, None),
    ):
        connection.execute(
            text(
                "INSERT INTO sessions (id, task_id, sample, priority, runtime, status, attempt, node,"
                " fencing_token, lease_expires_at, progress, cancel_requested, created_at, updated_at)"
                " VALUES (:id, 'old', :sample, 50, 'idle', :status, :attempt, :node, :token, :expires,"
                " :progress, :cancel, 1.0, 1.0)"
            ),
            row(
                id=f"old.{sample}",
                sample=sample,
                status=status,
                attempt=attempt,
                token=attempt,
                node=node,
                expires=expires,
                progress=progress,
                cancel=False,
            ),
        )
    result = {"session_id": "old.0", "task_id": "old", "sample": 0, "attempt": 1, "status": "completed"}
    connection.execute(
        text(
            "INSERT INTO results (session_id, task_id, fencing_token, reward, result, created_at)"
            " VALUES ('old.0', 'old', 1, 1.0, :result, 2.0)"
        ),
        {"result": json.dumps({**result, "verdict": {"reward": 1.0}})},
    )


@pytest.mark.parametrize("version", VERSIONS)
async def test_database_of_each_version_opens_with_its_data(
    version: str, empty_place: Path | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(connection: Connection, _name: str) -> None:
        command.upgrade(configured(connection), "0001")
        fill_first_tables(connection)
        command.upgrade(configured(connection), version)

    with monkeypatch.context() as older:
        older.setattr(database_module, "upgrade", old)
        async with Database.open(empty_place):
            pass
    url = empty_place if isinstance(empty_place, str) else None
    async with Store.open(tmp_path, lambda: 1_000.0, database_url=url) as store:
        assert (await store.tasks.get("old")).sessions == {
            SessionStatus.COMPLETED: 1,
            SessionStatus.RUNNING: 1,
            SessionStatus.QUEUED: 1,
        }
        (result,) = (await store.results.after(0)).results
        assert result.session_id == "old.0"
        (lease,) = await store.leases.claim("south", limit=2, runtimes=["idle"], seconds=10)
        assert (lease.session_id, lease.task) == ("old.2", idle_task("old", samples=3))
        assert await store.complete(lease.session_id, lease.key, result_of(lease))
        # Leased before there were secrets: it is run again, and nobody delivers it meanwhile.
        held = lease.model_copy(update={"session_id": "old.1", "sample": 1, "attempt": 1})
        with pytest.raises(Conflict):
            await store.complete("old.1", LeaseKey(fencing_token=1, secret=""), result_of(held))
        assert len((await store.results.after(0)).results) == 2


async def test_nodes_that_joined_before_there_was_a_table_of_them_can_be_drained(
    empty_place: Path | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(connection: Connection, _name: str) -> None:
        command.upgrade(configured(connection), "0005")
        connection.execute(
            text("INSERT INTO policy_nodes (node, step, version, seen_at) VALUES ('n', 0, 0, 1)")
        )

    with monkeypatch.context() as older:
        older.setattr(database_module, "upgrade", old)
        async with Database.open(empty_place):
            pass
    url = empty_place if isinstance(empty_place, str) else None
    async with Store.open(tmp_path, lambda: 1.0, database_url=url) as store:
        assert (await store.nodes.drain("n")).is_draining


async def test_every_version_is_tested_and_migrating_twice_changes_nothing(empty_place: Path | str) -> None:
    def look(connection: Connection) -> tuple[set[str], list[object]]:
        upgrade(connection, "again")
        from alembic.script import ScriptDirectory

        scripts = ScriptDirectory.from_config(configured(connection)).walk_revisions()
        differences = compare_metadata(MigrationContext.configure(connection), metadata)
        return {script.revision for script in scripts}, list(differences)

    async with Database.open(empty_place) as database:
        versions, differences = await database.write(look)
    assert versions == set(VERSIONS)
    assert differences == []
