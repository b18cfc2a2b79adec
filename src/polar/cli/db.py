"""`polar db`: the server's database brought up to date, backed up and restored."""

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

    PostgreSQL and object stores have tools of their own for copies: see docs/operations.md.

    Examples:

      polar db backup /backups/monday
      polar db restore /backups/monday --data-dir restored
    """


@db.command()
def upgrade(config: ConfigFile = None, data_dir: DataDir = None) -> None:
    """Make or migrate the tables; a server does the same when it starts."""
    from polar.app.stack import opened_store

    async def work() -> str:
        async with opened_store(load_settings(config, {"data_dir": data_dir})) as store:
            return store.database.name

    typer.echo(f"{asyncio.run(work())} is up to date")


@db.command()
def backup(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="To be made.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Copy the database as it is at one moment, with recordings, artifacts and token; servers may run."""
    from polar.store.backup import back_up

    source = _data_dir(config, data_dir, "backup")
    back_up(source, directory)
    typer.echo(f"backed {source} up to {directory}")


@db.command()
def restore(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A back-up.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Put a back-up into a data directory without a database, on which no server runs."""
    from polar.store import backup

    target = _data_dir(config, data_dir, "restore")
    backup.restore(directory, target)
    typer.echo(f"restored {directory} to {target}")


def _data_dir(config: Path | None, data_dir: Path | None, action: str) -> Path:
    """Where the server keeps everything; InvalidInput if it keeps some of it elsewhere."""
    settings = load_settings(config, {"data_dir": data_dir})
    if settings.server.database_url:
        raise InvalidInput(
            f"polar db {action} is for SQLite", hint="use pg_dump and pg_restore; see docs/operations.md"
        )
    if settings.server.blobs_url:
        raise InvalidInput(
            f"polar db {action} is for files; server.blobs_url names another place",
            hint="copy it with its own tools; see docs/operations.md",
        )
    return settings.data_dir
