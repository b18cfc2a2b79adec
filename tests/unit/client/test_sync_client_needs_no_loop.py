"""The sync client may be interrupted, forgotten and used by those that make its tasks."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from polar.client import Client
from polar.models.task import TaskSpec
from tests.fakes.control_plane import idle_task
from tests.unit.client.conftest import Plane


@pytest.fixture
def client(plane: Plane) -> Iterator[Client]:
    with Client(plane.url, plane.token) as connected:
        yield connected


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A suite started in the background inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_a_wait_at_once(client: Client, plane: Plane) -> None:
    client.submit(idle_task("a", samples=2))
    plane.finish(1)
    results = client.results(["a"], follow=True)
    assert next(results).session_id == "a.0"
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert client.session("a.0").status.ended


def test_what_makes_tasks_may_use_the_client(client: Client) -> None:
    client.submit(idle_task("a"))

    def more() -> Iterator[TaskSpec]:
        for view in client.tasks():
            yield idle_task(f"{view.spec.id}-again")

    assert [view.spec.id for view in client.submit_all(more())] == ["a-again"]


def test_a_client_that_is_closed_or_forgotten_leaves_no_thread(plane: Plane) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "polar-client"]

    before = threads()
    with Client(plane.url, plane.token) as client:
        assert client.health().status == "ok"
    client.close()
    assert threads() == before

    forgotten = Client(plane.url, plane.token)
    assert forgotten.health().status == "ok"
    (thread,) = set(threads()) - set(before)
    del forgotten
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
