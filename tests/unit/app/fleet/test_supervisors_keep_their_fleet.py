"""The supervisor against a cluster that only remembers: it places, replaces, backs off, drains and ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polar.app.fleet.planning import FleetOrder, Machine, NodeState
from polar.app.fleet.supervisor import LONGEST_REST_SECONDS, Supervisor
from polar.config.settings import FleetSettings, Settings
from polar.errors import Unavailable
from polar.models.dashboard import NodeOverview
from polar.models.session import SessionStatus
from polar.models.views import Health
from tests.fakes.remembered_cluster import Clock, RememberedCluster

SECRET = "a-secret-for-nodes-only"


def supervised(
    cluster: RememberedCluster,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    told: Sequence[NodeOverview] = (),
    **fleet: Any,
) -> Any:
    queue: list[int | None] = [0]

    def health() -> Health:
        if queue[0] is None:
            raise Unavailable("the server is away")
        return Health(version="1", sessions={SessionStatus.QUEUED: queue[0], SessionStatus.FAILED: 9})

    server = SimpleNamespace(health=health, nodes=lambda: tuple(told))
    monkeypatch.setattr("polar.app.fleet.supervisor.Client", lambda *_, **__: nullcontext(server))
    order = FleetOrder.of(Settings(fleet=FleetSettings(**fleet)), "http://127.0.0.1:1", SECRET)
    return Supervisor(order, cast(Any, cluster), clock), queue


def test_every_machine_gets_a_node_also_one_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RememberedCluster(2)
    supervisor, _ = supervised(cluster, Clock(), monkeypatch)
    supervisor.look()
    assert {node.machine for node in cluster.nodes()} == {"m0", "m1"}
    cluster.there += (Machine("m2", "host", {"CPU": 1.0}),)
    supervisor.look()
    assert {node.machine for node in cluster.nodes()} == {"m0", "m1", "m2"}
    assert sorted(cluster.placed) == ["host-1", "host-2", "host-3"]
    assert not cluster.wished, "the machines decide, so none are asked for"


def test_the_queue_brings_nodes_at_once_and_takes_them_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, clock = RememberedCluster(4), Clock()
    supervisor, queue = supervised(
        cluster, clock, monkeypatch, nodes="1..3", sessions_per_node=2, idle_seconds=10
    )
    for unended, now, wanted in ((0, 0, 1), (5, 1, 3), (0, 5, 3), (None, 11, 3), (0, 12, 3), (0, 23, 1)):
        queue[0], clock.now = unended, now
        supervisor.look()
        assert supervisor.view().wanted == wanted, (unended, now)
        for name in cluster.placed:
            if cluster.placed[name].state is NodeState.STARTING:
                cluster.put(name, NodeState.READY)
    assert sorted(node.state for node in cluster.nodes()) == ["draining", "draining", "ready"]
    assert cluster.wished[-1] == 1


def test_a_machine_where_nodes_fail_is_left_alone_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, clock = RememberedCluster(1), Clock()
    supervisor, _ = supervised(cluster, clock, monkeypatch)
    for _ in range(600):
        supervisor.look()
        for name in cluster.placed:
            cluster.put(name, NodeState.ENDED, detail="exit code 1: the server refused the token")
        clock.now += 1
    assert 600 / LONGEST_REST_SECONDS <= cluster.starts <= 600 / LONGEST_REST_SECONDS + 8
    assert "refused the token" in str(supervisor.view().trouble)


def test_a_node_that_is_drained_on_the_server_is_stood_in_for_until_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, told = RememberedCluster(3), list[NodeOverview]()
    supervisor, _ = supervised(cluster, Clock(), monkeypatch, told, nodes="2")

    def look() -> list[str]:
        supervisor.look()
        for node in cluster.nodes():
            if node.state is NodeState.STARTING:
                cluster.put(node.name, NodeState.READY)
        return [node.state for node in supervisor.view().nodes]

    look()
    assert look() == ["ready", "ready"]
    told.append(NodeOverview(name="host-1", is_draining=True, seconds_silent=0, version=0))
    look()
    assert look() == ["aside", "ready", "ready"]
    told.clear()
    look()
    assert look() == ["draining", "ready", "ready"], "there is one too many again"


def test_a_fleet_with_a_node_on_every_machine_misses_none_that_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = RememberedCluster(2)
    drained = NodeOverview(name="host-1", is_draining=True, seconds_silent=0, version=0)
    supervisor, _ = supervised(cluster, Clock(), monkeypatch, [drained])
    supervisor.look()
    for name in cluster.placed:
        cluster.put(name, NodeState.READY)
    supervisor.look()
    view = supervisor.view()
    assert (view.wanted, view.missing, cluster.starts) == (1, 0, 2)
    supervisor.end()
    supervisor.look()
    assert {node.state for node in cluster.nodes()} == {NodeState.DRAINING}


def test_a_server_that_tells_nothing_of_its_nodes_is_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = FleetOrder.of(Settings(fleet=FleetSettings(nodes="2")), "http://127.0.0.1:1", SECRET)
    cluster = RememberedCluster(2)
    supervisor = Supervisor(order, cast(Any, cluster), Clock())
    for _ in range(3):
        supervisor.look()
    assert cluster.starts == 2
    assert sum("which nodes are busy" in line for line in caplog.messages) == 1


def test_down_drains_every_node_and_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RememberedCluster(3)
    supervisor, _ = supervised(cluster, Clock(), monkeypatch)
    supervisor.look()
    supervisor.end()
    supervisor.look()
    assert {node.state for node in cluster.nodes()} == {NodeState.DRAINING}
    for name in cluster.placed:
        cluster.put(name, NodeState.ENDED)
    supervisor.look()
    supervisor.look()
    assert supervisor.view().nodes == ()


def test_a_supervisor_that_is_restarted_takes_over_the_nodes_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = RememberedCluster(2)
    supervised(cluster, Clock(), monkeypatch)[0].look()
    supervised(cluster, Clock(), monkeypatch)[0].look()
    assert cluster.starts == 2


def test_secrets_travel_in_the_settings_and_show_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RememberedCluster(1)
    supervisor, _ = supervised(cluster, Clock(), monkeypatch)
    supervisor.look()
    assert cluster.settings["server"] == {"token": SECRET}
    assert SECRET not in repr(FleetOrder.of(Settings(), "http://127.0.0.1:1", SECRET))
    assert SECRET not in supervisor.view().model_dump_json()
