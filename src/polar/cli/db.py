"""`polar db`: the server's database brought up to date, backed up and restored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import ConfigFile, DataDir, command_group
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.config.settings import Settings

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
    import asyncio

    from polar.app.stack import opened_store
    from polar.config.settings import load_settings

    async def work() -> str:
        async with opened_store(load_settings(config, {"data_dir": data_dir})) as store:
            return store.database.name

    typer.echo(f"{asyncio.run(work())} is up to date")


@db.command()
def backup(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="To be made.", show_default=False)],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Copy the database as it is at one moment, with recordings, artifacts and token; servers may run."""
    from polar.store.backup import back_up

    settings = _settings(config, data_dir, "backup")
    back_up(settings.data_dir, directory)
    typer.echo(f"backed {settings.data_dir} up to {directory}")


@db.command()
def restore(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A back-up.", show_default=False)],
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Put a back-up into a data directory without a database, on which no server runs."""
    from polar.store import backup

    settings = _settings(config, data_dir, "restore")
    backup.restore(directory, settings.data_dir)
    typer.echo(f"restored {directory} to {settings.data_dir}")


def _settings(config: Path | None, data_dir: Path | None, action: str) -> Settings:
    from polar.config.settings import load_settings

    settings = load_settings(config, {"data_dir": data_dir})
    _refuse_urls(settings, action)
    return settings


def _refuse_urls(settings: Settings, action: str) -> None:
    if settings.server.database_url:
        raise InvalidInput(
            f"polar db {action} is for SQLite", hint="use pg_dump and pg_restore; see docs/operations.md"
        )
    if settings.server.blobs_url:
        raise InvalidInput(
            f"polar db {action} is for files; server.blobs_url names another place",
            hint="copy it with its own tools; see docs/operations.md",
        )
