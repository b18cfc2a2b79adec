"""Extensions that do nothing, for tests of what only names them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from polar import plugins


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
