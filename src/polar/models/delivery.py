"""What a node sends about its sessions, ended and running, and its wire format."""

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
    """The outcome of one session, under the lease that it ran with."""

    key: LeaseKey
    """Key of the node's lease."""
    result: SessionResult
    entered: tuple[StageEntry, ...] = ()
    """Stages not yet reported by a heartbeat."""
    recording: bytes | PurePath | None = Field(default=None, exclude=True)
    """A file, or bytes if small. Follows the JSON."""
    artifacts: bytes | PurePath | None = Field(default=None, exclude=True)
    """Like `recording`."""

    @property
    def session_id(self) -> str:
        return self.result.session_id

    @property
    def parts(self) -> tuple[bytes | PurePath | None, bytes | PurePath | None]:
        """The parts that follow the JSON."""
        return self.recording, self.artifacts


class DeliveryAnswer(Frozen):
    """The error of each delivery, in order; None if stored."""

    problems: tuple[Problem | None, ...]


class CaptureGrowth(Frozen):
    """New bytes of a running session's capture, under its lease."""

    session_id: Id
    """Id of the session."""
    key: LeaseKey
    """Key of the node's lease."""
    offset: int = Field(ge=0, lt=2**63)
    """Bytes sent under this lease before."""
    data: bytes = Field(default=b"", exclude=True)
    """Follows the JSON."""

    @property
    def parts(self) -> tuple[bytes, None]:
        """The parts that follow the JSON."""
        return self.data, None


class CaptureLengths(Frozen):
    """How much the server has of each capture, in order."""

    lengths: tuple[int | None, ...]
    """Bytes of each; None if it takes no more, since the lease has passed on or the capture is too long."""
