"""What a node sends of its sessions, those that have ended and those that run, and its form on the wire."""

from __future__ import annotations

from pathlib import PurePath
from struct import Struct

from pydantic import Field

from polar.models.component import Frozen
from polar.models.session import LeaseKey, SessionResult, StageEntry
from polar.models.task import Id
from polar.models.views import Problem

SIZES = Struct("!QQQ")
"""A body holds deliveries one after another. Each begins with the sizes of its three parts: the delivery as
JSON, its recording, and its artifacts, the last two 0 where there are none. Then the parts follow. What
captures have grown by is sent in the same form: in place of the recording stand the new bytes."""

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

    @property
    def parts(self) -> tuple[bytes | PurePath | None, bytes | PurePath | None]:
        """What follows its JSON."""
        return self.recording, self.artifacts


class DeliveryAnswer(Frozen):
    """What is wrong with each delivery, in their order; None: it is stored."""

    problems: tuple[Problem | None, ...]


class CaptureGrowth(Frozen):
    """What the capture of a running session has grown by, under the lease that it runs with."""

    session_id: Id
    """Which session."""
    key: LeaseKey
    """Of the node's lease."""
    offset: int = Field(ge=0, lt=2**63)
    """How many bytes were sent under this lease before."""
    data: bytes = Field(default=b"", exclude=True)
    """Not part of the JSON, which it follows."""

    @property
    def parts(self) -> tuple[bytes, None]:
        """What follows its JSON."""
        return self.data, None


class CaptureLengths(Frozen):
    """What the server has of captures that have grown, in their order."""

    lengths: tuple[int | None, ...]
    """How many bytes of each; None: it takes no more of it, since the lease has passed on or the capture is
    too long."""
