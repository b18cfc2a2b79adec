"""The tables of sessions say at a glance what went wrong, in numbers that people read."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from polar.cli.sessions import event_table, session_table
from polar.cli.submit import REASONS, failures
from polar.models.session import AgentEnd, Progress, SessionEvent, SessionResult, SessionStatus
from polar.models.views import SessionView


def shown(table: Table) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def ended(agent_end: AgentEnd, exit_code: int) -> SessionView:
    about = {"task_id": "t", "sample": 0, "attempt": 1, "status": SessionStatus.COMPLETED}
    result = {**about, "session_id": "t.0", "agent_end": agent_end, "exit_code": exit_code}
    return SessionView(
        **about,
        id="t.0",
        run="unnamed",
        progress=Progress(),
        created_at=0,
        updated_at=0,
        result=SessionResult.model_validate(result),
    )


def test_an_agent_that_exits_with_an_error_is_told_from_one_that_does_not() -> None:
    assert "agent exited with 1" in shown(session_table([ended(AgentEnd.EXITED, 1)]))
    assert "agent exited\n" in shown(session_table([ended(AgentEnd.EXITED, 0)]))
    assert "agent timeout\n" in shown(session_table([ended(AgentEnd.TIMEOUT, 137)]))


def test_a_moment_is_no_power_of_ten() -> None:
    stages = [(SessionStatus.READY, 10.0), (SessionStatus.RUNNING, 10.00004), (SessionStatus.POSTRUN, 21.54)]
    events = [
        SessionEvent(seq=seq, session_id="t.0", task_id="t", attempt=1, status=status, at=at)
        for seq, (status, at) in enumerate(stages)
    ]
    rows = [line.split() for line in shown(event_table(events)).splitlines()]
    assert [row[4] for row in rows[1:]] == ["0.0", "11.5", "-"]


def failed(error: str | None, sample: int = 0) -> SessionResult:
    about = {"session_id": f"t.{sample}", "task_id": "t", "sample": sample, "attempt": 1}
    return SessionResult.model_validate({**about, "status": SessionStatus.FAILED, "error": error})


def test_failures_are_counted_by_the_first_line_of_their_reason() -> None:
    completed = ended(AgentEnd.EXITED, 1).result
    assert completed is not None
    results = [
        failed("disk full"),
        failed("no sandbox\nin 3 places"),
        completed,
        failed("no sandbox"),
        failed(None),
    ]
    told = failures(results)
    assert told.splitlines() == [
        "4 of 5 sessions failed:",
        "  2 × no sandbox",
        "  1 × disk full",
        "  1 × no reason given",
    ]
    assert failures([completed]) == ""


def test_many_reasons_are_not_all_told() -> None:
    told = failures([failed(f"reason {number}") for number in range(REASONS + 5)]).splitlines()
    assert len(told) == 1 + REASONS + 1
    assert told[-1] == "  and 5 other reasons: polar sessions --status failed"
