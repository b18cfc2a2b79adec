"""Servers and nodes give freed memory back; a trainer in the same process computes as fast as alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from polar.app import stack
from polar.config.settings import ServerSettings, Settings


@pytest.mark.parametrize("trains", [False, True])
async def test_large_blocks_are_returned_unless_a_trainer_computes_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    asked: list[int] = []
    library = SimpleNamespace(mallopt=lambda option, value: asked.append(option))
    monkeypatch.setattr(stack, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    monkeypatch.setattr(stack, "sys", SimpleNamespace(modules={"torch": library} if trains else {}))
    settings = Settings(data_dir=tmp_path, server=ServerSettings(port=0))
    async with stack.serving(settings, lambda _step: None):
        assert bool(asked) is not trains
