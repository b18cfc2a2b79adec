"""A user's mistake ends as one line on standard error and exit code 1, never as a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar.cli.main import app
from polar.errors import InvalidInput


def mistake(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr.removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "./absent.rec"), "absent.rec: cannot be read: No such file"),
        (("submit", "absent.yaml"), "absent.yaml: cannot be read: No such file"),
        (("submit", "absent"), "absent: cannot be read: No such file"),
        (("tasks", "validate", "absent/tasks"), "absent/tasks: cannot be read: No such file"),
        (("results", "--format", "atif"), "--format atif writes files: name a directory with --out DIR"),
        (("examples", __file__), f"{__file__}: cannot write: Not a directory"),
    ],
)
def test_a_wrong_argument_is_explained(arguments: tuple[str, ...], said: str) -> None:
    message = mistake(*arguments)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tasks", "--status", "x"), "'--status': 'x' is not one of 'queued', 'running', 'finished'"),
        (("show", "x", "--color", "y"), "'--color': 'y' is not one of 'logprob', 'mask', 'version', 'none'"),
        (("policy", "pause", "--mode", "x"), "'--mode': 'x' is not one of 'keep', 'drain', 'abort'"),
    ],
)
def test_a_wrong_choice_names_the_right_ones(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("command", [("tasks",), ("sessions",), ("results",), ("show", "abc")])
def test_an_absent_server_is_explained(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TOKEN", "x" * 16)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    message = mistake(*command, "--server", f"http://127.0.0.1:{port}")
    assert "cannot be reached" in message
    assert "\n" not in message


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_path_that_is_not_there_is_not_only_taken_for_a_session(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = mistake(command, "recordings", POLAR_TOKEN="")
    assert message.startswith("error: recordings: no such file or directory here, and as a session: no token")
    assert "\n" not in message


def test_several_problems_of_a_task_file_are_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("id: a\nsamples: 0\n")
    lines = mistake("submit", str(tmp_path / "t.yaml")).splitlines()
    assert len(lines) == 5
    assert lines[0] == "error: 4 problems:"


def test_an_error_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object) -> None:
        raise InvalidInput("bad \x1b[2J\x9b name")

    monkeypatch.setattr("polar.cli.show.recording_bytes", show)
    message = mistake("show", "abc")
    assert message == "error: bad ␛[2J\N{REPLACEMENT CHARACTER} name"


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("polar.cli.show.recording_bytes", show)
    result = CliRunner().invoke(app, ["show", "abc"])
    assert isinstance(result.exception, RuntimeError)


def test_an_interrupt_exits_with_130() -> None:
    program = (
        "import os, signal, sys\n"
        # A suite started in the background inherits that SIGINT is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import polar.cli.show as show\n"
        "from polar.cli.main import main\n"
        "show.recording_bytes = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['polar', 'show', 'abc']\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 128 + signal.SIGINT
    assert "Traceback" not in run.stderr


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "polar", "--help"]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert "Traceback" not in run.stderr
