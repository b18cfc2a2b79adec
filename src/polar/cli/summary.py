"""How tasks stand, for people: a table of tasks, and the progress of those that are waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from polar.cli.output import clock, console, table
from polar.models.session import AgentEnd, SessionStatus

if TYPE_CHECKING:
    from rich.table import Table

    from polar.client import Client
    from polar.models.session import SessionEvent, SessionResult
    from polar.models.task import TaskSpec, TaskStatus
    from polar.models.views import SessionView, TaskView

REASONS = 10
"""How many are told; the list of sessions has the others."""


def task_table(tasks: Iterable[TaskView]) -> Table:
    return table(
        ["TASK", "STATUS", "HARNESS", "SAMPLES", "SESSIONS", "MEAN REWARD"],
        (
            (
                task.spec.id,
                task.status,
                task.spec.harness.name,
                task.spec.samples,
                counts(task.sessions),
                task.mean_reward,
            )
            for task in tasks
        ),
        numbers=["SAMPLES", "MEAN REWARD"],
    )


def counts(sessions: dict[SessionStatus, int]) -> str:
    """`2 running, 1 completed`, in the order of a session's life."""
    order = {status: place for place, status in enumerate(type(next(iter(sessions))))} if sessions else {}
    return ", ".join(f"{sessions[status]} {status}" for status in sorted(sessions, key=order.__getitem__))


def follow(client: Client, tasks: Sequence[TaskSpec]) -> list[SessionResult]:
    """Stay until every session of the tasks has ended, with a progress bar if a person is watching."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    task_ids = [task.id for task in tasks]
    columns = (
        TextColumn("sessions"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rewards]}"),
        TimeElapsedColumn(),
    )
    found: list[SessionResult] = []
    rewards: list[float] = []
    terminal = console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bar = progress.add_task("", total=sum(task.samples for task in tasks), rewards="")
        # With stale results, which are no longer to be learnt from but have ended like the others.
        for page in client.result_pages(task_ids, follow=True):
            found += page.results
            rewards += (result.reward for result in page.results if result.reward is not None)
            mean = f"mean reward {sum(rewards) / len(rewards):.2f}" if rewards else ""
            progress.update(bar, completed=len(found), rewards=mean)
    return found


def failures(results: Sequence[SessionResult]) -> str:
    """How many sessions failed, and the first line of why, the most frequent first; empty if none did."""
    reasons = Counter(_reason(result) for result in results if result.status is SessionStatus.FAILED)
    if not reasons:
        return ""
    lines = [f"{count} × {reason}" for reason, count in reasons.most_common(REASONS)]
    if others := len(reasons) - len(lines):
        lines.append(f"and {others} other reasons: polar sessions --status failed")
    return "\n  ".join([f"{reasons.total()} of {len(results)} sessions failed:", *lines])


def _reason(result: SessionResult) -> str:
    return next(iter((result.error or "").strip().splitlines()), "no reason given")


def cancellation(status: TaskStatus | SessionStatus, sessions: dict[SessionStatus, int]) -> str | None:
    """What to say of a task or session, as it is, that somebody has just cancelled; None: it says it all."""
    unended = sum(count for status, count in sessions.items() if not status.ended)
    if unended:
        ending = "session is" if unended == 1 else "sessions are"
        return f"{unended} {ending} being cancelled: nodes hear of it within seconds and end the agents"
    return None if status == SessionStatus.CANCELLED else "nothing was cancelled: it had ended already"


def session_table(sessions: Iterable[SessionView]) -> Table:
    return table(
        ["SESSION", "TASK", "SAMPLE", "STATUS", "ATTEMPT", "COMPLETIONS", "TOKENS", "REWARD", "NOTE"],
        (
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
        ),
        numbers=["SAMPLE", "ATTEMPT", "COMPLETIONS", "TOKENS", "REWARD"],
    )


def event_table(events: Sequence[SessionEvent]) -> Table:
    """What happened to one session, and how long it stayed where it was."""
    ends = [event.at for event in events[1:]]
    return table(
        ["ATTEMPT", "STATUS", "AT", "SECONDS", "NODE", "DETAIL"],
        (
            (event.attempt, event.status, clock(event.at), _between(event.at, end), event.node, event.detail)
            for event, end in zip_longest(events, ends)
        ),
        numbers=["ATTEMPT", "SECONDS"],
    )


def _between(start: float, end: float | None) -> str | None:
    return None if end is None else f"{end - start:.1f}"


def _note(session: SessionView) -> str:
    result = session.result
    if result is None:
        return f"on {session.node}" if session.node else ""
    has_failed = result.agent_end is AgentEnd.EXITED and result.exit_code
    return result.error or f"agent {result.agent_end}" + (f" with {result.exit_code}" if has_failed else "")
