"""What a fleet does next: a pure function of what it sees and how many nodes it should have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

SILENCE_SECONDS = 30.0
"""How long a node's actor may give no answer: Ray may be placing or restarting it."""


class NodeState(StrEnum):
    STARTING = "starting"
    WORKING = "working"
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
    machine: str
    """The machine's id."""
    host: str
    state: NodeState
    seconds: float = 0.0
    """In this state."""
    was_asked: bool = False
    """Whether it was asked to end."""
    detail: str | None = None
    """Why it ended, or is not seen."""


@dataclass(frozen=True, slots=True)
class Plan:
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
) -> Plan:
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
    places = sorted((machine for machine in machines if machine.id not in taken), key=_order)
    lack = wanted - len(serving)
    start = places[: max(0, lack)]
    idlest = sorted(serving, key=lambda node: _worth(node, busy or {}))
    return Plan(
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
        case NodeState.STARTING | NodeState.WORKING | NodeState.ASIDE:
            return False


def _order(machine: Machine) -> tuple[str, str]:
    return machine.host, machine.id


def _worth(node: PlacedNode, busy: Mapping[str, int]) -> tuple[bool, int, str]:
    """Sorts the nodes that can be spared first to the front."""
    return node.state is NodeState.WORKING, busy.get(node.name, 0), node.name
