"""Each bridge asks a real server for sessions of a real agent, and gets what was recorded of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from polar.bridges.nemo_gym import Agent, app
from polar.bridges.sessions import Order, ScoredSession, roll_out_groups, task_row
from polar.models.session import SessionResult
from polar.recordings.recording import decode
from polar.trajectory.materialise import materialise
from tests.fakes.resources_server import resources_server
from tests.fakes.trainer_types import STATISTICS, SlimeSample, TrajectoryID, bridge
from tests.systems import TALK, TOKEN, System, shell_task, system

verl, slime, skyrl, prime_rl, areal = map(bridge, ("verl", "slime", "skyrl", "prime_rl", "areal"))

TASK = shell_task("talk", TALK)
EOS = 2


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    async with system(tmp_path / "data", ["A fine answer."]) as made, made.node():
        monkeypatch.setenv("POLAR_SERVER", made.server.url)
        monkeypatch.setenv("POLAR_TOKEN", TOKEN)
        yield made


async def recorded(running: System) -> tuple[SessionResult, list[int], list[int], list[float]]:
    """Of the only session there is: its result, and its trace's tokens, mask and logprobs of the response."""
    (result,) = [one async for one in running.client.results()]
    trajectory = decode(await running.client.recording(result.session_id)).trajectory
    (trace,) = (materialise(trajectory, ref) for ref in trajectory.traces)
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    assert len(trace.completion_ids) == 2
    return result, ids, trace.loss_mask.tolist(), trace.logprobs.tolist()


def is_response(document: dict[str, Any]) -> bool:
    """Whether it is what OpenAI's SDK reads; what a user said in between is only Gym's."""
    output = [item for item in document["output"] if item.get("role") != "user"]
    return len(Response.model_validate({**document, "output": output}).output) == 2


async def test_verl_runs_a_session_as_an_agent_loop(running: System) -> None:
    limits = SimpleNamespace(prompt_length=1000, response_length=1000)
    loop = verl.PolarAgentLoop(limits, SimpleNamespace(eos_token_id=EOS))
    made = await loop.run({"temperature": 1.0}, raw_prompt=[], extra_info=task_row(TASK))
    result, ids, mask, logprobs = await recorded(running)
    assert made.prompt_ids + made.response_ids == ids
    assert (made.response_mask, made.response_logprobs) == (mask, logprobs)
    assert (made.reward_score, made.num_turns) == (1.0, 4)
    assert made.extra_fields["polar_session"] == result.session_id


async def test_slime_generates_the_samples_of_a_session(running: System) -> None:
    asked = SlimeSample(index=3, group_index=1, metadata=task_row(TASK))
    (made,) = await slime.generate(SimpleNamespace(), asked, {"temperature": 1.0})
    _, ids, mask, logprobs = await recorded(running)
    assert (made.tokens, made.response_length) == (ids, len(mask))
    assert (made.loss_mask, made.rollout_log_probs) == (mask, logprobs)
    assert (made.reward, made.rollout_id, made.weight_versions) == (1.0, 3, ["0"])
    assert made.status is SlimeSample.Status.COMPLETED


async def test_areal_runs_a_group_as_an_episode(running: System) -> None:
    made = await areal.PolarWorkflow(samples=1).arun_episode(None, task_row(TASK))
    _, ids, mask, logprobs = await recorded(running)
    prompt = len(ids) - len(mask)
    assert made["input_ids"].tolist() == [ids]
    assert made["loss_mask"].tolist() == [[0] * prompt + mask]
    assert made["logprobs"].tolist() == [[0.0] * prompt + logprobs]
    # Alone in its group it has nothing to be compared with.
    assert made["rewards"].tolist() == [0.0]
    assert STATISTICS.found == {"reward": [1.0]}


async def test_skyrl_generates_a_batch_in_its_order(running: System) -> None:
    fails = shell_task("fails", "exit 0")
    tasks = [TASK, fails, TASK]
    ids = [TrajectoryID("talk", 0), TrajectoryID("fails", 0), TrajectoryID("talk", 1)]
    made = await skyrl.PolarGenerator(filler=EOS).generate(
        {"prompts": [[]] * 3, "env_extras": [task_row(task) for task in tasks], "trajectory_ids": ids}
    )
    assert made["trajectory_ids"] == ids
    assert made["rewards"] == [1.0, 0.0, 1.0]
    assert made["is_last_step"] == [True] * 3
    # The agent of the second never asked the model: there is nothing to learn from.
    assert [sum(mask) > 0 for mask in made["loss_masks"]] == [True, False, True]
    assert made["response_ids"][1] == [EOS]
    assert made["rollout_metrics"] == {"polar/excluded/sessions_untrainable": 1}


async def test_prime_rl_gets_samples_of_a_rolled_out_group(running: System) -> None:
    command = (
        TALK + "\nif [ $((0x$(head -c1 /proc/sys/kernel/random/uuid) % 2)) = 0 ]; then rm answer.txt; fi"
    )
    sessions: tuple[ScoredSession, ...]
    (sessions,) = await roll_out_groups(running.client, [Order(shell_task("coin", command), samples=4)])
    made = prime_rl.training_samples(sessions)
    rewards = [session.reward for session in sessions]
    assert len(made) == (len(sessions) if len(set(rewards)) > 1 else 0)
    assert [max(one.advantages) > 0 for one in made] == [reward == 1.0 for reward in rewards[: len(made)]]


async def test_nemo_gym_seeds_runs_and_verifies(running: System) -> None:
    template = TASK.model_dump(mode="json", include={"harness", "runtime", "evaluator"})
    params = {"input": [{"role": "user", "content": "Say something."}], "temperature": 1.0}
    rows = [{"responses_create_params": params, "_ng_task_index": 5, "answer": number} for number in (0, 1)]
    async with resources_server() as resources:
        agent = Agent(template, resources=resources.url)
        transport = httpx.ASGITransport(app(agent))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=60) as gym:
            gym.cookies.set("mine", "kept")
            answers = await asyncio.gather(*(gym.post("/run", json=row) for row in rows))
            made = [answer.raise_for_status().json() for answer in answers]
            stripped = [{key: one[key] for key in ("reward", "_ng_task_index")} for one in made]
            metrics = await gym.post("/aggregate_metrics", json={"verify_responses": stripped})
            alone = await gym.post("/v1/responses", json=params)
            resources.fails = True
            broken = await gym.post("/run", json=rows[0])
            wrong = await gym.post("/run", json={"polar_task": {"harness": 3}})
        await agent.close()

    assert resources.carried[0] == {"mine": "kept"}
    # Each rollout was judged under the cookie that its own seeding gave.
    assert {
        name: body["answer"] for name, body in resources.seeded.items() if name in resources.verified
    } == {name: body["answer"] for name, body in resources.verified.items()}
    for row, one in zip(rows, made, strict=True):
        assert row.items() <= one.items()
        assert (one["reward"], one["steps"], one["mask_sample"]) == (0.75, 3, False)
        assert (one["polar_reward"], one["polar_excluded"]) == (1.0, {})
        assert is_response(one["response"])
    (first, second) = (item for item in made[0]["response"]["output"] if "prompt_token_ids" in item)
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(seen)] == seen
    assert len(second["generation_log_probs"]) == len(second["generation_token_ids"])
    assert metrics.json()["agent_metrics"]["mean/reward"] == 0.75
    assert [one["_ng_task_index"] for one in metrics.json()["group_level_metrics"]] == [5]
    assert is_response(alone.json())
    assert (broken.status_code, wrong.status_code) == (502, 422)
    assert "the verifier broke" in broken.json()["detail"]
