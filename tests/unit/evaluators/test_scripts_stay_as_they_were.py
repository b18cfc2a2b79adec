"""What graders run is read before any agent runs: one that can write to Polar's files changes none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from polar.evaluators import inside
from tests.fakes.recording_sandbox import RecordingSandbox


async def test_files_that_change_later_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "forged")
    monkeypatch.setattr(Path, "read_bytes", lambda *_: b"forged")
    sandbox = RecordingSandbox()
    await inside.run_grader("true", cast(Any, sandbox), env={}, timeout=1.0)
    assert len(sandbox.seen) > 4
    assert "forged" not in sandbox.seen
