"""`polar token`, `nodes` and `webhooks` against a real server, as admins use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar.cli.main import app
from polar.client import AsyncClient
from polar.config.settings import NodeSettings, ServerSettings, TaskRules, WebhookSettings
from polar.errors import Forbidden, InvalidInput
from polar.models.delivery import Delivery
from polar.models.policy import PolicyReport
from polar.models.views import LeaseRequest
from polar.node.node import join
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import result_of
from tests.fakes.webhook_receiver import Receiver, receiving
from tests.systems import shell_task

OWNER = "a-token-for-this-test"
SECRET = "a-secret-for-this-test"


@dataclass
class Served:
    url: str
    store: Store
    receiver: Receiver

    async def polar(self, *arguments: str, token: str = OWNER) -> Any:
        environment = {"POLAR_SERVER": self.url, "POLAR_TOKEN": token, "COLUMNS": "300"}
        return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environment)

    async def ok(self, *arguments: str, token: str = OWNER) -> str:
        result = await self.polar(*arguments, token=token)
        assert result.exit_code == 0, result.output + repr(result.exception)
        return str(result.stdout)

    async def fails(self, *arguments: str, token: str = OWNER) -> str:
        result = await self.polar(*arguments, token=token)
        assert result.exit_code == 1
        (line,) = result.output.strip().splitlines()
        return str(line)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with receiving(SECRET) as receiver, Store.open(tmp_path / "data") as store:
        place = receiver.url.removeprefix("http://").removesuffix("/hook")
        webhooks = WebhookSettings(allow=(place,), secret=SECRET, retry_seconds=300)
        rules = TaskRules(harnesses=("shell",), runtimes=("process", "docker"), images=("lab/*",))
        settings = ServerSettings(port=0, webhooks=webhooks, tasks=rules)
        async with RolloutServer(store, OWNER, settings) as server:
            yield Served(server.url, store, receiver)


async def test_tokens_are_made_listed_and_revoked(served: Served) -> None:
    made = await served.polar("token", "create", "--role", "read-only", "--name", "alice", "--expires", "30d")
    token = made.stdout.strip()
    assert token.startswith("polar_")
    assert "it is shown only once" in made.stderr
    assert "alice" in await served.ok("token", "list")
    assert token not in await served.ok("token", "list", "--json")
    assert await served.ok("tasks", token=token) is not None
    error = await served.fails("token", "list", token=token)
    assert "list_tokens needs a token of the role admin; 'alice' has the role read-only" in error
    await served.ok("token", "revoke", "alice")
    assert "the server refused the token" in await served.fails("tasks", token=token)
    assert json.loads(await served.ok("token", "list", "--json"))["state"] == "revoked"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create"], "Missing option '--role'"),
        (["create", "--role", "king"], "'king' is not one of 'admin', 'trainer', 'read-only', 'node'"),
    ],
)
async def test_a_token_has_one_of_the_roles(served: Served, arguments: list[str], said: str) -> None:
    result = await served.polar("token", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "--role", "node", "--expires", "soon"], "--expires: 'soon' is not a duration"),
        (["revoke", "nobody"], "no token is 'nobody'"),
    ],
)
async def test_mistakes_with_tokens_are_one_line(served: Served, arguments: list[str], said: str) -> None:
    assert said in await served.fails("token", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("token", "revoke"), "Missing argument 'NAME'"),
        (("token", "burn"), "No such command 'burn'"),
        (("nodes", "drain"), "Missing argument 'NAME'"),
    ],
)
async def test_wrong_usage_of_a_sub_command_is_explained(
    served: Served, arguments: tuple[str, ...], said: str
) -> None:
    result = await served.polar(*arguments)
    assert (result.exit_code, said in result.output) == (2, True)


async def test_a_node_with_a_token_of_another_role_is_told_which_it_needs(served: Served) -> None:
    token = (await served.ok("token", "create", "--role", "read-only")).strip()
    async with AsyncClient(served.url, token) as client:
        with pytest.raises(Forbidden, match="join_node needs a token of the role admin or node"):
            await join(client, NodeSettings(name="west"))


async def test_nodes_are_shown_drained_and_resumed(served: Served) -> None:
    async with AsyncClient(served.url, OWNER) as client:
        await join(client, NodeSettings(name="west", run_slots=4, init_workers=3, postrun_workers=2))
        await client.follow_policy("west", PolicyReport())
    assert (await served.ok("nodes")).splitlines()[-1].split() == [
        "west",
        "running",
        "0",
        "0/3",
        "0/4",
        "0/4",
        "0/2",
    ]
    assert "drained" in await served.ok("nodes", "drain", "west")
    assert json.loads(await served.ok("nodes", "--json"))["is_draining"]
    assert "running" in await served.ok("nodes", "resume", "west")
    assert "no node 'east' has joined" in await served.fails("nodes", "drain", "east")


async def test_webhooks_are_shown_with_their_lag_and_last_error(served: Served) -> None:
    served.receiver.failing = 1
    async with AsyncClient(served.url, OWNER) as client:
        await client.submit(shell_task("t", "true", webhook={"url": served.receiver.url}))
        request = LeaseRequest(max_sessions=1, runtimes=("process",))
        (lease,) = (await client.lease("n", request)).leases
        assert await client.deliver("n", [Delivery(key=lease.key, result=result_of(lease))]) == [None]
        async with asyncio.timeout(30):
            while (await served.store.webhooks.all())[0].error is None:
                continue
    listed = await served.ok("webhooks")
    assert "it answered 500" in listed
    assert served.receiver.url in listed
    view = json.loads(await served.ok("webhooks", "--json"))
    assert (view["lag"], view["failures"]) == (1, 1)


async def test_tasks_may_name_only_what_the_server_lists(served: Served) -> None:
    async with AsyncClient(served.url, OWNER) as client:
        for changes, said in (
            ({"harness": "pi"}, "harness.name: 'pi' is not among those of server.tasks.harnesses"),
            (
                {"runtime": "bubblewrap"},
                "runtime.name: 'bubblewrap' is not among those of server.tasks.runtimes",
            ),
            (
                {"runtime": {"name": "docker", "options": {"image": "evil/miner"}}},
                "runtime.options.image: 'evil/miner' is not among those of server.tasks.images",
            ),
        ):
            with pytest.raises(InvalidInput, match=said):
                await client.submit(shell_task("t", "true", **changes))
        await client.submit(
            shell_task("t", "true", runtime={"name": "docker", "options": {"image": "lab/python:3"}})
        )
