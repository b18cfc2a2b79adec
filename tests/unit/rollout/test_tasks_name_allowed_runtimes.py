"""A task that names a runtime which no node allows is refused; plain processes must be allowed by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from polar.app import quickstart
from polar.app.own_system import rollout_server
from polar.config.settings import NodeSettings, Settings
from polar.errors import InvalidInput
from polar.models.task import TaskSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.store.store import Store

IDLE = dict.fromkeys(("harness", "runtime", "evaluator", "builder"), "idle")
TASK = {"id": "t", "instruction": "Wait.", **IDLE}


def task(**changes: Any) -> TaskSpec:
    return TaskSpec.model_validate({**TASK, **changes})


def test_a_node_allows_no_plain_processes_unless_it_is_told_to() -> None:
    assert NodeSettings().runtimes == ("bubblewrap",)


async def test_a_runtime_that_no_node_allows_is_refused_by_its_setting(
    store: Store, http: httpx.AsyncClient
) -> None:
    await store.nodes.join("n", {}, ["bubblewrap"])
    for answer in (
        await http.post("/tasks", json=TASK),
        await http.post("/tasks/batch", json={"tasks": [TASK]}),
    ):
        assert answer.status_code == 400
        assert "no node of this server allows 'idle'" in answer.text
        assert "node.runtimes" in answer.text


async def test_a_runtime_that_some_node_allows_is_taken_also_while_it_is_away(
    store: Store, http: httpx.AsyncClient
) -> None:
    await store.nodes.join("n", {}, ["bubblewrap"])
    await store.nodes.join("m", {}, ["idle", "docker"])
    assert (await http.post("/tasks", json=TASK)).status_code == 201


async def test_a_node_that_allows_less_when_it_joins_again_is_believed(
    http: httpx.AsyncClient,
) -> None:
    join = {"version": "1", "runtimes": ["idle"]}
    assert (await http.post("/nodes/n/join", json=join)).status_code == 200
    assert (await http.post("/tasks", json=TASK)).status_code == 201
    assert (await http.post("/nodes/n/join", json={**join, "runtimes": ["bubblewrap"]})).status_code == 200
    assert (await http.post("/tasks", json={**TASK, "id": "u"})).status_code == 400


async def test_tasks_may_come_before_the_first_node(http: httpx.AsyncClient) -> None:
    assert (await http.post("/tasks", json=TASK)).status_code == 201


async def test_a_taskset_does_not_allow_itself_plain_processes(tmp_path: Path) -> None:
    known = {"evaluator": "session_completed", "builder": "prefix_merging"}
    tasks = [task(harness={"name": "shell", "options": {"command": "true"}}, runtime="process", **known)]
    with pytest.raises(InvalidInput, match="isolates nothing") as refused:
        async with rollout_server(Settings(data_dir=tmp_path), tasks, lambda _step: None):
            pass
    assert "runtimes: [process]" in str(refused.value.hint)


async def test_the_quickstart_says_that_it_goes_on_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unavailable() -> str:
        return "no namespaces"

    def start(settings: Settings, tasks: list[TaskSpec], *_: object, **__: object) -> Any:
        assert [task.runtime.name for task in tasks] == ["process"]
        assert "process" in settings.node.runtimes
        raise InvalidInput("far enough")

    monkeypatch.setattr(BubblewrapRuntime, "unavailable", unavailable)
    monkeypatch.setattr(quickstart, "rollout_server", start)
    said = io.StringIO()
    with pytest.raises(InvalidInput, match="far enough"):
        await quickstart.run(Settings(), [task(runtime="bubblewrap")], Console(file=said, width=200))
    assert "no namespaces" in said.getvalue()
    assert "with your user's access to your files" in said.getvalue()
