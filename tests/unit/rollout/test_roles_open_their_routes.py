"""Every route says its role, the page about security says the same, and requests are held to it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from fastapi import APIRouter
from starlette.routing import BaseRoute, Mount

from polar.errors import Unavailable
from polar.models.access import NewToken, TokenRole
from polar.rollout.access import Authenticator, GuardedRoute, names_of
from polar.rollout.dashboard.files import ASSETS, PAGES
from polar.rollout.server import create_app
from polar.store.store import Store
from polar.store.tokens import StoredToken
from tests.fakes.control_plane import idle_task

DOCS = Path(__file__).parents[3] / "docs" / "security.md"


def routes_of(routes: list[BaseRoute]) -> Iterator[BaseRoute]:
    """All that the application answers, whichever router it came with."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from routes_of(included.routes)
        else:
            yield route


# Routes are only looked at here, so nothing need stand behind them.
ROUTES = list(routes_of(list(create_app(MagicMock(), MagicMock()).router.routes)))
GUARDED = [route for route in ROUTES if isinstance(route, GuardedRoute)]
NEED_A_TOKEN = [route for route in GUARDED if route.access.roles and not route.access.is_open_here]
OPEN = {"/api/v1/openapi.json", ASSETS, *PAGES}
"""What holds no data: the document of the API, and the files of the dashboard."""


def test_every_route_says_which_role_it_needs() -> None:
    assert len(GUARDED) > 40
    for route in ROUTES:
        path = getattr(route, "path", None)
        assert isinstance(route, GuardedRoute) or path in OPEN, f"{route!r} has no role"
        if not isinstance(route, GuardedRoute):
            assert isinstance(route, Mount) or getattr(route, "methods", None) == {"GET", "HEAD"}


def test_a_route_without_a_role_cannot_be_made() -> None:
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(TypeError, match="/tasks does not say which role it needs"):
        router.add_api_route("/tasks", lambda: None)


def documented() -> dict[str, set[str]]:
    """Operation → the roles that the page's table says may use it."""
    lines = "| operation |" + DOCS.read_text().split("| operation |")[1].split("\n\n")[0]
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines.splitlines()]
    found: dict[str, set[str]] = {}
    for operations, *marks in rows:
        roles = {role for role, mark in zip(header[1:], marks, strict=True) if mark == "✓"}
        found |= dict.fromkeys(re.findall(r"`(\w+)`", operations), roles)
    return found


def test_the_page_about_security_says_who_may_do_what() -> None:
    page = documented()
    said = {
        route.name: {role.value for role in route.access.roles}
        for route in GUARDED
        if route.include_in_schema and "/dashboard/" not in route.path
    }
    assert page == {**said, "openapi": set()}


def test_the_openapi_document_says_the_roles_too() -> None:
    document = create_app(MagicMock(), MagicMock()).openapi()
    assert document["paths"]["/api/v1/tasks"]["post"]["x-roles"] == ["admin", "trainer"]
    assert document["paths"]["/api/v1/health"]["get"]["x-roles"] == []


@pytest.mark.parametrize("role", TokenRole)
async def test_each_role_opens_exactly_its_routes(http: httpx.AsyncClient, role: TokenRole) -> None:
    made = await http.post("/tokens", json={"name": f"a-{role.value}", "role": role.value})
    mine = {"Authorization": f"Bearer {made.json()['token']}"}
    for route in NEED_A_TOKEN:
        answer = await _ask(http, route, mine)
        if role in route.access.roles:
            assert answer.status_code not in (401, 403), route.name
        else:
            assert answer.status_code == 403
            assert answer.json()["code"] == "forbidden"
            assert f"needs a token of the role {names_of(route.access.roles)}" in answer.json()["error"]
            assert f"'a-{role.value}' has the role {role.value}" in answer.json()["error"]


async def test_without_a_known_token_every_guarded_route_is_closed(http: httpx.AsyncClient) -> None:
    for route in NEED_A_TOKEN:
        answer = await _ask(http, route, {"Authorization": "Bearer polar_0011_no"})
        assert answer.status_code == 401
        assert names_of(route.access.roles) in answer.json()["error"]


async def _ask(http: httpx.AsyncClient, route: GuardedRoute, headers: dict[str, str]) -> httpx.Response:
    (method,) = route.methods or {"GET"}
    path = re.sub(r"\{[^}]*\}", "none", route.path).removeprefix("/api/v1")
    body: dict[str, str] | None = {} if method == "POST" else None
    # A stream would not end: that its head came is enough.
    async with http.stream(method, path, headers=headers, json=body) as answer:
        if answer.headers["content-type"].startswith("application/json"):
            await answer.aread()
    return answer


async def test_a_revoked_token_opens_nothing_at_once(http: httpx.AsyncClient) -> None:
    made = (await http.post("/tokens", json={"name": "alice", "role": "trainer"})).json()
    mine = {"Authorization": f"Bearer {made['token']}"}
    assert (await http.get("/tasks", headers=mine)).status_code == 200
    assert (await http.post("/tokens/alice/revoke")).json()["tokens"][0]["state"] == "revoked"
    assert (await http.get("/tasks", headers=mine)).status_code == 401


