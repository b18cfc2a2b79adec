"""Tables of tasks, sessions and what happened to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from rich.table import Table

from polar.cli.output import clock, table
from polar.models.session import AgentEnd, SessionEvent, SessionStatus
from polar.models.task import TaskStatus
from polar.models.views import SessionView, TaskView


def task_table(tasks: Iterable[TaskView]) -> Table:
    rows = (
        (
            task.spec.id,
            task.status,
            task.spec.harness.name,
            task.spec.samples,
            counts(task.sessions),
            task.mean_reward,
        )
        for task in tasks
    )
    return table(["TASK", "STATUS", "HARNESS", ">SAMPLES", "SESSIONS", ">MEAN REWARD"], rows)


def counts(sessions: Mapping[SessionStatus, int]) -> str:
    """`2 running, 1 completed`, in the order of a session's life."""
    return ", ".join(f"{sessions[status]} {status}" for status in SessionStatus if status in sessions)


def session_table(sessions: Iterable[SessionView]) -> Table:
    columns = ["SESSION", "TASK", ">SAMPLE", "STATUS", ">ATTEMPT", ">COMPLETIONS", ">TOKENS", ">REWARD"]
    rows = (
        (
            session.id,
            session.task_id,
            session.sample,
            session.status,
            session.attempt,
            session.progress.completions,
            session.progress.sampled_tokens,
            session.result.reward if session.result else None,
            _note(session),
        )
        for session in sessions
    )
    return table([*columns, "NOTE"], rows)


def _note(session: SessionView) -> str:
    result = session.result
    if result is None:
        return f"on {session.node}" if session.node else ""
    has_failed = result.agent_end is AgentEnd.EXITED and result.exit_code
    return result.error or f"agent {result.agent_end}" + (f" with {result.exit_code}" if has_failed else "")


def event_table(events: Sequence[SessionEvent]) -> Table:
    """What happened to one session, and how long it stayed where it was."""
    rows = (
        (
            event.attempt,
            event.status,
            clock(event.at),
            f"{after.at - event.at:.1f}" if after else None,
            event.node,
            event.detail,
        )
        for event, after in zip_longest(events, events[1:])
    )
    return table([">ATTEMPT", "STATUS", "AT", ">SECONDS", "NODE", "DETAIL"], rows)


def cancellation(status: TaskStatus | SessionStatus, sessions: Mapping[SessionStatus, int]) -> str | None:
    """What to say of a task or session, as it is, that somebody has just cancelled; None: it says it all."""
    unended = sum(count for status, count in sessions.items() if not status.ended)
    if unended:
        ending = "session is" if unended == 1 else "sessions are"
        return f"{unended} {ending} being cancelled: nodes hear of it within seconds and end the agents"
    return None if status == SessionStatus.CANCELLED else "nothing was cancelled: it had ended already"
