"""Every route has a role in one table, and the gate keeps to it: too little says what is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, Mount

from polar.config.settings import ServerSettings
from polar.errors import Unavailable
from polar.models.access import Role, Rotation
from polar.rollout.access import ADMINS, RULES, UNKNOWN, Rule, rule_for, words
from polar.rollout.app import create_app
from polar.rollout.keys import Keys
from polar.rollout.service import RolloutService
from polar.store.store import Store
from tests.fakes.control_plane import idle_task

DOCS = Path(__file__).parents[3] / "docs" / "security.md"


def addresses(routes: list[BaseRoute]) -> Iterator[tuple[str, str, str]]:
    """The name, a method and an example path of all that the application answers."""
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            yield from addresses(included.routes)
            continue
        if isinstance(route, Mount):
            yield str(route.name), "GET", f"{route.path}/any/file"
            continue
        template = getattr(route, "path", None)
        assert template is not None, f"{route!r} is of a kind that this test does not know"
        for method in getattr(route, "methods", None) or ("GET",):
            if method != "HEAD":
                yield str(getattr(route, "name", "")), method, re.sub(r"\{[^}]*\}", "some-id", template)


@pytest.fixture
def app(store: Store) -> FastAPI:
    return create_app(RolloutService(store, ServerSettings()), Keys("owner", store.tokens, store.database))


def test_every_route_of_the_application_is_in_the_table(app: FastAPI) -> None:
    every = list(addresses(list(app.router.routes)))
    assert len(every) > 30
    for name, method, path in every:
        rule, _ = rule_for(method, path)
        assert rule.action != "unknown", f"{method} {path} has no role"
        is_of_the_api = path.startswith("/api/") and "/dashboard/" not in path
        if is_of_the_api:
            assert rule.action == name, f"{method} {path} is {name}, and the table takes it for {rule.action}"
        else:
            assert method == "GET", f"{method} {path} changes something outside the API"


def test_every_rule_is_of_a_route_and_documented(app: FastAPI) -> None:
    names = {name for name, _, _ in addresses(list(app.router.routes))}
    page = DOCS.read_text()
    for rule in RULES:
        if rule.action not in ("unknown", "page", "dashboard", "metrics"):
            assert rule.action in names
            assert f"`{rule.action}`" in page, f"docs/security.md does not say who may {rule.action}"


def test_what_the_table_does_not_name_is_for_admins_alone() -> None:
    for method, path in (("GET", "/api/v1/new"), ("POST", "/api/v1/new"), ("DELETE", "/x"), ("POST", "/x")):
        rule, _ = rule_for(method, path)
        assert rule.action == UNKNOWN.action
        assert rule.roles == ADMINS


GUARDED = [rule for rule in RULES if rule.roles is not None and rule.action not in ("metrics", "unknown")]


@pytest.mark.parametrize("role", Role)
async def test_each_role_opens_exactly_its_routes(http: httpx.AsyncClient, role: Role) -> None:
    made = await http.post("/tokens", json={"name": f"a-{role.value}", "role": role.value})
    mine = {"Authorization": f"Bearer {made.json()['token']}"}
    for rule in GUARDED:
        answer = await _ask(http, rule, mine)
        assert rule.roles is not None
        if role in rule.roles:
            assert answer.status_code not in (401, 403), rule.action
        else:
            assert answer.status_code == 403
            assert answer.json()["code"] == "forbidden"
            assert f"needs a token of the role {words(rule.roles)}" in answer.json()["error"]
            assert f"'a-{role.value}' has the role {role.value}" in answer.json()["error"]


async def test_without_a_known_token_every_guarded_route_is_closed(http: httpx.AsyncClient) -> None:
    for rule in GUARDED:
        answer = await _ask(http, rule, {"Authorization": "Bearer polar_0011_no"})
        assert answer.status_code == 401
        assert words(rule.roles or ()) in answer.json()["error"]


async def _ask(http: httpx.AsyncClient, rule: Rule, headers: dict[str, str]) -> httpx.Response:
    path = re.sub(r"\{[^}]*\}", "none", rule.path).removeprefix("/api/v1")
    return await http.request(rule.method, path, headers=headers, json={} if rule.method == "POST" else None)


async def test_a_revoked_token_opens_nothing_at_once(http: httpx.AsyncClient) -> None:
    made = (await http.post("/tokens", json={"name": "alice", "role": "trainer"})).json()
    mine = {"Authorization": f"Bearer {made['token']}"}
    assert (await http.get("/tasks", headers=mine)).status_code == 200
    assert (await http.post("/tokens/alice/revoke")).json()["tokens"][0]["state"] == "revoked"
    assert (await http.get("/tasks", headers=mine)).status_code == 401


async def test_a_rotated_token_overlaps_with_its_successor(http: httpx.AsyncClient, store: Store) -> None:
    old = (await http.post("/tokens", json={"name": "alice", "role": "read-only"})).json()["token"]
    new = (await http.post("/tokens/alice/rotate", json={"overlap_seconds": 60})).json()["token"]
    for token in (old, new):
        answer = await http.get("/tasks", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 200
    newest = (await store.tokens.rotate("alice", Rotation(overlap_seconds=0))).token
    for token, status in ((old, 401), (new, 401), (newest, 200)):
        keys = Keys("owner", store.tokens, store.database)
        assert (await keys.holder(token) is not None) == (status == 200)


async def test_tokens_of_this_process_are_stored_nowhere(store: Store) -> None:
    keys = Keys("owner", store.tokens, store.database)
    token = keys.issue("node-local", Role.NODE)
    holder = await keys.holder(token)
    assert holder is not None
    assert (holder.name, holder.role) == ("node-local", Role.NODE)
    assert await keys.holder(token[:-1] + ("0" if token[-1] != "0" else "1")) is None
    assert await store.tokens.all() == ()
    assert await Keys("owner", store.tokens, store.database).holder(token) is None


@pytest.mark.parametrize("given", ["", "owner ", "ownerr", "polar_a_b", "polar__", "polar_x", "\N{SNOWMAN}"])
async def test_what_is_no_token_opens_nothing(store: Store, given: str) -> None:
    assert await Keys("owner", store.tokens, store.database).holder(given) is None


async def test_what_is_open_needs_no_database(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object) -> None:
        raise Unavailable("the database cannot be reached")

    monkeypatch.setattr("polar.store.tokens.Tokens.find", unavailable)
    stored = {"Authorization": "Bearer polar_0123_4567"}
    assert (await http.get("/health", headers=stored)).status_code == 200
    answer = await http.get("/tasks", headers=stored)
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")


async def test_metrics_are_open_on_this_machine_only() -> None:
    rule, _ = rule_for("GET", "/metrics")
    assert rule.is_open_here
    assert rule.roles is not None


async def test_a_trainer_submits_and_a_node_runs_what_a_reader_sees(http: httpx.AsyncClient) -> None:
    async def token(role: Role) -> dict[str, str]:
        made = await http.post("/tokens", json={"name": role.value, "role": role.value})
        return {"Authorization": f"Bearer {made.json()['token']}"}

    trainer, node, reader = [await token(role) for role in (Role.TRAINER, Role.NODE, Role.READ_ONLY)]
    task = idle_task("t").model_dump(mode="json")
    assert (await http.post("/tasks", json=task, headers=reader)).status_code == 403
    assert (await http.post("/tasks", json=task, headers=trainer)).status_code == 201
    request = {"max_sessions": 1, "runtimes": ["idle"]}
    assert (await http.post("/nodes/n/lease", json=request, headers=trainer)).status_code == 403
    leases = (await http.post("/nodes/n/lease", json=request, headers=node)).json()["leases"]
    assert [lease["session_id"] for lease in leases] == ["t.0"]
    assert (await http.get("/sessions/t.0", headers=node)).status_code == 403
    assert (await http.get("/sessions/t.0", headers=reader)).json()["status"] == "init"
