"""From a session's token tree to its traces."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import BaseModel

from polar.models.component import Frozen
from polar.models.trace import Trajectory
from polar.recordings.tree import TokenTree


class Builder(ABC):
    class Options(Frozen):
        """The task's options for the builder."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def build(self, tree: TokenTree) -> Trajectory:
        """Build the session's traces, unscored; every sampled token is trained once or counted by reason."""
