"""TRL's own trainer takes a step on any group, with the advantages that its sessions have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polar.bridges.sessions import ScoredSession
from polar.bridges.trl import columns, reward
from tests.fakes.tiny_llama import write_tiny_llama


def test_a_group_has_the_advantages_of_its_sessions(tmp_path: Path, group: list[ScoredSession]) -> None:
    """Of rewards 1, 0 (two traces), none (failed) and 0 (no trace): the mean is 1/3, of three sessions."""
    directory = write_tiny_llama(tmp_path / "model")

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        return columns([session.with_one_trace() for session in group], filler=0)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=len(group),
            num_generations=len(group),
            max_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "task"}]),
        processing_class=AutoTokenizer.from_pretrained(directory),
        rollout_func=roll_out,
        reward_funcs=reward,
    )
    made = trainer.train()
    spread = (1 / 3) ** 0.5
    expected = [2 / 3 / spread, -1 / 3 / spread, 0.0, -1 / 3 / spread]
    assert list(trainer._logs["advantages"]) == pytest.approx(expected, abs=1e-3)
    assert torch.isfinite(torch.tensor(made.training_loss))
