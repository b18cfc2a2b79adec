"""A whole system in one process for tests: everything real but the engine, which is scripted."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from polar.client import AsyncClient
from polar.config.settings import DEFAULT_MODEL, GatewaySettings, NodeSettings, ServerSettings
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway
from polar.harnesses.base import Installation
from polar.harnesses.shell import Shell
from polar.models.task import TaskSpec
from polar.node.node import Node
from polar.rendering.families import renderer_for
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.scripted_engine import Script, ScriptedEngine

TOKEN = "a-token-for-tests-only"
RUNTIMES = ("bubblewrap", "process")
"""Those that nodes of tests allow: most tests trust their agents, and need no isolation."""

ASK = f"""{sys.executable} - <<'PY'
import json, os, urllib.request
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
body = {{"model": os.environ["POLAR_MODEL"], "messages": messages}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {{
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
        "x-stainless-retry-count": "0",
    }},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(answer, file=open("answer.txt", "a"))
PY
"""
"""A shell agent's one model call, whose answer it appends to answer.txt."""

TALK = f"""{sys.executable} - <<'PY'
import json, os, urllib.request
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
for question in ("And then?", None):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": os.environ["POLAR_MODEL"], "messages": messages}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {{"role": "user", "content": question}}]
print(said["content"], file=open("answer.txt", "w"))
PY
"""
"""A shell agent with two turns, whose last answer is in answer.txt."""


TURNS = f"""{sys.executable} - <<'PY'
import json, os, urllib.request
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
for turn in range(4):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": os.environ["POLAR_MODEL"], "messages": messages}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {{"role": "user", "content": f"And then, {{turn}}?"}}]
    print(said["content"], file=open("answer.txt", "a"))
PY
"""
"""A shell agent with four turns."""


@dataclass(frozen=True)
class Worker:
    """What a node needs, and its engine."""

    client: AsyncClient
    gateway: Gateway
    engine: ScriptedEngine
    data_dir: Path
    node_settings: NodeSettings

    @asynccontextmanager
    async def node(self, *, resume_bytes: int = 1 << 26, **changes: Any) -> AsyncIterator[Node]:
        """A node at work while the block runs."""
        settings = self.node_settings.model_copy(update=changes)
        model = await self.engine.model_info()
        parts = (settings, self.data_dir, self.client, self.gateway, model)
        node = Node(*parts, lease_seconds=30.0, resume_bytes=resume_bytes)
        work = asyncio.create_task(node.run())
        try:
            yield node
        finally:
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled() and (error := work.exception()):
                raise error


@dataclass(frozen=True)
class System(Worker):
    server: RolloutServer

    async def captured(self, session_id: str) -> bytes:
        """What the server has of a running session's capture."""
        async with Store.open(self.data_dir) as store:
            return b"".join([data async for data in store.captures.read(session_id)])

    async def lose_leases(self) -> None:
        """Another server of the store, an hour later, has not heard of the node for too long."""
        async with Store.open(self.data_dir, lambda: time.time() + 3600) as later:
            assert (await later.leases.expire(max_attempts=9)).requeued == 1


@asynccontextmanager
async def worker(
    data_dir: Path, url: str, script: Sequence[Script], *, max_context: int = 8192, model: str = "scripted"
) -> AsyncIterator[Worker]:
    """A client of the server at `url`, and a gateway in front of an engine of its own."""
    model_dir = ensure_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    engine = ScriptedEngine(tokenizer, script, repeat_last=True, max_context=max_context, name=model)
    renderer = renderer_for("x", model_dir, tool_prompt=True)
    settings = NodeSettings(
        init_workers=2,
        ready_buffer=2,
        run_slots=4,
        postrun_workers=2,
        runtimes=RUNTIMES,
    )
    async with (
        Gateway(GatewaySettings(), engine, renderer, engine.info) as gateway,
        AsyncClient(url, TOKEN) as client,
    ):
        yield Worker(client, gateway, engine, data_dir, settings)


@asynccontextmanager
async def system(
    data_dir: Path,
    script: Sequence[Script],
    *,
    max_context: int = 8192,
    model: str = "scripted",
) -> AsyncIterator[System]:
    server_settings = ServerSettings(port=0, retry_seconds=0.0)
    async with (
        Store.open(data_dir) as store,
        RolloutServer(store, TOKEN, server_settings) as server,
        worker(data_dir, server.url, script, max_context=max_context, model=model) as parts,
    ):
        yield System(**vars(parts), server=server)


def allow_processes(directory: Path) -> Path:
    """A settings file for commands, found by those that are started in this directory."""
    path = directory / "polar.yaml"
    path.write_text(f"node: {{runtimes: [{', '.join(RUNTIMES)}]}}\n")
    return path


async def counted(node: Node) -> dict[tuple[str, str], float]:
    """What a node counts, by the name of a metric and its first label."""
    samples = [sample for family in await node.metric_families() for sample in family.samples]
    return {(sample.name, next(iter(sample.labels.values()), "")): sample.value for sample in samples}


async def seats_taken(node: Node) -> float:
    """How many sessions all pools of a node have."""
    return sum(
        value for (name, _), value in (await counted(node)).items() if name == "polar_node_pool_occupied"
    )


def install_shell(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Have nodes that begin from now on find the shell harness in a version."""

    async def install(_: Shell) -> Installation:
        return Installation(version)

    monkeypatch.setattr(Shell, "install", install)


def shell_task(id: str, command: str, **changes: Any) -> TaskSpec:
    """A task for the shell harness in the process runtime, scored by whether answer.txt is there.

    Its agent need not ask the model anything.
    """
    document = {
        "id": id,
        "instruction": "Say something.",
        "harness": {"name": "shell", "options": {"command": command}},
        "runtime": "process",
        "evaluator": {"name": "command", "options": {"command": "test -s answer.txt"}},
        "allow_no_model_calls": True,
    }
    return TaskSpec.model_validate({**document, **changes})
