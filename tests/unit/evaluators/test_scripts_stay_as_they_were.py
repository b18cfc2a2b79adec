"""What graders run is read before any agent runs: one that can write to Polar's files changes none of it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polar.evaluators import inside
from polar.runtimes.base import Command


class Recorder:
    """A sandbox in which everything succeeds."""

    tmp = PurePosixPath("/tmp")

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def exec(self, command: Command, **_: object) -> Any:
        self.seen += command.argv
        return SimpleNamespace(timed_out=False, exit_code=0)

    async def upload(self, path: PurePosixPath, data: bytes, **_: object) -> None:
        self.seen.append(data.decode())


async def test_files_that_change_later_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "forged")
    monkeypatch.setattr(Path, "read_bytes", lambda *_: b"forged")
    sandbox = Recorder()
    await inside.run_grader("true", cast(Any, sandbox), env={}, timeout=1.0)
    assert len(sandbox.seen) > 4
    assert "forged" not in sandbox.seen
