"""Whose turn it is in the queue: tasks of one priority share a node fairly, and a group stays together.

The sessions of a task are cut into pieces of SAMPLES_A_TURN, one a turn; the queue goes by turn,
then by age. A new task begins at the turn that the queue has come to, not at the first one: so a
large task cannot hold up those that come after it, and a stream of new tasks cannot hold up the
rest of a large one. A group no larger than a turn runs in one piece.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from polar.models.task import TaskSpec
from polar.store.tables import IS_QUEUED, sessions

SAMPLES_A_TURN = 64
"""Larger than the groups that trainers use, small beside the sessions of a day."""


def first_turn(connection: Connection, spec: TaskSpec) -> int:
    """The turn that the task's queue has come to; one index lookup."""
    query = (
        select(sessions.c.turn)
        .where(IS_QUEUED, sessions.c.runtime == spec.runtime.name, sessions.c.priority == spec.priority)
        .order_by(sessions.c.turn)
        .limit(1)
    )
    return connection.execute(query).scalar_one_or_none() or 0


def turn(first: int, sample: int) -> int:
    return first + sample // SAMPLES_A_TURN
