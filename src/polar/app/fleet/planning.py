"""What a fleet is asked for, how many nodes it should have, and what it does next: pure functions."""

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
"""How long a node's actor may give no answer: Ray may be placing or restarting it."""
PER_HOST = "per-host"


class NodeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    ASIDE = "aside"
    """Whoever runs the server has drained it there: it stays, and is given nothing until it is resumed."""
    DRAINING = "draining"
    """It takes no more sessions, and ends when those it has do."""
    ENDED = "ended"
    """Its process is gone, its actor is there."""
    SILENT = "silent"
    """Its actor does not answer."""
    LOST = "lost"
    """Its actor is gone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster that is alive."""

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
    """The machine's id."""
    host: str
    state: NodeState
    seconds: Annotated[float, Field(exclude=True)] = 0.0
    """In this state."""
    was_asked: Annotated[bool, Field(exclude=True)] = False
    """Whether it was asked to end."""
    detail: str | None = None
    """Why it ended, or is not seen."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    remove: tuple[PlacedNode, ...]
    """Nodes that are no more, or will not come back."""
    drain: tuple[PlacedNode, ...]
    start: tuple[Machine, ...]
    """Machines to place a node on, one each."""
    missing: int
    """Nodes for which there is no machine."""


def make_plan(
    nodes: Sequence[PlacedNode],
    machines: Sequence[Machine],
    *,
    wanted: int,
    resting: Collection[str] = (),
    busy: Mapping[str, int] | None = None,
    drain_seconds: float,
) -> FleetPlan:
    """Come closer to the wanted number.

    `machines` are those that carry a node, `resting` the ids of those where one has just failed, `busy`
    how many sessions each node has. A machine never has two nodes, also while one drains.
    """
    alive = {machine.id for machine in machines}
    gone = [node for node in nodes if _is_gone(node, alive, drain_seconds)]
    standing = [node for node in nodes if node not in gone]
    serving = [node for node in standing if node.state not in (NodeState.DRAINING, NodeState.ASIDE)]
    # Whoever set a node aside may want it back, unless none is wanted at all.
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
    """The first free name on a host: who comes after a node that failed clears away what it left there."""
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
    """Sorts the nodes that can be spared first to the front."""
    return node.state is NodeState.READY, busy.get(node.name, 0), node.name


@dataclass(frozen=True, slots=True)
class FleetSize:
    """As many nodes as the queue asks for, within bounds."""

    least: int
    most: int


def parse_size(text: str) -> FleetSize | None:
    """`N` or `MIN..MAX`; None for `per-host`: one on every machine that has the resources."""
    if text == PER_HOST:
        return None
    least, dots, most = text.partition("..")
    try:
        size = FleetSize(int(least), int(most if dots else least))
    except ValueError:
        raise InvalidInput(f"nodes: {text!r} is none of per-host, N, MIN..MAX") from None
    if not 0 <= size.least <= size.most:
        raise InvalidInput(f"nodes: {text!r} ends before it begins")
    return size


def nodes_wanted(size: FleetSize | None, *, machines: int, unended: int, sessions_per_node: int) -> int:
    """How many nodes there should be now for `unended` sessions, queued or under way."""
    if size is None:
        return machines
    return min(size.most, max(size.least, -(-unended // sessions_per_node)))


@dataclass(slots=True)
class Patience:
    """Follows a number up at once, and down only when it has been lower for a while."""

    seconds: float
    _seen: list[tuple[float, int]] = field(default_factory=list)
    """Numbers and when they were seen."""

    def follow(self, now: float, number: int) -> int:
        """The largest number of the last `seconds`, this one included."""
        self._seen = [(at, seen) for at, seen in self._seen if at >= now - self.seconds] + [(now, number)]
        return max(seen for _, seen in self._seen)


@dataclass(frozen=True, slots=True)
class FleetOrder:
    """What a fleet is started with; what it says of itself holds no secret."""

    server: str
    fleet: FleetSettings
    drain_seconds: float
    token: str = field(repr=False)
    """With which the supervisor asks the server."""
    settings: dict[str, Any] = field(repr=False)
    """The nodes' own settings, as a settings file has them."""
    node_token: str | None = field(default=None, repr=False)
    """What nodes bring instead, which opens no more than they need."""

    @property
    def ca(self) -> str | None:
        """The file of those who signed the server's certificate, the same on every machine."""
        ca: str | None = self.settings.get("node", {}).get("ca")
        return ca

    @classmethod
    def of(cls, settings: Settings, server: str, token: str) -> FleetOrder:
        parse_size(settings.fleet.nodes)
        given = settings.model_dump(mode="json", exclude_unset=True, exclude={"fleet", "data_dir", "server"})
        return cls(server, settings.fleet, settings.node.drain_seconds, token, given)

    def node_settings(self, name: str) -> dict[str, Any]:
        """The settings document of one node."""
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
    """Nodes there should be now."""
    missing: int = 0
    """Of these, nodes for which no machine has room."""
    machines: int = 0
    """Those that carry a node."""
    unended: int | None = None
    """Sessions queued or under way; None: the server could not be asked."""
    nodes: tuple[PlacedNode, ...] = ()
    looks: int = 0
    """How often the supervisor has looked."""
    is_ending: bool = False
    trouble: str | None = None
    """What went wrong at the last look or with the last node that failed."""
