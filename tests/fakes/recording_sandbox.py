"""A sandbox in which everything succeeds and nothing happens."""

from __future__ import annotations

from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from polar.runtimes.base import Command


class RecordingSandbox:
    tmp = PurePosixPath("/tmp")

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def exec(self, command: Command, **_: object) -> Any:
        self.seen += command.argv
        return SimpleNamespace(timed_out=False, exit_code=0)

    async def upload(self, path: PurePosixPath, data: bytes, **_: object) -> None:
        self.seen.append(data.decode())
