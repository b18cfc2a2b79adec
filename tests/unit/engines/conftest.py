"""Engine clients whose patience is short enough for tests."""

from __future__ import annotations

import pytest

from polar.engines import http


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_BACKOFF_SECONDS", 0.001)
