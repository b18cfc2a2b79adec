"""TRL's GRPOTrainer with everything real: agents, gateway, evaluator, engine, and weights back to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polar.bridges.trl import REWARD, Rollouts, reward
from polar.client import Client
from polar.tasksets.files import load_tasks
from polar.training.run import server_beside_trainer
from polar.training.settings import GrpoSettings, RolloutSettings
from tests.fakes.tiny_llama import write_tiny_llama
from tests.systems import ASK

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model")]

GRADE = r"""
letters=$(tr -cd 'a-z' < answer.txt | wc -c)
all=$(wc -c < answer.txt)
reward "$(awk "BEGIN { print $letters / ($all + 1) }")"
"""
SAMPLES, STEPS = 4, 2
TOLERANCE = 1e-3


def write_run(directory: Path) -> tuple[GrpoSettings, RolloutSettings]:
    """A system of the test's own for one small task."""
    model = write_tiny_llama(directory / "model", max_position_embeddings=1024)
    task = {
        "id": "say",
        "instruction": "Say something.",
        "harness": {"name": "shell", "options": {"command": ASK}},
        "runtime": "process",
        "evaluator": {"name": "command", "options": {"command": GRADE}},
        "sampling": {"max_tokens": 12},
    }
    (directory / "tasks.yaml").write_text(yaml.safe_dump([task]))
    own = {"engine": {"device": "cpu", "threads": 1}, "node": {"runtimes": ["process"]}}
    (directory / "polar.yaml").write_text(yaml.safe_dump(own))
    rollouts = RolloutSettings(
        tasks=(directory / "tasks.yaml",), config=directory / "polar.yaml", concurrency=SAMPLES
    )
    run = {"out": directory / "run", "steps": 1, "model": {"name": str(model)}, "rollouts": rollouts}
    return GrpoSettings.model_validate(run), rollouts


class Watched:
    """The bridge, and beside it what the trainer's model says of each batch before it learns from it."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.batches: list[dict[str, list[Any]]] = []
        self.differences: list[float] = []

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        batch = self.rollouts(prompts, trainer)
        self.batches.append(batch)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        for prompt, response, logprobs, mask in zip(*(batch[name] for name in names), strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
            difference = (own - torch.tensor(logprobs)).abs() * torch.tensor(mask)
            self.differences.append(float(difference.max()))
        return batch


def test_a_trainer_learns_from_sessions_and_its_weights_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, own = write_run(tmp_path)
    tasks = load_tasks(*own.tasks)
    with server_beside_trainer(settings, own, tasks, lambda _: None) as place:
        weights = settings.out / ".polar" / "weights"
        bridge = Watched(Rollouts(tasks, server=place.url, token=place.token, weights=weights))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                output_dir=str(tmp_path / "trl"),
                per_device_train_batch_size=SAMPLES,
                num_generations=SAMPLES,
                max_steps=STEPS,
                learning_rate=1e-2,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(bridge.rollouts.dataset()),
            processing_class=AutoTokenizer.from_pretrained(tmp_path / "model"),
            rollout_func=bridge,
            reward_funcs=reward,
        )
        trainer.train()
        with Client(place.url, place.token) as client:
            sessions = {view.session_id: view for view in client.results()}

    assert len(bridge.batches) == STEPS
    assert len(sessions) == SAMPLES * STEPS
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for number, batch in enumerate(bridge.batches):
        assert all(batch[REWARD][row] == sessions[id].reward for row, id in enumerate(batch["polar_session"]))
        # Weights are pushed before each batch: the first of them is version 1.
        versions = {sessions[id].policy_version_min for id in batch["polar_session"]}
        assert versions == {number + 1}
        assert sum(map(sum, batch["env_mask"])) == sum(
            sessions[id].stats.trainable_tokens for id in batch["polar_session"]
        )
    # The engine sampled each batch with the very weights that the trainer had before it learnt from it.
    assert max(bridge.differences) < TOLERANCE
    assert not bridge.rollouts.excluded
