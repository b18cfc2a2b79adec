"""A database has exactly the tables that the store's code speaks of, whichever database it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text

from polar.errors import PolarError
from polar.store import migrations
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


LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "0003"


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


async def test_a_database_from_before_the_first_migration_is_not_taken_for_a_newer_one(
    empty_place: Path | str,
) -> None:
    def migrate(connection: Connection) -> None:
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
        upgrade(connection, "older")

    async with Database.open(empty_place) as database:
        with pytest.raises(PolarError, match="made by an earlier Polar"):
            await database.write(migrate)


async def test_the_policy_has_its_one_row(empty_place: Path | str) -> None:
    async with Database.open(empty_place) as database:
        query = text("SELECT step, version FROM policy")
        rows = await database.read(lambda connection: connection.execute(query).all())
    assert [tuple(row) for row in rows] == [(0, 0)]
