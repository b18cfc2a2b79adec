"""From a session's completions to its traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel

from polar.gateway.capture import parse_capture
from polar.models.completion import Completion
from polar.models.trace import Trajectory


class Builder(ABC):
    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    def build_capture(self, data: bytes) -> Trajectory:
        """The traces of a capture log; of what cannot be read the stats tell the faults."""
        capture = parse_capture(data)
        return self.build(capture.completions).with_faults(capture.faults)

    @abstractmethod
    def build(self, completions: Sequence[Completion]) -> Trajectory:
        """Traces of the session, unscored; every sampled token is trained once or counted by name."""
