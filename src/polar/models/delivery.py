"""What a node delivers of a session that has ended, and its form on the wire."""

from __future__ import annotations

from pathlib import PurePath
from struct import Struct

from pydantic import Field

from polar.models.component import Frozen
from polar.models.session import LeaseKey, SessionResult, StageEntry
from polar.models.views import Problem

SIZES = Struct("!QQQ")
"""A body holds deliveries one after another. Each begins with the sizes of its three parts: the delivery as
JSON, its recording, and its artifacts, the last two 0 where there are none. Then the parts follow."""

MOST_DELIVERIES = 256
"""The most deliveries in one body."""


class Delivery(Frozen):
    """What came of one session, under the lease that it ran with."""

    key: LeaseKey
    """Of the node's lease."""
    result: SessionResult
    entered: tuple[StageEntry, ...] = ()
    """Stages that no heartbeat has told of."""
    recording: bytes | PurePath | None = Field(default=None, exclude=True)
    """A file, or bytes where they are few. Not part of the JSON, which it follows."""
    artifacts: bytes | PurePath | None = Field(default=None, exclude=True)
    """As the recording."""

    @property
    def session_id(self) -> str:
        return self.result.session_id


class DeliveryAnswer(Frozen):
    """What is wrong with each delivery, in their order; None: it is stored."""

    problems: tuple[Problem | None, ...]
