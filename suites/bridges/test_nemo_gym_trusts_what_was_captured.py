"""NeMo Gym's own checks and builder find in what the gateway captured what Polar's traces say."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from polar.bridges.nemo_gym import Agent, app, response
from polar.bridges.sessions import ScoredSession
from polar.models.completion import Completion
from polar.recordings.recording import decode
from suites.bridges.gym_transport import CAPTURE, CaptureTransport, decimals
from tests.fakes.routing import CHOSEN, LAYERS, routing_of
from tests.systems import TALK, TOKEN, System, shell_task, system

ROOT = Path(__file__).parents[2]
NINE = {
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
}

pytestmark = pytest.mark.usefixtures("trainers")


async def test_the_capture_log_passes_gyms_conformance_checks(tmp_path: Path) -> None:
    conformance = importlib.import_module(f"{CAPTURE}.conformance")

    def client() -> CaptureTransport:
        return CaptureTransport(tmp_path)

    assert set(await conformance.run_conformance(client, client, client)) == NINE


def test_gym_decodes_the_experts_of_every_item(with_routing: ScoredSession) -> None:
    staging = importlib.import_module(f"{CAPTURE}.staging")
    items = [item for item in response(with_routing, {})["output"] if "generation_token_ids" in item]
    assert len(items) == 2
    for item in items:
        ids = [*item["prompt_token_ids"], *item["generation_token_ids"]]
        told = staging.decode_routed_experts(item["routed_experts"]).values
        assert told[:-1] == routing_of(ids).tolist()
        # The last token of an answer is computed by the next.
        missing = [[staging.MISSING_ROUTE_SENTINEL] * CHOSEN] * LAYERS
        assert told[-1] == (missing if item is items[-1] else routing_of([*ids, 0]).tolist()[-1])


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    async with system(tmp_path / "data", ["A fine answer.", "Another one."]) as made, made.node():
        monkeypatch.setenv("POLAR_SERVER", made.server.url)
        monkeypatch.setenv("POLAR_TOKEN", TOKEN)
        yield made


def messages(call: Completion) -> list[dict[str, Any]]:
    """The request of a recorded call, as the harness sent it."""
    return [{"role": str(one.role), "content": one.content} for one in call.messages]


async def captured_by_gym(call: Completion, rollout: str, transport: CaptureTransport) -> None:
    """Gym's own capture of a call that the gateway served, with the ids that the gateway recorded."""
    gym = importlib.import_module(CAPTURE)
    context = gym.CaptureContext(rollout, call.id, transport, lineage_store=transport)
    token = gym.set_token_sink(context)
    message = {
        "role": "assistant",
        "content": call.response.content,
        "prompt_token_ids": call.prompt_ids.tolist(),
        "generation_token_ids": call.sampled_ids.tolist(),
        "generation_log_probs": decimals(call.logprobs),
    }
    await gym.resolve_parent(messages(call))
    await gym.capture_tokens({"id": call.id, "choices": [{"message": message}]}, messages(call))
    gym.reset_token_sink(token)
    assert context.committed
    assert context.parent_call_id == call.parent


async def test_gyms_builder_makes_the_same_sequence_of_a_real_session(
    running: System, tmp_path: Path
) -> None:
    task = shell_task("talk", TALK)
    template = task.model_dump(mode="json", include={"harness", "runtime", "evaluator"})
    agent = Agent(template)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app(agent)), base_url="http://agent") as gym:
        params = {"input": "Say something.", "temperature": 1.0}
        answer = await gym.post("/run", json={"responses_create_params": params}, timeout=60)
    await agent.close()
    run = answer.raise_for_status().json()
    delivery = importlib.import_module(f"{CAPTURE}.delivery")
    assert delivery.rollout_carries_token_ids(run)

    transport = CaptureTransport(tmp_path)
    recording = decode(await running.client.recording(run["polar_session"]))
    assert len(recording.completions) == 2
    for call in recording.completions:
        await captured_by_gym(call, "rollout", transport)
    consumer = importlib.import_module(f"{CAPTURE}.consumer")
    built = await consumer.trajectories_from_source("rollout", transport)
    assert not built["mask_sample"]
    assert tokens(built["rebuilt_response"]) == tokens(run["response"])


def tokens(document: dict[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """What the trainer reads of a response."""
    return [
        (
            item["prompt_token_ids"],
            item["generation_token_ids"],
            np.array(item["generation_log_probs"], np.float32).tolist(),
        )
        for item in document["output"]
        if item.get("generation_token_ids") is not None
    ]


def test_any_session_is_a_response_of_gyms(group: list[ScoredSession]) -> None:
    types = importlib.import_module("nemo_gym.openai_utils")
    builder = importlib.import_module(f"{CAPTURE}.builder")
    for session, count in zip(group, (2, 1, 0, 0), strict=True):
        document = response(session.with_one_trace(), {})
        made = types.NeMoGymResponse.model_validate(document)
        trained = [item for item in made.output if isinstance(item, types.TokenIDLogProbMixin)]
        assert len(trained) == count
        builder.assert_prefix_contiguity(document)


def test_the_example_is_an_agent_of_gyms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("POLAR_TOKEN", TOKEN)
    path = ROOT / "examples" / "bridges" / "nemo_gym" / "app.py"
    spec = importlib.util.spec_from_file_location("polar_agent_app", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    base = importlib.import_module("nemo_gym.base_responses_api_agent")
    assert issubclass(module.PolarAgent, base.SimpleResponsesAPIAgent)
    assert not module.PolarAgent.__abstractmethods__
    given = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "name": "polar_agent", "template": {}}
    agent = module.PolarAgent.model_construct(config=module.PolarAgentConfig.model_validate(given))
    routes = {getattr(route, "path", "") for route in agent.setup_webserver().routes}
    assert routes >= {"/run", "/v1/responses", "/aggregate_metrics"}
