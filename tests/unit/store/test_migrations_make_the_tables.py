"""A database has exactly the tables that the store's code speaks of, whichever database it is."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text

from polar.store.database import Database
from polar.store.migrations import upgrade
from polar.store.tables import metadata


async def test_new_databases_have_the_newest_tables_and_migrating_again_changes_nothing(
    empty_place: Path | str,
) -> None:
    def differences(connection: Connection) -> list[object]:
        upgrade(connection, "again")
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with Database.open(empty_place) as database:
        assert await database.write(differences) == []


async def test_an_older_database_is_brought_to_the_newest_tables(empty_place: Path | str) -> None:
    def migrate(connection: Connection) -> list[object]:
        connection.execute(text("DROP INDEX ix_results_webhook_id_seq"))
        connection.execute(text("ALTER TABLE results DROP COLUMN webhook_id"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
        upgrade(connection, "older")
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with Database.open(empty_place) as database:
        assert await database.write(migrate) == []


async def test_the_policy_has_its_one_row(empty_place: Path | str) -> None:
    async with Database.open(empty_place) as database:
        query = text("SELECT step, version FROM policy")
        rows = await database.read(lambda connection: connection.execute(query).all())
    assert [tuple(row) for row in rows] == [(0, 0)]
