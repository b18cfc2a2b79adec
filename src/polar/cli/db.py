"""`polar db`: the server's database brought up to date, backed up and restored."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import one_of
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.config.settings import Settings


class Action(StrEnum):
    UPGRADE = "upgrade"
    BACKUP = "backup"
    RESTORE = "restore"


def db(
    action: Annotated[str, typer.Argument(metavar="upgrade|backup|restore", show_default=False)],
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIRECTORY]",
            help="With backup: to be made. With restore: a back-up.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML settings (default: ./polar.yaml if there).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where state lives (default: .polar).")] = None,
) -> None:
    """Bring a server's database up to date, back it up, or restore it.

    upgrade makes or migrates the tables; a server does the same when it starts. backup may run beside
    a server and copies the database as it is at one moment, with recordings, artifacts and token.
    restore needs a data directory without a database, and no server on it.

    PostgreSQL and object stores have tools of their own for copies: see docs/operations.md.

    Examples:

      polar db backup /backups/monday
      polar db restore /backups/monday --data-dir restored
    """
    from polar.config.settings import load_settings

    settings = load_settings(config, {"data_dir": data_dir})
    chosen = one_of(Action, action, "db")
    if chosen is Action.UPGRADE:
        _upgrade(settings)
        return
    if directory is None:
        raise InvalidInput(f"polar db {action} needs a directory")
    from polar.store.backup import back_up, restore

    _refuse_urls(settings, action)
    if chosen is Action.BACKUP:
        back_up(settings.data_dir, directory)
        typer.echo(f"backed {settings.data_dir} up to {directory}")
    else:
        restore(directory, settings.data_dir)
        typer.echo(f"restored {directory} to {settings.data_dir}")


def _upgrade(settings: Settings) -> None:
    import asyncio

    from polar.app.stack import opened_store

    async def work() -> str:
        async with opened_store(settings) as store:
            return store.database.name

    typer.echo(f"{asyncio.run(work())} is up to date")


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
