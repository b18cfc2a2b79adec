"""The fleet's supervisor: observes, plans and acts, in a loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from polar.app.fleet.planning import (
    FleetOrder,
    FleetPlan,
    FleetView,
    NodeState,
    PlacedNode,
    ScaleDownDelay,
    make_plan,
    node_name,
    nodes_wanted,
    parse_size,
)
from polar.client import Client
from polar.errors import PolarError
from polar.models.dashboard import NodeOverview

if TYPE_CHECKING:
    from polar.app.fleet.cluster import RayCluster

log = logging.getLogger(__name__)

LONGEST_REST_SECONDS = 60.0
"""Maximum seconds before another attempt on a machine where nodes keep failing."""
ASK_SECONDS = 5.0


class Supervisor:
    """Keeps the actual nodes equal to the wanted ones, with all state in the cluster, so it can restart."""

    def __init__(
        self, order: FleetOrder, cluster: RayCluster, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._order = order
        self._cluster = cluster
        self._clock = clock
        self._size = order.fleet.nodes
        self._patience = ScaleDownDelay(order.fleet.idle_seconds)
        self._failures: Counter[str] = Counter()
        """Failures by machine, since a node last worked there."""
        self._resting: dict[str, float] = {}
        """Machines where a node failed, and until when they rest."""
        self._server_nodes: tuple[NodeOverview, ...] = ()
        self._silence: str | None = None
        self._unended: int | None = None
        self._is_ending = False
        self._view = FleetView(server=order.server, size=self._size)
        self._hurry = threading.Event()

    def watch(self) -> None:
        """Check forever; errors are reported and the check is repeated."""
        while True:
            try:
                self.look()
            except Exception as error:
                log.exception("the check of the fleet failed")
                self._view = self._view.model_copy(update={"trouble": str(error)[:500]})
            self._hurry.wait(self._order.fleet.watch_seconds)
            self._hurry.clear()

    def view(self) -> FleetView:
        return self._view

    def resize(self, size: str) -> None:
        parse_size(size)
        self._size = size
        self._patience = ScaleDownDelay(self._order.fleet.idle_seconds)
        self._is_ending = False
        self._hurry.set()

    def end(self) -> None:
        """Drain every node; the fleet has stopped when the view shows none."""
        self._is_ending = True
        self._hurry.set()

    def look(self) -> None:
        """Observe the fleet and take the next steps."""
        machines = self._cluster.machines()
        nodes = self._cluster.nodes()
        self._note_failures(nodes)
        if not self._is_ending:
            self._server_nodes = self._query_nodes()
        nodes = self._mark_drained(nodes)
        aside = sum(node.state is NodeState.ASIDE for node in nodes)
        wanted = self._wanted_nodes(len(machines) - aside)
        plan = make_plan(
            nodes,
            machines,
            wanted=wanted,
            resting=self._resting,
            busy={node.name: sum(node.sessions.values()) for node in self._server_nodes},
            drain_seconds=self._order.drain_seconds,
        )
        self._carry_out(plan, nodes)
        if parse_size(self._size) is not None:
            self._cluster.request_machines(wanted)
        self._show(nodes, len(machines), wanted, plan.missing)

    def _mark_drained(self, nodes: tuple[PlacedNode, ...]) -> tuple[PlacedNode, ...]:
        """Return the nodes, marking those that an operator has drained on the server."""
        drained = {node.name for node in self._server_nodes if node.is_draining}
        return tuple(
            replace(node, state=NodeState.ASIDE)
            if node.name in drained and node.state is NodeState.READY
            else node
            for node in nodes
        )

    def _wanted_nodes(self, machines: int) -> int:
        if self._is_ending:
            return 0
        self._unended = self._count_unended()
        size = parse_size(self._size)
        per_node = self._order.fleet.sessions_per_node
        want = nodes_wanted(size, machines=machines, unended=self._unended or 0, sessions_per_node=per_node)
        if size is not None and size.least < size.most:
            # An unreachable server is no reason to drain nodes.
            return self._patience.follow(self._clock(), self._view.wanted if self._unended is None else want)
        return want

    def _note_failures(self, nodes: tuple[PlacedNode, ...]) -> None:
        now = self._clock()
        self._resting = {machine: until for machine, until in self._resting.items() if until > now}
        for node in nodes:
            if node.state is NodeState.READY:
                self._failures.pop(node.machine, None)
            elif node.state is NodeState.ENDED and not node.was_asked:
                rest = min(2.0 ** self._failures[node.machine], LONGEST_REST_SECONDS)
                self._failures[node.machine] += 1
                self._resting[node.machine] = now + rest

    def _carry_out(self, plan: FleetPlan, nodes: tuple[PlacedNode, ...]) -> None:
        for node in plan.remove:
            if not node.was_asked:
                log.warning("node %s on %s is %s: %s", node.name, node.host, node.state, node.detail)
            self._cluster.remove(node.name)
        for node in plan.drain:
            log.info("node %s on %s is drained", node.name, node.host)
            self._cluster.drain(node.name)
        used = {node.name for node in nodes}
        for machine in plan.start:
            # A name is in use until its actor is gone; a machine's next node gets the same one.
            name = node_name(machine.host, used)
            used.add(name)
            log.info("started node %s on %s", name, machine.host)
            self._cluster.start(name, machine, self._order.node_settings(name))

    def _client(self) -> Client:
        return Client(self._order.server, self._order.token, timeout=ASK_SECONDS, ca=self._order.ca)

    def _count_unended(self) -> int | None:
        try:
            with self._client() as client:
                counts = client.health().sessions
        except PolarError as error:
            log.warning("cannot read the queue: %s", error)
            return None
        return sum(count for status, count in counts.items() if not status.ended)

    def _query_nodes(self) -> tuple[NodeOverview, ...]:
        """Return the nodes known to the server, as of its last answer."""
        try:
            with self._client() as client:
                told, self._silence = client.nodes(), None
        except PolarError as error:
            # Logged once: a token without the permission will not gain it.
            if self._silence != str(error):
                log.warning("cannot read which nodes are busy: %s", error)
            self._silence = str(error)
            return self._server_nodes
        return told

    def _show(self, nodes: tuple[PlacedNode, ...], machines: int, wanted: int, missing: int) -> None:
        failed = [node for node in nodes if node.detail is not None and not node.was_asked]
        troubles = [f"{node.name} on {node.host}: {node.detail}" for node in failed]
        is_well = wanted == sum(node.state is NodeState.READY for node in nodes)
        self._view = FleetView(
            server=self._order.server,
            size=self._size,
            wanted=wanted,
            missing=missing,
            machines=machines,
            unended=self._unended,
            nodes=nodes,
            looks=self._view.looks + 1,
            is_ending=self._is_ending,
            trouble=troubles[-1] if troubles else None if is_well else self._view.trouble,
        )
