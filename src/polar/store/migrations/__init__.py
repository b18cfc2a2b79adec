"""The history of the tables, as Alembic runs it; `upgrade` brings a database to the newest version."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, text

from polar.errors import PolarError
from polar.store.tables import metadata, policy

_ONE_AT_A_TIME = 0x52 << 56
"""The advisory lock of whoever migrates; SQLite's write lock does the same there."""


def upgrade(connection: Connection, name: str) -> None:
    """Make or migrate the tables in the caller's transaction, which other processes wait for."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_ONE_AT_A_TIME})"))
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    context = MigrationContext.configure(connection)
    found = set(context.get_current_heads())
    known = {script.revision for script in scripts.walk_revisions()}
    if not found:
        metadata.create_all(connection)
        connection.execute(insert(policy).values(id=1, step=0, version=0))
        context.stamp(scripts, "head")
    elif max(found) < min(known):
        raise PolarError(
            f"the database {name} was made by an earlier Polar (version {', '.join(sorted(found))}), whose"
            " tables cannot be brought up to date",
            hint="choose another data_dir, or go on with that Polar",
        )
    elif found - known:
        raise PolarError(
            f"the database {name} was made by a newer Polar (version {', '.join(sorted(found))})",
            hint="upgrade Polar, or choose another data_dir",
        )
    elif found != set(scripts.get_heads()):
        command.upgrade(config, "head")
