"""The Ray cluster as a fleet uses it: machines, actors by name, wishes to the autoscaler."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
import ray.util
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polar.app.fleet.node_host import NodeHost, NodeReport
from polar.app.fleet.planning import SILENCE_SECONDS, Machine, NodeState, PlacedNode

log = logging.getLogger(__name__)

NAMESPACE = "polar"
SUPERVISOR = "fleet"
PREFIX = "node:"
ANSWER_SECONDS = 3.0

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


class RayCluster:
    """Keeps no state that it cannot find again: the nodes are the cluster's named actors."""

    def __init__(self, need: Mapping[str, float], max_restarts: int) -> None:
        self._need = dict(need)
        self._max_restarts = max_restarts
        self._seen: dict[str, tuple[PlacedNode, float]] = {}
        """Each node as it last answered, or was started, and when."""
        self._wished = 0

    def machines(self) -> tuple[Machine, ...]:
        """Those that are alive and carry a node."""
        found = (
            Machine(node["NodeID"], node["NodeManagerHostname"], node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        )
        return tuple(machine for machine in found if machine.carries(self._need))

    def nodes(self) -> tuple[PlacedNode, ...]:
        names = [name for name in ray.util.list_named_actors() if name.startswith(PREFIX)]
        handles = {name.removeprefix(PREFIX): actor(name) for name in names}
        asked = {name: handle.report.remote() for name, handle in handles.items() if handle is not None}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
        self._seen = {name: seen for name, seen in self._seen.items() if name in asked}
        return tuple(self._placed(name, answer) for name, answer in asked.items())

    def start(self, name: str, machine: Machine, settings: dict[str, Any]) -> None:
        """Place a node on a machine; Ray restarts it there while that lives."""
        options: dict[str, Any] = {
            _OPTIONS[resource]: amount for resource, amount in self._need.items() if resource in _OPTIONS
        }
        own = {resource: amount for resource, amount in self._need.items() if resource not in _OPTIONS}
        host = ray.remote(NodeHost).options(
            name=PREFIX + name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=self._max_restarts,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.id, soft=False),
            resources=own,
            **{"num_cpus": 0, **options},
        )
        host.remote(machine.id, machine.host, settings)
        placed = PlacedNode(name, machine.id, machine.host, NodeState.STARTING)
        self._seen[name] = placed, time.monotonic()

    def drain(self, name: str) -> None:
        handle = actor(PREFIX + name)
        if handle is not None:
            handle.drain.remote()

    def remove(self, name: str) -> None:
        self._seen.pop(name, None)
        kill(PREFIX + name, "end")

    def wish(self, nodes: int) -> None:
        """Ask the autoscaler, if there is one, for machines for this number of nodes."""
        if nodes != self._wished:
            request_resources(bundles=[self._need] * nodes)
            self._wished = nodes

    def _placed(self, name: str, answer: Any) -> PlacedNode:
        unknown = PlacedNode(name, "", "", NodeState.SILENT)
        before, at = self._seen.setdefault(name, (unknown, time.monotonic()))
        silence = time.monotonic() - at
        try:
            report: NodeReport = ray.get(answer, timeout=0)
        except (ActorUnavailableError, GetTimeoutError):
            is_new = before.state is NodeState.STARTING and silence <= SILENCE_SECONDS
            return replace(before, state=before.state if is_new else NodeState.SILENT, seconds=silence)
        except RayActorError as error:
            reason = str(error).strip().splitlines()[-1][:500]
            return replace(before, state=NodeState.LOST, seconds=silence, detail=reason)
        placed = PlacedNode(
            name,
            report.machine,
            report.host,
            report.state,
            report.seconds,
            report.was_asked,
            report.detail,
        )
        self._seen[name] = placed, time.monotonic()
        return placed


def actor(name: str) -> Any | None:
    """The actor of that name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill(name: str, farewell: str | None = None) -> None:
    """End an actor for good, after a last call to it if it still answers."""
    handle = actor(name)
    if handle is None:
        return
    if farewell is not None:
        try:
            ray.get(getattr(handle, farewell).remote(), timeout=ANSWER_SECONDS)
        except (RayError, TimeoutError) as error:
            log.info("%s did not hear its end: %s", name, type(error).__name__)
    ray.kill(handle, no_restart=True)
