"""Extensions that do nothing, for tests of what only names them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from polar.config import plugins


class Idle:
    """Stands for any harness, runtime, evaluator or builder."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        seconds: float = Field(default=1.0, gt=0)


def register_idle_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `idle` and `other` the only names of every kind."""

    def load(_kind: str, name: str) -> Any:
        assert name in ("idle", "other")
        return Idle

    monkeypatch.setattr(plugins, "names", lambda _kind: ("idle", "other"))
    monkeypatch.setattr(plugins, "load", load)


def registered(monkeypatch: pytest.MonkeyPatch, kind: str, **extensions: Any) -> None:
    """Add extensions to those of a kind, for the length of one test."""
    load, names = plugins.load, plugins.names

    def load_also(asked: str, name: str) -> Any:
        return extensions[name] if asked == kind and name in extensions else load(asked, name)

    def names_also(asked: str) -> tuple[str, ...]:
        return tuple(sorted({*names(asked), *extensions})) if asked == kind else names(asked)

    monkeypatch.setattr(plugins, "load", load_also)
    monkeypatch.setattr(plugins, "names", names_also)
