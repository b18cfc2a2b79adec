"""`polar db`: upgrades, backs up and restores the server's database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from polar.cli.options import ConfigFile, DataDir, command_group
from polar.config.settings import load_settings
from polar.errors import InvalidInput

db = command_group(no_args_is_help=True)


@db.callback()
def about() -> None:
    """Bring a server's database up to date, back it up, or restore it.

    For PostgreSQL and object stores, use their own backup tools: see docs/operations.md.

    Examples:

      polar db backup /backups/monday
      polar db restore /backups/monday --data-dir restored
    """


@db.command()
def upgrade(config: ConfigFile = None, data_dir: DataDir = None) -> None:
    """Create or migrate the tables, as a server does when it starts."""
    from polar.app.stack import open_store

    async def work() -> str:
        async with open_store(load_settings(config, {"data_dir": data_dir})) as store:
            return store.database.name

    typer.echo(f"{asyncio.run(work())} is up to date")


@db.command()
def backup(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The directory to create.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Copy the database, with recordings, artifacts and token, as of one moment; servers may be running."""
    from polar.store.backup import back_up

    source = _data_dir(config, data_dir, "backup")
    back_up(source, directory)
    typer.echo(f"backed up {source} to {directory}")


@db.command()
def restore(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A backup.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Restore a backup into a data directory without a database, while no server uses it."""
    from polar.store import backup

    target = _data_dir(config, data_dir, "restore")
    backup.restore(directory, target)
    typer.echo(f"restored {directory} to {target}")


def _data_dir(config: Path | None, data_dir: Path | None, action: str) -> Path:
    """Return the server's data directory; raise InvalidInput if part of its data is elsewhere."""
    settings = load_settings(config, {"data_dir": data_dir})
    if settings.server.database_url:
        raise InvalidInput(
            f"polar db {action} supports only SQLite",
            hint="use pg_dump and pg_restore; see docs/operations.md",
        )
    if settings.server.blobs_url:
        raise InvalidInput(
            f"polar db {action} supports only local files, and server.blobs_url is set",
            hint="use the object store's own tools; see docs/operations.md",
        )
    return settings.data_dir
