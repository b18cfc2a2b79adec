"""Servers and nodes give freed memory back; a trainer in the same process computes as fast as alone."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from polar.app import stack


@pytest.mark.parametrize("trains", [False, True])
def test_large_blocks_are_returned_unless_a_trainer_computes_here(
    monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    asked: list[int] = []
    library = SimpleNamespace(mallopt=lambda option, value: asked.append(option))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    modules = {name: module for name, module in sys.modules.items() if name != "torch"}
    monkeypatch.setattr(sys, "modules", modules | ({"torch": library} if trains else {}))

    stack._return_large_blocks()

    assert bool(asked) is not trains
