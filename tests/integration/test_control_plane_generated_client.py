"""A client generated from the OpenAPI document submits, reads and cancels against a live server."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx

from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.store.store import Store

TOKEN = "a token for tests only"

STORY = """
import sys
from generated import AuthenticatedClient, Client
from generated.api.health import health
from generated.api.rollout import cancel_task, get_task, list_results, list_sessions, submit_task
from generated.models import Component, ComponentOptions, Problem, TaskSpec, TaskStatus

url, token = sys.argv[1:]
assert health.sync(client=Client(base_url=url)).status == "ok"
client = AuthenticatedClient(base_url=url, token=token)
task = TaskSpec(
    id="generated",
    instruction="say hello",
    harness=Component("shell", ComponentOptions.from_dict({"command": "true"})),
    evaluator=Component("command", ComponentOptions.from_dict({"command": "true"})),
    runtime=Component("process"),
    samples=2,
)
created = submit_task.sync_detailed(client=client, body=task)
assert created.status_code == 201, created.content
assert created.parsed.spec.samples == 2
assert submit_task.sync_detailed(client=client, body=task).status_code == 200
assert get_task.sync("generated", client=client).status == TaskStatus.QUEUED
assert [session.id for session in list_sessions.sync(client=client, task_id="generated").sessions] == [
    "generated.0", "generated.1"
]
assert cancel_task.sync("generated", client=client).status == TaskStatus.CANCELLED
page = list_results.sync(client=client, task_id=["generated"], wait_seconds=5.0)
assert {result.session_id for result in page.results} == {"generated.0", "generated.1"}
missing = get_task.sync("nothing", client=client)
assert isinstance(missing, Problem) and missing.code == "not_found"
refused = get_task.sync("generated", client=AuthenticatedClient(base_url=url, token="wrong"))
assert isinstance(refused, Problem) and refused.code == "unauthorized"
print("told")
"""


async def run(*command: str, cwd: Path) -> str:
    tools = Path(sys.executable).parent
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_generated_client_submits_and_reads_a_task(tmp_path: Path) -> None:
    async with (
        Store.open(tmp_path / "data") as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
    ):
        async with httpx.AsyncClient(trust_env=False) as http:
            document = await http.get(f"{server.url}/api/v1/openapi.json")
        (tmp_path / "openapi.json").write_bytes(document.content)
        generator = str(Path(sys.executable).parent / "openapi-python-client")
        options = ("--meta", "none", "--fail-on-warning", "--output-path", "generated")
        await run(generator, "generate", "--path", "openapi.json", *options, cwd=tmp_path)
        (tmp_path / "story.py").write_text(STORY)
        assert await run(sys.executable, "story.py", server.url, TOKEN, cwd=tmp_path) == "told\n"
