"""GRPO with everything real: agents in sandboxes, gateway, evaluator, engine, and weights back to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from polar.models.task import RunKind
from polar.models.views import RunView
from polar.store.store import Store
from polar.training.material import Material, PolicyVersions
from polar.training.policy import load_policy
from polar.training.run import train
from polar.training.settings import GrpoSettings
from polar.training.sources import Recordings
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.training_runs import quiet, rolled_out

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model")]


def objective(settings: GrpoSettings, made: Material, weights: Path | None) -> float:
    """How likely a policy holds what was better than its group, and how unlikely what was worse."""
    policy = load_policy(settings.model, weights=weights)
    return sum(
        float((torch.as_tensor(batch.terms.weights * batch.terms.advantages) * policy.logprobs(batch)).sum())
        for batch in made.packing.batches
    )


def test_a_run_improves_its_objective_and_goes_on_with_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_tiny_llama(tmp_path / "model", max_position_embeddings=1024)
    settings = rolled_out(model, tmp_path)
    train(settings.model_copy(update={"steps": 2}), quiet())
    kept = train(settings, quiet())

    lines = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["sessions"] == 4 for line in lines)
    assert all(
        line["staleness_max"] <= settings.objective.max_staleness for line in lines if "staleness" in line
    )
    # On-policy, the trainer's logprobs are the engine's: they compute with the same weights.
    assert lines[0]["behaviour_kl"] < 1e-4

    offline = settings.model_copy(
        update={"rollouts": None, "recordings": settings.out / ".polar", "groups": 3}
    )
    offline = offline.model_copy(
        update={"objective": offline.objective.model_copy(update={"max_staleness": 99})}
    )
    made = Recordings(offline, settings.out / ".polar" / "recordings").take(PolicyVersions(0))
    assert made.packing.batches
    assert objective(settings, made, kept.weights) > objective(settings, made, None)
    run, learned = asyncio.run(on_server(settings))
    assert (run.kind, run.step) == (RunKind.TRAINING, 3)
    assert run.latest["loss"] == lines[-1]["loss"]
    # Each step learned from one group, and what was in flight at the end was learned from by none.
    assert sorted(step for step in learned if step is not None) == [1, 2, 3]


async def on_server(settings: GrpoSettings) -> tuple[RunView, list[int | None]]:
    """What the run's own server shows of it, and the steps of its tasks."""
    async with Store.open(settings.out / ".polar") as store:
        tasks = await store.listing.tasks(run="run", limit=100)
        return await store.runs.get("run"), [task.step for task in tasks.tasks]
