"""The server's page: leases, deliveries and tokens as they happened, open to its machine and to readers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from polar.config.settings import ServerSettings
from polar.models.access import TokenRole
from polar.models.delivery import Delivery
from polar.models.session import FailureReason, SessionResult, SessionStatus, TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.models.views import LeaseRequest, Problem, Release
from polar.rollout.access import NODES, Access, Caller
from polar.rollout.server import RolloutServer
from polar.rollout.service import RolloutService
from polar.store.store import Store
from tests.fakes.control_plane import body_of
from tests.fakes.extensions import register_idle_extensions


async def here() -> bool:
    return False


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RolloutService]:
    register_idle_extensions(monkeypatch)
    async with Store.open(tmp_path / "data") as store:
        yield RolloutService(store, ServerSettings())


async def delivered(service: RolloutService, delivery: Delivery) -> Problem | None:
    async def body() -> AsyncIterator[bytes]:
        yield body_of(delivery)

    caller = Caller("deliver", Access(NODES), "127.0.0.1")
    (problem,) = (await service.deliver("n", body(), caller)).problems
    return problem


async def page(service: RolloutService) -> dict[tuple[str, str], float]:
    text = (await service.page.text()).decode()
    return {
        (sample.name, " ".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def task() -> TaskSpec:
    idle = dict.fromkeys(("harness", "runtime", "evaluator", "builder"), "idle")
    return TaskSpec.model_validate({"id": "t", "instruction": "Do.", "samples": 3, **idle})


def result(id: str, sample: int) -> SessionResult:
    left_out = {"retry_superseded": 3, "replayed": 20}
    stats = TrajectoryStats(sampled_tokens=30, trainable_tokens=7, excluded=left_out)
    return SessionResult(
        session_id=id,
        task_id="t",
        sample=sample,
        attempt=1,
        status=SessionStatus.COMPLETED,
        verdict=Verdict(reward=0.5),
        stats=stats,
    )


async def test_leases_and_deliveries_are_counted_as_they_happen(service: RolloutService) -> None:
    await service.submit_all([task()])
    await service.submit_all([task()])
    asked = LeaseRequest(max_sessions=3, runtimes=("idle",))
    first, second, third = (await service.lease("n", asked, here)).leases
    delivery = Delivery(key=first.key, result=result(first.session_id, first.sample))
    assert await delivered(service, delivery) is None
    assert await delivered(service, delivery) is None
    forged = Delivery(
        key=second.key.model_copy(update={"secret": ""}),
        result=result(second.session_id, second.sample),
    )
    problem = await delivered(service, forged)
    assert problem is not None
    assert "is not leased under this key" in problem.error
    failed = result(second.session_id, second.sample).model_copy(
        update={
            "status": SessionStatus.FAILED,
            "failure": FailureReason.INFRASTRUCTURE,
            "verdict": None,
        }
    )
    assert await delivered(service, Delivery(key=second.key, result=failed)) is None
    await service.release(third.session_id, Release(key=third.key))
    found = await page(service)
    assert found["polar_server_tasks_submitted_total", ""] == 1
    assert found["polar_server_leases_total", ""] == 3
    assert found["polar_server_deliveries_total", "stored"] == 1
    assert found["polar_server_deliveries_total", "repeated"] == 1
    assert found["polar_server_deliveries_total", "refused"] == 1
    assert found["polar_server_results_total", "completed"] == 1
    assert found["polar_server_reward_sum", ""] == 0.5
    assert found["polar_server_sampled_tokens_total", ""] == 10
    assert found["polar_server_trainable_tokens_total", ""] == 7
    assert found["polar_server_excluded_tokens_total", "retry_superseded"] == 3
    # What a branch was given again was counted with the session that sampled it.
    assert ("polar_server_excluded_tokens_total", "replayed") not in found
    assert found["polar_server_deliveries_total", "retried"] == 1
    assert found["polar_server_leases_given_back_total", ""] == 1
    assert found["polar_server_sessions", "queued"] == 2
    assert found["polar_server_sessions", "running"] == 0


async def test_a_node_that_falls_silent_shows_as_expired_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_idle_extensions(monkeypatch)
    async with Store.open(tmp_path / "data") as store:
        service = RolloutService(store, ServerSettings(lease_seconds=0.05, max_attempts=2))
        await service.submit_all([task()])
        await service.lease("n", LeaseRequest(max_sessions=3, runtimes=("idle",)), here)
        async with service.housekeeping():
            while (found := await page(service)).get(("polar_server_leases_expired_total", "requeued")) != 3:
                pass
    assert found["polar_server_leases_expired_total", "ended"] == 0


async def test_readers_from_elsewhere_bring_a_token(server: RolloutServer) -> None:
    proxied = {"X-Forwarded-For": "10.0.0.9"}
    node, reader = server.issue("n", TokenRole.NODE), server.issue("r", TokenRole.READ_ONLY)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/metrics", headers=proxied)).status_code == 401
        for token, expected in ((reader, 200), ("wrong", 401)):
            headers = {**proxied, "Authorization": f"Bearer {token}"}
            assert (await http.get("/metrics", headers=headers)).status_code == expected
        headers = {**proxied, "Authorization": f"Bearer {node}"}
        assert (await http.get("/metrics", headers=headers)).status_code == 403
