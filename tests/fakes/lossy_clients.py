"""Clients of a trainer and of a node whose calls are lost on the way, or with the process that made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from polar.client import AsyncClient, Client
from polar.errors import Unavailable
from polar.models.policy import PolicyOrder, PolicyReport, PolicyView


class Moment(Enum):
    """When the connection is lost."""

    BEFORE = auto()
    UNDER_WAY = auto()
    """The server has the request, and nobody waits for its answer."""
    AFTER = auto()


class Killed(BaseException):
    """The process is gone."""


LOSSES: list[Callable[[], BaseException]] = [lambda: Unavailable("the connection is lost"), Killed]


@dataclass
class Trouble:
    """Which calls are lost, when, and whether the caller is with them."""

    calls: set[int] = field(default_factory=set)
    moment: Moment = Moment.BEFORE
    loss: Callable[[], BaseException] = LOSSES[0]
    made: int = -1

    def begin(self, calls: set[int], moment: Moment, loss: Callable[[], BaseException]) -> None:
        self.calls, self.moment, self.loss, self.made = calls, moment, loss, -1

    def meets_next(self) -> bool:
        self.made += 1
        return self.made in self.calls


class TroubledClient(Client):
    """What a trainer asks with."""

    def __init__(self, url: str, token: str, trouble: Trouble) -> None:
        super().__init__(url, token)
        self.trouble = trouble

    def policy(self) -> PolicyView:
        is_lost = self.trouble.meets_next()
        if is_lost and self.trouble.moment is Moment.BEFORE:
            raise self.trouble.loss()
        view = super().policy()
        if is_lost:
            raise self.trouble.loss()
        return view

    def update_policy(self, path: str | Path | None = None, **asked: Any) -> PolicyView:
        is_lost = self.trouble.meets_next()
        if is_lost and self.trouble.moment is Moment.BEFORE:
            raise self.trouble.loss()
        if is_lost and self.trouble.moment is Moment.UNDER_WAY:
            asked["wait_seconds"] = 0.0
        view = super().update_policy(path, **asked)
        if is_lost:
            raise self.trouble.loss()
        return view


class TroubledNode(AsyncClient):
    """What a node asks with. Of one that was killed nothing more is heard."""

    is_dead = False

    def die(self) -> Killed:
        self.is_dead = True
        return Killed()

    def __init__(self, url: str, token: str, trouble: Trouble) -> None:
        super().__init__(url, token)
        self.trouble = trouble

    async def follow_policy(self, node: str, report: PolicyReport) -> PolicyOrder:
        if self.is_dead:
            raise Killed
        is_lost = self.trouble.meets_next()
        if is_lost and self.trouble.moment is Moment.BEFORE:
            raise self._loss()
        order = await super().follow_policy(node, report)
        if is_lost:
            raise self._loss()
        return order

    def _loss(self) -> BaseException:
        loss = self.trouble.loss()
        return self.die() if isinstance(loss, Killed) else loss
