"""A fleet's order, its target size, and its next steps: pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from polar.config.settings import FleetSettings, Settings
from polar.errors import InvalidInput
from polar.models.component import Frozen

SILENCE_SECONDS = 30.0
"""Seconds that a node's actor may be silent, while Ray places or restarts it."""
PER_HOST = "per-host"


class NodeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    ASIDE = "aside"
    """An operator has drained it on the server: it stays, without new sessions, until it is resumed."""
    DRAINING = "draining"
    """It takes no more sessions, and stops when the current ones have ended."""
    ENDED = "ended"
    """Its process has ended, while its actor is still there."""
    SILENT = "silent"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Machine:
    id: str
    host: str
    resources: Mapping[str, float]

    def carries(self, need: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in need.items())


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node as the fleet last saw it."""

    name: str
    machine: Annotated[str, Field(exclude=True)]
    host: str
    state: NodeState
    seconds: Annotated[float, Field(exclude=True)] = 0.0
    """Seconds in this state."""
    was_asked: Annotated[bool, Field(exclude=True)] = False
    detail: str | None = None
    """Why it ended, or is not visible."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    remove: tuple[PlacedNode, ...]
    """Nodes that are gone, or will not come back."""
    drain: tuple[PlacedNode, ...]
    start: tuple[Machine, ...]
    """Machines to start a node on, one each."""
    missing: int
    """The number of nodes for which there is no machine."""


def make_plan(
    nodes: Sequence[PlacedNode],
    machines: Sequence[Machine],
    *,
    wanted: int,
    resting: Collection[str] = (),
    busy: Mapping[str, int] | None = None,
    drain_seconds: float,
) -> FleetPlan:
    """Plan the next steps towards the wanted number.

    `machines` can host a node, `resting` are the ids of those where one has just failed, `busy` is the number
    of sessions per node. A machine never has two nodes, even while one drains.
    """
    alive = {machine.id for machine in machines}
    gone = [node for node in nodes if _is_gone(node, alive, drain_seconds)]
    standing = [node for node in nodes if node not in gone]
    serving = [node for node in standing if node.state not in (NodeState.DRAINING, NodeState.ASIDE)]
    # A node that was set aside may be resumed, so it stays unless none is wanted at all.
    aside = [node for node in standing if node.state is NodeState.ASIDE and not wanted]
    taken = {node.machine for node in standing} | set(resting)
    free = [machine for machine in machines if machine.id not in taken]
    places = sorted(free, key=lambda machine: (machine.host, machine.id))
    lack = wanted - len(serving)
    start = places[: max(0, lack)]
    idlest = sorted(serving, key=lambda node: _worth(node, busy or {}))
    return FleetPlan(
        remove=tuple(gone),
        drain=(*idlest[: max(0, -lack)], *aside),
        start=tuple(start),
        missing=max(0, lack - len(start)),
    )


def node_name(host: str, used: Collection[str]) -> str:
    """Return the first free name on a host, so that a successor cleans up after a failed node."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", host).lstrip("._-")[:100] or "node"
    number = 1
    while f"{host}-{number}" in used:
        number += 1
    return f"{host}-{number}"


def _is_gone(node: PlacedNode, alive: Collection[str], drain_seconds: float) -> bool:
    match node.state:
        case NodeState.ENDED | NodeState.LOST:
            return True
        case NodeState.SILENT:
            return node.machine not in alive or node.seconds > SILENCE_SECONDS
        case NodeState.DRAINING:
            return node.seconds > drain_seconds + SILENCE_SECONDS
        case NodeState.STARTING | NodeState.READY | NodeState.ASIDE:
            return False


def _worth(node: PlacedNode, busy: Mapping[str, int]) -> tuple[bool, int, str]:
    """Sort key that puts the most dispensable nodes first."""
    return node.state is NodeState.READY, busy.get(node.name, 0), node.name


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The limits within which the number of nodes follows the queue."""

    least: int
    most: int


def parse_size(text: str) -> FleetSize | None:
    """Parse `N` or `MIN..MAX`; None for `per-host`, one on every machine with the resources."""
    if text == PER_HOST:
        return None
    least, dots, most = text.partition("..")
    try:
        size = FleetSize(int(least), int(most if dots else least))
    except ValueError:
        raise InvalidInput(f"nodes: {text!r} must be per-host, N or MIN..MAX") from None
    if not 0 <= size.least <= size.most:
        raise InvalidInput(f"nodes: {text!r} has a maximum below its minimum")
    return size


def nodes_wanted(size: FleetSize | None, *, machines: int, unended: int, sessions_per_node: int) -> int:
    """Return how many nodes there should be for `unended` sessions, queued or running."""
    if size is None:
        return machines
    return min(size.most, max(size.least, -(-unended // sessions_per_node)))


@dataclass(slots=True)
class ScaleDownDelay:
    """Follows a number up immediately, and down only once it has been lower for a while."""

    seconds: float
    _seen: list[tuple[float, int]] = field(default_factory=list)

    def follow(self, now: float, number: int) -> int:
        """Return the largest number of the last `seconds`, including this one."""
        self._seen = [(at, seen) for at, seen in self._seen if at >= now - self.seconds] + [(now, number)]
        return max(seen for _, seen in self._seen)


@dataclass(frozen=True, slots=True)
class FleetOrder:
    """What a fleet is started with; its repr contains no secret."""

    server: str
    fleet: FleetSettings
    drain_seconds: float
    token: str = field(repr=False)
    """The token with which the supervisor queries the server."""
    settings: dict[str, Any] = field(repr=False)
    """The nodes' own settings, as in a settings file."""
    node_token: str | None = field(default=None, repr=False)
    """A token for the nodes with only the permissions they need."""

    @property
    def ca(self) -> str | None:
        """The file of the authority that signed the server's certificate, at the same path on every
        machine."""
        ca: str | None = self.settings.get("node", {}).get("ca")
        return ca

    @classmethod
    def of(cls, settings: Settings, server: str, token: str) -> FleetOrder:
        parse_size(settings.fleet.nodes)
        given = settings.model_dump(mode="json", exclude_unset=True, exclude={"fleet", "data_dir", "server"})
        return cls(server, settings.fleet, settings.node.drain_seconds, token, given)

    def node_settings(self, name: str) -> dict[str, Any]:
        return {
            **self.settings,
            "data_dir": str(self.fleet.data_dir),
            "server": {"token": self.node_token or self.token},
            "node": {**self.settings.get("node", {}), "name": name, "count": 1, "server": self.server},
        }


class FleetView(Frozen):
    """A fleet as its supervisor last saw it."""

    server: str
    size: str
    wanted: int = 0
    missing: int = 0
    """The number of wanted nodes for which no machine has room."""
    machines: int = 0
    """The number of machines that can host a node."""
    unended: int | None = None
    """The number of sessions queued or running; None if the server could not be asked."""
    nodes: tuple[PlacedNode, ...] = ()
    looks: int = 0
    """The number of times the supervisor has checked the fleet."""
    is_ending: bool = False
    trouble: str | None = None
    """What went wrong at the last check, or with the last node that failed."""
