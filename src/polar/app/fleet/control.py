"""Starts, queries and stops a fleet from any shell that reaches the Ray cluster."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from polar.app.fleet.planning import FleetOrder, FleetView, NodeState
from polar.client import Client
from polar.config.settings import set_unless_given
from polar.errors import Forbidden, NotFound, NotInstalled, PolarError, Unavailable
from polar.models.access import TokenRole

POLL_SECONDS = 0.5
ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 5.0

Show = Callable[[FleetView], None]
"""Called with the fleet's state while waiting for it."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the Ray cluster during the block."""
    _check_reachable(address)
    set_unless_given("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise NotInstalled("ray is not installed", hint="pip install 'polar-rl[ray]'") from None
    from polar.app.fleet.cluster import NAMESPACE

    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _unreachable(address, str(error).strip().splitlines()[0]) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise at once if nothing listens: Ray itself retries for most of a minute, and logs meanwhile."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from None


def _unreachable(address: str, reason: str) -> Unavailable:
    return Unavailable(
        f"cannot reach a Ray cluster at {address}: {reason}",
        hint="start one with `ray start --head`, or set --address",
    )


def up(order: FleetOrder, show: Show, *, wait_seconds: float) -> FleetView:
    """Start the fleet, or resize a running one, and wait until its nodes are ready."""
    import ray

    from polar.app.fleet.cluster import NAMESPACE, SUPERVISOR, FleetActor, actor

    supervisor = actor(SUPERVISOR)
    if supervisor is None:
        order = with_node_token(order)
        supervisor = (
            ray.remote(FleetActor)
            .options(
                name=SUPERVISOR,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=4,
                num_cpus=0,
            )
            .remote(order)
        )
    elif (server := _ask(supervisor.view.remote()).server) != order.server:
        raise PolarError(
            f"this cluster already runs a fleet for {server}", hint="stop it with `polar fleet down`"
        )
    else:
        _ask(supervisor.resize.remote(order.fleet.nodes))
    before = _ask(supervisor.view.remote()).looks
    return _wait(supervisor, show, lambda view: view.looks > before + 1 and _is_settled(view), wait_seconds)


def with_node_token(order: FleetOrder) -> FleetOrder:
    """Add a token for the nodes to the order, if the order's own token may create one."""
    with Client(order.server, order.token, ca=order.ca) as client:
        try:
            made = client.create_token(f"fleet-{secrets.token_hex(4)}", TokenRole.NODE)
        except Forbidden:
            return order
    return replace(order, node_token=made.token)


def status() -> FleetView:
    """Return the state of the running fleet; raise NotFound if there is none."""
    view: FleetView = _ask(_supervisor().view.remote())
    return view


def down(show: Show, *, wait_seconds: float, now: bool) -> None:
    """Drain every node and stop the fleet; `now` stops nodes without waiting for their sessions."""
    from polar.app.fleet.cluster import PREFIX, SUPERVISOR, kill

    supervisor = _supervisor()
    _ask(supervisor.end.remote())
    if not now:
        before = _ask(supervisor.view.remote()).looks
        view = _wait(supervisor, show, lambda view: view.looks > before and not view.nodes, wait_seconds)
        if view.nodes:
            raise Unavailable(
                f"{len(view.nodes)} nodes are still draining after {wait_seconds:g} s",
                hint="run `polar fleet down` again to keep waiting, or with --now to stop at once",
            )
    import ray
    from ray.autoscaler.sdk import request_resources

    kill(SUPERVISOR)
    for name in ray.util.list_named_actors():
        if name.startswith(PREFIX):
            kill(name, "end")
    request_resources(bundles=[])


def _supervisor() -> Any:
    from polar.app.fleet.cluster import SUPERVISOR, actor

    supervisor = actor(SUPERVISOR)
    if supervisor is None:
        raise NotFound("no fleet is running on this Ray cluster", hint="start one with `polar fleet up`")
    return supervisor


def _is_settled(view: FleetView) -> bool:
    """Whether all nodes that can be ready are, or one has reported why it cannot."""
    ready = sum(node.state is NodeState.READY for node in view.nodes)
    return ready + view.missing >= view.wanted or view.trouble is not None


def _wait(supervisor: Any, show: Show, is_over: Callable[[FleetView], bool], seconds: float) -> FleetView:
    deadline = time.monotonic() + seconds
    while True:
        view: FleetView = _ask(supervisor.view.remote())
        show(view)
        if is_over(view) or time.monotonic() > deadline:
            return view
        time.sleep(POLL_SECONDS)


def _ask(answer: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(answer, timeout=ANSWER_SECONDS)
    except (RayError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unavailable(f"the fleet's supervisor does not respond: {reason}") from None
