"""Where a task may have its workspace and other directories inside a bubblewrap sandbox."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.runtimes.base import Command, Host, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"workspace": "app"}, "absolute path"),
        ({"workspace": "/"}, "other than '/'"),
        ({"workspace": "/app/../etc"}, "without '..'"),
        ({"workspace": "/usr/app"}, "reserved"),
        ({"directories": ["/etc"]}, "reserved"),
        ({"directories": ["/home"]}, "reserved"),
        ({"directories": ["/tmp/x"]}, "reserved"),
        ({"workspace": "/app", "directories": ["/app/logs"]}, "must not contain each other"),
        ({"directories": ["/logs", "/logs"]}, "must not contain each other"),
    ],
    ids=str,
)
def test_places_that_are_not_free_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        plugins.create("runtimes", "runtime", Component(name="bubblewrap", options=options))


@pytest.mark.sandbox
async def test_a_task_finds_its_directories_where_it_wants_them(tmp_path: Path) -> None:
    options = BubblewrapRuntime.Options(workspace="/app", directories=("/tests", "/srv/data"))
    sandbox = await BubblewrapRuntime(options).start(SandboxSpec("s1", "127.0.0.1", 0), Host(tmp_path))
    try:
        await sandbox.upload(PurePosixPath("/tests/deep/er"), b"x")
        await sandbox.upload(PurePosixPath("file"), b"y")
        script = "pwd; cat /tests/deep/er /app/file; echo z > /srv/data/out; ls /workspace 2>&1; rmdir /tests"
        result = await sandbox.exec(Command(("/bin/sh", "-c", script)), timeout=30, log_name="x")
        assert result.stdout.text().startswith("/app\nxy")
        assert await sandbox.download(PurePosixPath("/srv/data/out")) == b"z\n"
        assert await sandbox.download(PurePosixPath("/tests/deep/er")) == b"x"
    finally:
        await sandbox.stop()
    assert list((tmp_path / "sessions").iterdir()) == []
