"""A fleet on a Ray cluster that lets anybody in is started with a warning."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from typer.testing import CliRunner

from polar.app.fleet import control
from polar.app.fleet.planning import FleetView
from polar.cli.main import app


@pytest.mark.parametrize(("mode", "warned"), [(None, True), ("disabled", True), ("token", False)])
def test_a_cluster_that_asks_nobody_is_warned_of(
    mode: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def up(*_: Any, **__: Any) -> FleetView:
        return FleetView(server="http://127.0.0.1:1", size="1", wanted=1, nodes=())

    monkeypatch.setattr(control, "connected", lambda _address: nullcontext())
    monkeypatch.setattr(control, "up", up)
    monkeypatch.setenv("POLAR_TOKEN", "x" * 16)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    result = CliRunner().invoke(app, ["fleet", "up", "--server", "http://127.0.0.1:1"])
    assert result.exit_code == 0, result.output
    assert ("can run programs on its machines" in result.stderr) is warned
