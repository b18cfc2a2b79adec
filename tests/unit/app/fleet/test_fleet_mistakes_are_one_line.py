"""A mistake with `polar fleet` ends as one line at once, whatever Ray would do."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from polar.cli.main import app

TO_A_SERVER = ("--server", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "--nodes", "many", *TO_A_SERVER), "fleet.nodes"),
        (("up", "--nodes", "3..1", *TO_A_SERVER), "'3..1' has a maximum below its minimum"),
        (("up", "--resource", "CPU", *TO_A_SERVER), "must be NAME=AMOUNT"),
    ],
)
def test_a_wrong_argument_is_explained(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_TOKEN", "x" * 16)
    result = CliRunner().invoke(app, ["fleet", *arguments])
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_absent_cluster_is_said_at_once(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = CliRunner().invoke(app, ["fleet", "status", "--address", f"{scheme}127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert f"cannot reach a Ray cluster at {scheme}127.0.0.1:{port}: Connection refused" in result.stderr
