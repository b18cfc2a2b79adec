"""`polar replay` and `polar branch` wait, tell how far the recording was followed, and show what differed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polar.cli import branch
from polar.cli.main import app
from polar.errors import Backoff
from polar.models.session import Divergence, Origin, ReplayReport, SessionStatus, TrajectoryStats
from polar.models.task import OnDivergence
from polar.models.views import SessionView
from tests.fakes.recordings import encoded, recording
from tests.fakes.replaying_server import ReplayingServer

DIFFERENCE = "\n".join(
    ["--- recorded", "+++ asked", "@@ -1 +1 @@", "-pid 17", "+pid 18\x1b[2J", *["  same"] * 60]
)
DIVERGENCE = Divergence(call=4, taken=OnDivergence.STOP, difference=DIFFERENCE)
FAITHFUL = ReplayReport(
    origin="t.0", calls=5, sampled_tokens=40, varied_messages=2, variations=("in 0.5s → in 0.7s",)
)
DIVERGED = ReplayReport(
    origin="t.0", calls=4, sampled_tokens=31, unused_calls=1, divergence_count=3, divergences=(DIVERGENCE,)
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ReplayingServer:
    made = ReplayingServer()
    made.report = FAITHFUL
    monkeypatch.setattr(branch, "Client", made)
    monkeypatch.setattr(branch, "LOST_ANSWER", Backoff(0.0, 0.0, attempts=3))
    return made


def polar(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_session_that_replays_says_so(server: ReplayingServer) -> None:
    done = polar("replay", "t.0")
    assert done.exit_code == 0, done.output
    assert "replay of t.0" in done.stdout
    said = "answered from the recording: 5 model calls of t.0, 40 tokens, 2 messages varied"
    assert done.stdout.splitlines()[-3:] == [said, "in 0.5s → in 0.7s", "it replays to the end"]
    assert server.begun[0].origin == Origin(
        session_id="t.0", samples_on=False, on_divergence=OnDivergence.STOP
    )


def test_a_divergence_is_shown_as_a_diff_and_is_an_error(server: ReplayingServer) -> None:
    server.report = DIVERGED
    done = polar("replay", "t.0", "--until", 5, "--on-divergence", "stop")
    assert done.exit_code == 1
    assert "4 model calls of t.0, 31 tokens, 3 divergences, 1 answer never asked for" in done.stdout
    assert "model call 4 is not the recorded one; the agent was ended" in done.stdout
    shown = done.stdout.splitlines()
    assert "  -pid 17" in shown
    # What a request holds must not drive the terminal.
    assert "  +pid 18␛[2J" in shown
    assert "  … 25 more lines (--full shows all)" in shown
    assert shown[-3:] == ["and 2 divergences more", "", "it does not replay"]
    assert "more lines" not in polar("replay", "t.0", "--full").stdout


@pytest.mark.parametrize("report", [None, FAITHFUL.model_copy(update={"unused_calls": 1})])
def test_what_did_not_follow_the_recording_to_its_end_is_an_error(
    server: ReplayingServer, report: ReplayReport | None
) -> None:
    server.report = report
    assert polar("replay", "t.0").exit_code == 1


def test_scripts_read_the_report_as_json(server: ReplayingServer) -> None:
    server.report = DIVERGED
    done = polar("replay", "t.0", "--json")
    assert done.exit_code == 1
    view = SessionView.model_validate_json(done.stdout)
    assert view.result is not None
    assert view.result.replay == DIVERGED


def test_branches_are_listed_and_those_that_left_the_recording_early_named(server: ReplayingServer) -> None:
    server.report = DIVERGED
    done = polar("branch", "t.0", "--at", 5, "--samples", 2)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("branch of t.0 after 5 calls") == 2
    note = "4 model calls of t.0, 31 tokens, 3 divergences, 1 answer never asked for"
    assert f"t.1: {note}; polar show t.1 tells more" in done.stdout.splitlines()
    done = polar("branch", "t.0", "--at", 5, "--budgets", "session", "--json")
    (view,) = map(json.loads, done.stdout.splitlines())
    assert (view["id"], view["origin"]["budgets"]) == ("t.1", "session")


def test_a_branch_leaves_before_the_last_call(server: ReplayingServer) -> None:
    server.replay("t.0", None, on_divergence=OnDivergence.STOP, request_id="recorded")
    (ended,) = server.begun
    assert ended.result is not None
    result = ended.result.model_copy(update={"stats": TrajectoryStats(completions=3)})
    for at, exit_code in ((2, 0), (3, 1), (4, 1)):
        server.begun = [ended.model_copy(update={"result": result})]
        done = polar("branch", ended.id, "--at", at)
        assert done.exit_code == exit_code
        if exit_code:
            assert "--at: must be below 3, its number of model calls" in done.output


@pytest.mark.parametrize("command", [("replay", "t.0"), ("branch", "t.0", "--at", "2")])
def test_a_failed_session_is_an_error_with_its_reason(
    server: ReplayingServer, command: tuple[str, ...]
) -> None:
    server.status, server.report = SessionStatus.FAILED, None
    done = polar(*command)
    assert done.exit_code == 1
    assert "1 × no sandbox" in done.stderr


@pytest.mark.parametrize("command", [("replay", "t.0"), ("branch", "t.0", "--at", "2")])
def test_a_lost_answer_begins_nothing_twice(server: ReplayingServer, command: tuple[str, ...]) -> None:
    server.lost_answers = 2
    assert polar(*command).exit_code == 0
    assert len(server.asked) == 3
    assert len(set(server.asked)) == 1


def test_the_page_of_a_session_tells_what_it_began_with(tmp_path: Path) -> None:
    made = recording()
    file = tmp_path / "session.rec"
    file.write_bytes(encoded(replace(made, result=made.result.model_copy(update={"replay": DIVERGED}))))
    shown = polar("show", file).stdout
    note = "4 model calls of t.0, 31 tokens, 3 divergences, 1 answer never asked for"
    assert f"began with      {note}" in shown
    assert "model call 4 is not the recorded one; the agent was ended" in shown
    assert "more lines" not in polar("show", file, "--full").stdout


def test_another_version_of_the_harness_is_no_model_call(tmp_path: Path) -> None:
    made, file = recording(), tmp_path / "session.rec"
    told = "Version 1 asked, and now version 2 asks."
    other = Divergence(call=None, taken=OnDivergence.LIVE, difference=told)
    report = ReplayReport(origin="t.0", divergence_count=1, divergences=(other,))
    file.write_bytes(encoded(replace(made, result=made.result.model_copy(update={"replay": report}))))
    shown = polar("show", file).stdout
    assert f"the harness has another version\n  {told}" in shown
    assert "is not the recorded one" not in shown
