"""What a node needs of the gateways on its machine: one in its own process, or several in theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from polar.engines.base import WeightUpdate
from polar.gateway.session import SessionGrant
from polar.models.policy import PauseMode
from polar.models.session import Progress


@dataclass(frozen=True, slots=True)
class Address:
    """Where a session's model calls go."""

    host: str
    port: int


class Gateways(ABC):
    """Serves the model calls of sessions; each session has one gateway, which shares nothing with others."""

    @abstractmethod
    def placed(self, session_id: str) -> AbstractContextManager[Address]:
        """The gateway of a session that is to be opened: the same all the while the block runs."""

    @abstractmethod
    async def open_session(self, grant: SessionGrant) -> None:
        """From now on the grant's key opens the session's model calls."""

    @abstractmethod
    def progress(self, session_id: str) -> Progress:
        """What the session has done, as far as is known; nothing for one that was never opened."""

    @abstractmethod
    async def budget_spent(self, session_id: str) -> bool:
        """Return once a budget of the session is used up; whether that is its wall time."""

    @abstractmethod
    async def close_session(self, session_id: str) -> None:
        """Abort what is in flight; later calls are told that the session has ended."""

    @property
    @abstractmethod
    def is_paused(self) -> bool: ...

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing more; calls wait, and no session's time runs, until `resume`."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def update_weights(self, update: WeightUpdate) -> None:
        """Replace the weights, during a pause; EngineError if the old ones stay."""

    @abstractmethod
    async def policy_version(self) -> int:
        """Of the weights that are sampled with; the oldest, while an update goes round."""

    @abstractmethod
    async def metric_families(self) -> Iterable[Metric]: ...
