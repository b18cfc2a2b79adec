"""A database has exactly the tables that the store's code speaks of, whichever database it is."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from polar.errors import PolarError
from polar.store import migrations
from polar.store.database import Database
from polar.store.migrations import upgrade
from polar.store.tables import metadata

VERSION = ("0004", "73846294")
"""The newest version, and a digest of its tables: with other tables both are others."""


async def test_new_databases_have_the_newest_tables_and_migrating_again_changes_nothing(
    empty_place: Path | str,
) -> None:
    def differences(connection: Connection) -> list[object]:
        upgrade(connection, "again")
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with Database.open(empty_place) as database:
        assert await database.write(differences) == []


def test_other_tables_have_another_version() -> None:
    """By its version alone a database with the tables of an older Polar is told from one that can be used."""
    (head,) = ScriptDirectory(str(Path(migrations.__file__).parent)).get_heads()
    indexes = [index for table in metadata.sorted_tables for index in table.indexes]
    indexes.sort(key=lambda index: str(index.name))
    made: list[DDLElement] = [*map(CreateTable, metadata.sorted_tables), *map(CreateIndex, indexes)]
    statements = "".join(str(one.compile(dialect=sqlite.dialect())) for one in made)
    assert (head, hashlib.sha256(statements.encode()).hexdigest()[:8]) == VERSION


LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "0004"


def upgrade() -> None:
    op.add_column("nodes", sa.Column("shoe_size", sa.Integer()))
"""


async def test_an_older_database_is_brought_to_the_newest_tables(
    empty_place: Path | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differences(connection: Connection) -> list[str]:
        upgrade(connection, "older")
        return [kind for kind, *_ in compare_metadata(MigrationContext.configure(connection), metadata)]

    later = shutil.copytree(Path(migrations.__file__).parent, tmp_path / "migrations")
    (later / "versions" / "9999_nodes_have_feet.py").write_text(LATER)
    async with Database.open(empty_place) as database:
        monkeypatch.setattr(migrations, "__file__", str(later / "__init__.py"))
        for _ in range(2):
            assert await database.write(differences) == ["remove_column"]


@pytest.mark.parametrize("version", ["0001", "0003"])
async def test_a_database_from_before_the_first_migration_is_neither_used_nor_taken_for_a_newer_one(
    empty_place: Path | str, version: str
) -> None:
    def migrate(connection: Connection) -> None:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))
        upgrade(connection, "older")

    async with Database.open(empty_place) as database:
        with pytest.raises(PolarError, match="made by an earlier Polar"):
            await database.write(migrate)


async def test_the_policy_has_its_one_row(empty_place: Path | str) -> None:
    async with Database.open(empty_place) as database:
        query = text("SELECT step, version FROM policy")
        rows = await database.read(lambda connection: connection.execute(query).all())
    assert [tuple(row) for row in rows] == [(0, 0)]
