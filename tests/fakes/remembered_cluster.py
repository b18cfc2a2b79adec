"""A cluster for fleets that only remembers, and a clock that stands still."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polar.app.fleet.planning import Machine, NodeState, PlacedNode


class RememberedCluster:
    """Nodes are in the state that the test puts them in."""

    def __init__(self, machines: int) -> None:
        self.there = tuple(Machine(f"m{number}", "host", {"CPU": 1.0}) for number in range(machines))
        self.placed: dict[str, PlacedNode] = {}
        self.wished: list[int] = []
        self.settings: dict[str, Any] = {}
        self.starts = 0

    def machines(self) -> tuple[Machine, ...]:
        return self.there

    def nodes(self) -> tuple[PlacedNode, ...]:
        return tuple(self.placed.values())

    def start(self, name: str, machine: Machine, settings: dict[str, Any]) -> None:
        self.starts += 1
        self.settings = settings
        self.placed[name] = PlacedNode(name, machine.id, machine.host, NodeState.STARTING)

    def drain(self, name: str) -> None:
        self.put(name, NodeState.DRAINING, was_asked=True)

    def remove(self, name: str) -> None:
        del self.placed[name]

    def request_machines(self, nodes: int) -> None:
        self.wished.append(nodes)

    def put(self, name: str, state: NodeState, **changes: Any) -> None:
        self.placed[name] = replace(self.placed[name], state=state, **changes)


class Clock:
    """Shows the time that it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
