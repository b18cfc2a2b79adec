"""A plug-in that was installed while the server ran is not merely called unknown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polar.config import plugins
from polar.config.plugins import check_components
from polar.errors import InvalidInput
from polar.models.task import TaskSpec


def checked(harness: str) -> str:
    task = {"id": "t", "instruction": "Do.", "harness": harness, "evaluator": {"name": "command"}}
    with pytest.raises(InvalidInput) as refused:
        check_components(TaskSpec.model_validate(task))
    return str(refused.value)


def test_a_plug_in_installed_since_asks_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "shell" in plugins.names("harnesses")
    before = checked("my_agent")
    assert "known: " in before
    installed = tmp_path / "my_agent-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-agent\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[polar.harnesses]\nmy_agent = my_agent:MyAgent\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert "start the server and its nodes again" in checked("my_agent")
    assert "known: " in checked("another_agent")
