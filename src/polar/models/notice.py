"""What a callback carries: the body that its receiver gets, the same at every attempt."""

from __future__ import annotations

from pydantic import Field

from polar.models.callback import CallbackEvent
from polar.models.component import Frozen
from polar.models.session import SessionResult, SessionStatus


class TaskEnd(Frozen):
    """What came of a task as a whole."""

    sessions: dict[SessionStatus, int] = Field(default_factory=dict)
    """How many ended in each status."""
    mean_reward: float | None = None
    """Over the completed sessions."""


class Notice(Frozen):
    """Something has ended."""

    id: str
    """The same at every attempt: whoever has handled it need not do so again."""
    event: CallbackEvent
    task_id: str
    """Whose end, or a session of which, it tells of."""
    session_id: str | None = None
    """Of a session that ended; None: the task did."""
    at: float
    """When the server saw it ended, Unix seconds."""
    result: SessionResult | None = None
    """Of a session that ended."""
    task: TaskEnd | None = None
    """Of a task that ended."""
