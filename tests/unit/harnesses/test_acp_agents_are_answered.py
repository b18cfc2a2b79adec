"""What the client of the Agent Client Protocol answers an agent, run as it is run in a sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.harnesses import acp_client
from tests.fakes import acp_agent


def run(workspace: Path, *asked: Any, stop: str = "end_turn", settings: str = "{}") -> tuple[int, Any, str]:
    """Return the exit code, what the agent got, and what was said on standard error."""
    agent = (sys.executable, acp_agent.__file__, json.dumps(asked), stop)
    told = workspace / "settings.json"
    told.write_text(settings)
    client = (sys.executable, "-I", "-S", acp_client.__file__, str(told))
    ended = subprocess.run((*client, *agent), cwd=workspace, input=b"/do it", capture_output=True, timeout=60)
    said = json.loads(ended.stdout) if ended.stdout.startswith(b"{") else None
    return ended.returncode, said and said["got"], ended.stderr.decode()


@pytest.mark.parametrize(
    ("kinds", "outcome"),
    [
        (("reject_once", "allow_once", "allow_always"), {"outcome": "selected", "optionId": "allow_always"}),
        (("allow_once", "reject_always"), {"outcome": "selected", "optionId": "allow_once"}),
        (("reject_once",), {"outcome": "cancelled"}),
    ],
)
def test_what_needs_permission_is_allowed(
    tmp_path: Path, kinds: tuple[str, ...], outcome: dict[str, str]
) -> None:
    options = [{"kind": kind, "optionId": kind, "name": kind} for kind in kinds]
    _, got, _ = run(tmp_path, ["session/request_permission", {"toolCall": {}, "options": options}])
    assert got == [{"outcome": outcome}]


def test_files_of_the_workspace_are_read_and_written(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "a.txt")
    _, got, _ = run(
        tmp_path,
        ["fs/write_text_file", {"path": path, "content": "one\ntwo\nthree\n"}],
        ["fs/read_text_file", {"path": path}],
        ["fs/read_text_file", {"path": path, "line": 2, "limit": 1}],
    )
    assert got == [{}, {"content": "one\ntwo\nthree\n"}, {"content": "two\n"}]


def test_files_are_read_with_their_own_ends_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\x0c\xe2\x80\xa8two\r\nthree")
    _, got, _ = run(
        tmp_path,
        ["fs/read_text_file", {"path": "a.txt"}],
        ["fs/read_text_file", {"path": "a.txt", "line": 2, "limit": 1}],
    )
    assert got == [{"content": "one\r\ntwo\x0c\u2028two\r\nthree"}, {"content": "two\x0c\u2028two\r\n"}]


def test_nothing_outside_the_workspace_is_touched(tmp_path: Path) -> None:
    workspace, secret = tmp_path / "workspace", tmp_path / "secret.txt"
    workspace.mkdir()
    secret.write_text("secret")
    (workspace / "link").symlink_to(secret)
    _, got, _ = run(
        workspace,
        *(["fs/read_text_file", {"path": path}] for path in (str(secret), "../secret.txt", "link")),
        ["fs/write_text_file", {"path": str(secret), "content": "mine"}],
        ["terminal/create", {"command": "pwd", "cwd": str(tmp_path)}],
        ["fs/read_text_file", {"path": "missing.txt"}],
    )
    assert all("outside the workspace" in error["message"] for error in got[:-1])
    assert "FileNotFoundError" in got[-1]["message"]
    assert secret.read_text() == "secret"


def test_commands_run_in_terminals(tmp_path: Path) -> None:
    command = {"command": "sh", "args": ["-c", "echo $A; pwd; exit 3"], "env": [{"name": "A", "value": "hi"}]}
    _, got, _ = run(
        tmp_path,
        ["terminal/create", command],
        ["terminal/wait_for_exit", {"terminalId": "$terminal"}],
        ["terminal/output", {"terminalId": "$terminal"}],
        ["terminal/release", {"terminalId": "$terminal"}],
        ["terminal/output", {"terminalId": "$terminal"}],
    )
    assert got[1] == {"exitCode": 3, "signal": None}
    assert (got[2]["output"], got[2]["truncated"]) == (f"hi\n{tmp_path}\n", False)
    assert got[2]["exitStatus"] == got[1]
    assert "KeyError" in got[4]["message"]


def test_a_terminal_keeps_the_end_of_its_output_and_can_be_killed(tmp_path: Path) -> None:
    _, got, _ = run(
        tmp_path,
        ["terminal/create", {"command": "seq 1000", "outputByteLimit": 5}],
        ["terminal/wait_for_exit", {"terminalId": "$terminal"}],
        ["terminal/output", {"terminalId": "$terminal"}],
        ["terminal/create", {"command": "sleep 1000"}],
        ["terminal/kill", {"terminalId": "$terminal"}],
        ["terminal/wait_for_exit", {"terminalId": "$terminal"}],
    )
    assert (got[2]["output"], got[2]["truncated"]) == ("1000\n", True)
    assert got[5] == {"exitCode": None, "signal": "SIGKILL"}


def test_a_command_has_ended_though_what_it_started_goes_on(tmp_path: Path) -> None:
    _, got, _ = run(
        tmp_path,
        ["terminal/create", {"command": "sleep 1000 & echo started"}],
        ["terminal/wait_for_exit", {"terminalId": "$terminal"}],
        ["terminal/output", {"terminalId": "$terminal"}],
    )
    assert got[1] == {"exitCode": 0, "signal": None}
    assert got[2]["output"] == "started\n"


def test_a_command_and_its_variables_are_no_options_of_another_program(tmp_path: Path) -> None:
    variables = [{"name": "-i", "value": "1"}]
    _, got, _ = run(
        tmp_path,
        ["terminal/create", {"command": "printenv", "args": ["-i"], "env": variables}],
        ["terminal/wait_for_exit", {"terminalId": "$terminal"}],
        ["terminal/create", {"command": "A=1", "args": ["true"]}],
    )
    assert got[1] != {"exitCode": 125, "signal": None}
    assert "FileNotFoundError" in got[2]["message"]


def test_requests_that_are_unknown_are_refused_as_such(tmp_path: Path) -> None:
    _, got, _ = run(tmp_path, ["session/dance", {}])
    assert got[0]["code"] == -32601


def test_requests_with_parameters_of_another_form_are_answered_with_an_error(tmp_path: Path) -> None:
    _, got, _ = run(tmp_path, ["session/request_permission", {"options": [1]}])
    assert got[0]["code"] == -32603


@pytest.mark.parametrize(("stop", "code"), [("end_turn", 0), ("max_tokens", 1), ("refusal", 1)])
def test_the_run_ends_with_the_turn_s_reason(tmp_path: Path, stop: str, code: int) -> None:
    exit_code, _, told = run(tmp_path, stop=stop)
    assert exit_code == code
    assert f"the turn ended: {stop}" in told
    assert "not a message" in told


@pytest.mark.parametrize("stop", ["crash", "orphan"])
def test_an_agent_that_ends_early_is_one_line(tmp_path: Path, stop: str) -> None:
    """Also if a program that it has started still holds its output open."""
    exit_code, _, told = run(tmp_path, stop=stop)
    assert exit_code == 1
    assert "the agent failed: the agent ended with exit code 3" in told


def test_an_agent_that_wants_authentication_says_with_what(tmp_path: Path) -> None:
    exit_code, _, told = run(tmp_path, stop="locked")
    assert exit_code == 1
    assert "Authentication required (options.auth may be one of: key)" in told


def test_an_agent_that_wants_authentication_without_saying_how_is_one_line(tmp_path: Path) -> None:
    exit_code, _, told = run(tmp_path, stop="locked for good")
    assert exit_code == 1
    assert told.endswith("the agent failed: Authentication required\n")


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        ("silent", "the agent ended with exit code 0"),
        ("mute", "the agent closed its output"),
        ("endless", "a line of the agent's output is too long"),
        ("confused", "a message of the agent is not understood"),
        ("nameless", "the agent answered session/new without sessionId"),
        ("reasonless", "the agent answered session/prompt without stopReason"),
    ],
)
def test_an_agent_that_breaks_the_protocol_is_one_line(tmp_path: Path, stop: str, why: str) -> None:
    exit_code, _, told = run(tmp_path, stop=stop)
    assert exit_code == 1
    assert f"the agent failed: {why}" in told


@pytest.mark.parametrize("stop", ["garbled", "deep"])
def test_what_is_not_understood_is_left_out(tmp_path: Path, stop: str) -> None:
    exit_code, _, told = run(tmp_path, stop=stop)
    assert exit_code == 1
    assert f"the turn ended: {stop}" in told
