"""A migrated database has exactly the tables that the store's code speaks of, whichever database it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from polar.store.database import Database
from polar.store.migrations import configured, upgrade
from polar.store.tables import metadata


def details(connection: Connection) -> dict[str, Any]:
    """What a comparison of columns leaves out: the names of constraints, defaults and partial indexes."""
    inspector = inspect(connection)
    options = f"{connection.dialect.name}_where"
    return {
        table: {
            "primary key": inspector.get_pk_constraint(table),
            "unique": sorted(map(str, inspector.get_unique_constraints(table))),
            "foreign keys": sorted(map(str, inspector.get_foreign_keys(table))),
            "defaults": {column["name"]: column["default"] for column in inspector.get_columns(table)},
            "indexes": {
                index["name"]: (index["column_names"], str(index["dialect_options"].get(options)))
                for index in inspector.get_indexes(table)
            },
        }
        for table in metadata.tables
    }


async def test_migrations_make_the_tables_and_migrating_again_changes_nothing(
    empty_place: Path | str,
) -> None:
    def migrated(connection: Connection) -> dict[str, Any]:
        upgrade(connection, "again")
        assert list(compare_metadata(MigrationContext.configure(connection), metadata)) == []
        found = details(connection)
        command.downgrade(configured(connection), "base")
        return found

    def created(connection: Connection) -> dict[str, Any]:
        metadata.create_all(connection)
        return details(connection)

    async with Database.open(empty_place) as database:
        by_migration = await database.write(migrated)
        assert by_migration == await database.write(created)


async def test_the_policy_has_its_one_row(empty_place: Path | str) -> None:
    async with Database.open(empty_place) as database:
        query = text("SELECT step, version FROM policy")
        rows = await database.read(lambda connection: connection.execute(query).all())
    assert [tuple(row) for row in rows] == [(0, 0)]
