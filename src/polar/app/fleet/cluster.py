"""The Ray cluster as a fleet uses it: machines, named actors, the autoscaler; and the actors themselves."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.util
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polar.app.fleet.planning import SILENCE_SECONDS, FleetOrder, Machine, NodeState, PlacedNode
from polar.app.fleet.supervisor import Supervisor
from polar.app.node_processes import COMMAND, READY
from polar.telemetry.logs import log_to_stderr

log = logging.getLogger(__name__)

NAMESPACE = "polar"
SUPERVISOR = "fleet"
PREFIX = "node:"
ANSWER_SECONDS = 3.0
END_SECONDS = 5.0

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


class RayCluster:
    """Access to the cluster, without state of its own: the nodes are the cluster's named actors."""

    def __init__(self, need: Mapping[str, float], max_restarts: int) -> None:
        self._need = dict(need)
        self._max_restarts = max_restarts
        self._seen: dict[str, tuple[PlacedNode, float]] = {}
        self._requested = 0

    def machines(self) -> tuple[Machine, ...]:
        """Return the running machines that can host a node."""
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
        return tuple(self._node_from(name, answer) for name, answer in asked.items())

    def start(self, name: str, machine: Machine, settings: dict[str, Any]) -> None:
        """Start a node on a machine; Ray restarts it there while the machine is running."""
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

    def request_machines(self, nodes: int) -> None:
        """Ask the autoscaler, if there is one, for machines for this number of nodes."""
        if nodes != self._requested:
            request_resources(bundles=[self._need] * nodes)
            self._requested = nodes

    def _node_from(self, name: str, answer: Any) -> PlacedNode:
        unknown = PlacedNode(name, "", "", NodeState.SILENT)
        before, at = self._seen.setdefault(name, (unknown, time.monotonic()))
        silence = time.monotonic() - at
        try:
            placed: PlacedNode = ray.get(answer, timeout=0)
        except (ActorUnavailableError, GetTimeoutError):
            is_new = before.state is NodeState.STARTING and silence <= SILENCE_SECONDS
            return replace(before, state=before.state if is_new else NodeState.SILENT, seconds=silence)
        except RayActorError as error:
            reason = str(error).strip().splitlines()[-1][:500]
            return replace(before, state=NodeState.LOST, seconds=silence, detail=reason)
        self._seen[name] = placed, time.monotonic()
        return placed


def actor(name: str) -> Any | None:
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
            log.info("%s did not confirm its end: %s", name, type(error).__name__)
    ray.kill(handle, no_restart=True)


class NodeHost:
    """The actor on each machine, whose child process is an ordinary `polar node`."""

    def __init__(self, machine: str, host: str, settings: dict[str, Any]) -> None:
        name = settings["node"]["name"]
        self._place = name, machine, host
        data_dir = Path(settings["data_dir"]).expanduser()
        self._log = data_dir / "logs" / f"{name}.log"
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = NodeState.STARTING
        self._since = time.monotonic()
        self._was_asked = False
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=data_dir,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps({**settings, "data_dir": str(data_dir)}))
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self) -> PlacedNode:
        code = self._process.poll()
        if code is not None and self._state is not NodeState.ENDED:
            self._enter(NodeState.ENDED)
        seconds = time.monotonic() - self._since
        reason = None if code is None else self._reason(code)
        return PlacedNode(*self._place, self._state, seconds, self._was_asked, reason)

    def drain(self) -> None:
        """Ask the node to stop once its sessions have ended; asking again changes nothing."""
        if self._was_asked or self._process.poll() is not None:
            return
        self._was_asked = True
        self._enter(NodeState.DRAINING)
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Stop the node now; its sessions return to the queue when their leases expire."""
        self._was_asked = True
        self._process.kill()
        self._process.wait(END_SECONDS)

    def _enter(self, state: NodeState) -> None:
        self._state, self._since = state, time.monotonic()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY) and self._state is NodeState.STARTING:
                self._enter(NodeState.READY)

    def _reason(self, code: int) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1].removeprefix("error: ") if lines else "no output"
        return f"exit code {code}: {said}"[:500]


class FleetActor(Supervisor):
    """The supervisor as a detached actor, whose loop runs beside the calls to it."""

    def __init__(self, order: FleetOrder) -> None:
        log_to_stderr("info")
        super().__init__(order, RayCluster(order.fleet.resources, order.fleet.max_restarts))
        threading.Thread(target=self.watch, daemon=True).start()
