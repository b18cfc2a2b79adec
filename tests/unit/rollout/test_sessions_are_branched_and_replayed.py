"""Whoever submits tasks may branch and replay sessions; a request that comes again changes nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from polar.config.settings import ServerSettings, TaskRules
from polar.models.session import Lease, LeaseKey, Origin, TrajectoryStats
from polar.models.task import BudgetScope, OnDivergence
from polar.models.views import SessionPage, SessionView
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import complete, idle_task, result_of
from tests.unit.rollout.conftest import TOKEN

RECORDING = b"recorded"


async def claim(store: Store, limit: int = 1) -> list[Lease]:
    return list(await store.leases.claim("node", limit=limit, runtimes=["idle"], seconds=60))


async def end(store: Store, lease: Lease) -> None:
    result = result_of(lease, stats=TrajectoryStats(completions=5), has_recording=True)
    await complete(store, lease.key, result, recording=RECORDING)


@pytest.fixture
async def sample(store: Store, http: httpx.AsyncClient) -> str:
    """The second of two samples, both of which have ended."""
    fields: dict[str, Any] = {
        "samples": 2,
        "early_stop": 2,
        "sampling": {"seed": 70},
        "branching": {"at": "idle"},
    }
    await store.tasks.submit(idle_task(metadata={"set": "test"}, **fields))
    for lease in await claim(store, 2):
        await end(store, lease)
    return "task.1"


def problem(response: httpx.Response) -> tuple[int, str, str]:
    return response.status_code, response.json()["code"], response.json()["error"]


async def test_branches_join_the_task(http: httpx.AsyncClient, store: Store, sample: str) -> None:
    asked = {"calls": 3, "samples": 2, "on_divergence": "stop", "budgets": "session", "request_id": "mine"}
    answers = [await http.post(f"/sessions/{sample}/branches", json=asked) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    added = SessionPage.model_validate_json(answers[0].content).sessions
    ways: Any = {"on_divergence": OnDivergence.STOP, "budgets": BudgetScope.SESSION}
    origin = Origin(session_id=sample, calls=3, **ways)
    assert [(one.id, one.task_id, one.origin) for one in added] == [
        ("task.2", "task", origin),
        ("task.3", "task", origin),
    ]
    (branch, _) = await claim(store, 2)
    await end(store, branch)
    again = await http.post(f"/sessions/{branch.session_id}/branches", json={"calls": 4})
    (deeper,) = SessionPage.model_validate_json(again.content).sessions
    assert deeper.origin == Origin(session_id=branch.session_id, calls=4, depth=2)
    shown = (await http.get(f"/sessions/{deeper.id}")).json()["origin"]
    assert (shown["session_id"], shown["calls"]) == (branch.session_id, 4)
    listed = (await http.get("/dashboard/tasks/task")).json()["samples"]
    assert [(one["session"]["origin"] or {}).get("calls") for one in listed] == [None, None, 3, 3, 4]


async def test_a_replay_is_the_one_session_of_a_copy_of_the_task(
    http: httpx.AsyncClient, store: Store, sample: str
) -> None:
    answer = await http.post(f"/sessions/{sample}/replay", json={})
    assert answer.status_code == 201
    replayed = SessionView.model_validate_json(answer.content)
    origin = Origin(session_id=sample, samples_on=False, on_divergence=OnDivergence.STOP)
    assert replayed.origin == origin
    copy, original = [(await store.tasks.get(id)).spec for id in (replayed.task_id, "task")]
    assert copy.id.startswith(f"{sample}-replay-")
    changed = {"id", "samples", "early_stop", "branching", "sampling"}
    assert copy.model_dump(exclude=changed) == original.model_dump(exclude=changed)
    # The seed is the one that this sample had.
    assert (copy.samples, copy.early_stop, copy.branching, copy.sampling.seed) == (1, None, None, 71)
    (lease,) = await claim(store)
    assert (lease.session_id, lease.origin) == (replayed.id, origin)


async def test_a_replay_that_is_asked_for_again_is_the_same_if_the_request_is(
    http: httpx.AsyncClient, sample: str
) -> None:
    async def replay(**asked: Any) -> httpx.Response:
        return await http.post(f"/sessions/{sample}/replay", json=asked)

    first, again = [await replay(calls=2, request_id="mine") for _ in range(2)]
    assert first.content == again.content
    status, code, error = problem(await replay(calls=3, request_id="mine"))
    assert (status, code) == (409, "conflict")
    assert "exists with other content" in error
    ids = {(await replay(calls=2)).json()["id"] for _ in range(2)}
    assert len(ids | {first.json()["id"]}) == 3


@pytest.mark.parametrize("path", ["branches", "replay"])
async def test_what_cannot_be_begun_with_is_refused_in_words(
    http: httpx.AsyncClient, store: Store, sample: str, path: str
) -> None:
    beyond = await http.post(f"/sessions/{sample}/{path}", json={"calls": 6})
    assert problem(beyond) == (400, "invalid_input", "calls: session 'task.1' has 5 model calls, not 6")
    await store.tasks.submit(idle_task("later"))
    unended = await http.post(f"/sessions/later.0/{path}", json={"calls": 0})
    assert problem(unended)[:2] == (409, "conflict")
    assert "'later.0' is queued: it has no recording before it has ended" in problem(unended)[2]
    assert problem(await http.post(f"/sessions/none/{path}", json={"calls": 0}))[:2] == (404, "not_found")
    for wrong in ({"calls": -1}, {"calls": 1, "on_divergence": "panic"}, {"calls": 1, "request_id": "a/b"}):
        assert problem(await http.post(f"/sessions/{sample}/{path}", json=wrong))[:2] == (
            400,
            "invalid_input",
        )
    assert len((await store.sessions.page()).sessions) == 3


async def test_a_replay_names_what_tasks_may_name_now(store: Store, sample: str) -> None:
    rules = ServerSettings(port=0, tasks=TaskRules(harnesses=("other",)))
    async with (
        RolloutServer(store, TOKEN, rules) as strict,
        httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http,
    ):
        answer = await http.post(f"{strict.url}/api/v1/sessions/{sample}/replay", json={})
    assert "'idle' is not among those of server.tasks.harnesses" in problem(answer)[2]


async def test_tasks_branch_by_allowed_strategies_alone(store: Store) -> None:
    rules = ServerSettings(port=0, tasks=TaskRules(branchings=("other",)))
    async with (
        RolloutServer(store, TOKEN, rules) as strict,
        httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http,
    ):
        tasks = [idle_task(branching={"at": name}).model_dump(mode="json") for name in ("idle", "other")]
        refused, taken = [await http.post(f"{strict.url}/api/v1/tasks", json=task) for task in tasks]
    assert "branching.at.name: 'idle' is not among those of server.tasks.branchings" in problem(refused)[2]
    assert taken.status_code == 201


async def test_a_node_reads_what_its_session_begins_with_and_nothing_else(
    http: httpx.AsyncClient, store: Store, sample: str
) -> None:
    made = await http.post("/tokens", json={"name": "north", "role": "node"})
    node = {"Authorization": f"Bearer {made.json()['token']}"}

    async def origin(session_id: str, key: LeaseKey) -> httpx.Response:
        return await http.post(f"/sessions/{session_id}/origin", json=key.model_dump(), headers=node)

    await http.post("/tasks", json=idle_task("plain").model_dump(mode="json"))
    await http.post(f"/sessions/{sample}/branches", json={"calls": 1})
    leases = {lease.task.id: lease for lease in await claim(store, 2)}
    branch, plain = leases["task"], leases["plain"]
    assert (await origin(branch.session_id, branch.key)).content == RECORDING
    assert problem(await origin(plain.session_id, plain.key))[:2] == (404, "not_found")
    forged = branch.key.model_copy(update={"secret": "guessed"})
    for session_id, key in ((branch.session_id, forged), (sample, branch.key), (plain.session_id, forged)):
        assert problem(await origin(session_id, key))[:2] == (409, "conflict")
    await end(store, branch)
    assert problem(await origin(branch.session_id, branch.key))[:2] == (409, "conflict")
    assert (await http.get(f"/sessions/{sample}/recording", headers=node)).status_code == 403
    assert (await http.get(f"/sessions/{sample}/recording")).content == RECORDING