async def test_a_revoked_token_watches_no_longer(http: httpx.AsyncClient) -> None:
    made = (await http.post("/tokens", json={"name": "alice", "role": "read-only"})).json()
    mine = {"Authorization": f"Bearer {made['token']}"}
    async with asyncio.timeout(10), http.stream("GET", "/dashboard/live", headers=mine) as frames:
        lines = frames.aiter_lines()
        assert await anext(lines) == "event: overview"
        await http.post("/tokens/alice/revoke")
        assert [line async for line in lines if line.startswith("event: ")] == []


async def test_a_revoked_token_leases_nothing_that_comes_later(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, claim = asyncio.Event(), store.leases.claim

    async def noted(*arguments: Any, **options: Any) -> Any:
        looked.set()
        return await claim(*arguments, **options)

    monkeypatch.setattr(store.leases, "claim", noted)
    made = (await http.post("/tokens", json={"name": "north", "role": "node"})).json()
    mine = {"Authorization": f"Bearer {made['token']}"}
    request = {"max_sessions": 1, "runtimes": ["idle"], "wait_seconds": 5}
    waiting = asyncio.create_task(http.post("/nodes/north/lease", json=request, headers=mine))
    await looked.wait()
    await http.post("/tokens/north/revoke")
    await http.post("/tasks", json=idle_task("t").model_dump(mode="json"))
    assert (await waiting).json() == {"leases": []}
    assert (await http.get("/sessions/t.0")).json()["status"] == "queued"


async def test_a_lookup_that_a_revocation_overtakes_is_not_remembered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await store.tokens.create(NewToken(name="alice", role=TokenRole.TRAINER))
    authenticator = Authenticator("owner", store.tokens)
    find = store.tokens.find

    async def overtaken(id: str) -> StoredToken | None:
        found = await find(id)
        await store.tokens.revoke("alice")
        authenticator.clear_cache()
        return found

    monkeypatch.setattr(store.tokens, "find", overtaken)
    await authenticator.holder(f"Bearer {made.token}")
    monkeypatch.setattr(store.tokens, "find", find)
    assert await authenticator.holder(f"Bearer {made.token}") is None


async def test_tokens_of_this_process_are_stored_nowhere(store: Store) -> None:
    authenticator = Authenticator("owner", store.tokens)
    token = authenticator.issue("node-local", TokenRole.NODE)
    holder = await authenticator.holder(f"Bearer {token}")
    assert holder is not None
    assert (holder.name, holder.role) == ("node-local", TokenRole.NODE)
    assert await authenticator.holder(f"Bearer {token[:-1]}" + ("0" if token[-1] != "0" else "1")) is None
    assert await store.tokens.all() == ()
    assert await Authenticator("owner", store.tokens).holder(f"Bearer {token}") is None


@pytest.mark.parametrize("given", ["", "ownerr", "polar_a_b", "polar__", "polar_x", "\N{SNOWMAN}"])
async def test_what_is_no_token_opens_nothing(store: Store, given: str) -> None:
    assert await Authenticator("owner", store.tokens).holder(f"Bearer {given}") is None


async def test_what_is_open_needs_no_database(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object) -> None:
        raise Unavailable("the database cannot be reached")

    monkeypatch.setattr("polar.store.tokens.TokenStore.find", unavailable)
    stored = {"Authorization": f"Bearer polar_0123_{'4567' * 16}"}
    assert (await http.get("/health", headers=stored)).status_code == 200
    answer = await http.get("/tasks", headers=stored)
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")


def test_metrics_are_open_on_this_machine_only() -> None:
    (metrics,) = (route for route in GUARDED if route.access.is_open_here)
    assert metrics.path == "/metrics"
    assert metrics.access.roles == {TokenRole.ADMIN, TokenRole.TRAINER, TokenRole.READ_ONLY}


async def test_a_trainer_submits_and_a_node_runs_what_a_reader_sees(http: httpx.AsyncClient) -> None:
    async def token(role: TokenRole) -> dict[str, str]:
        made = await http.post("/tokens", json={"name": role.value, "role": role.value})
        return {"Authorization": f"Bearer {made.json()['token']}"}

    trainer, node, reader = [
        await token(role) for role in (TokenRole.TRAINER, TokenRole.NODE, TokenRole.READ_ONLY)
    ]
    task = idle_task("t").model_dump(mode="json")
    assert (await http.post("/tasks", json=task, headers=reader)).status_code == 403
    assert (await http.post("/tasks", json=task, headers=trainer)).status_code == 201
    request = {"max_sessions": 1, "runtimes": ["idle"]}
    assert (await http.post("/nodes/n/lease", json=request, headers=trainer)).status_code == 403
    leases = (await http.post("/nodes/n/lease", json=request, headers=node)).json()["leases"]
    assert [lease["session_id"] for lease in leases] == ["t.0"]
    assert (await http.get("/sessions/t.0", headers=node)).status_code == 403
    assert (await http.get("/sessions/t.0", headers=reader)).json()["status"] == "init"
