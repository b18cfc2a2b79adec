"""A generated dataset trains the small model with TRL as it is, from messages and from tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_model
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.sft import CARD, Table, TaskSessions, card, write_dataset
from polar.trajectory.learnable import EndedSession
from tests.fakes.recordings import recording

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    made = recording("s1")
    groups = [TaskSessions(f"t{number}", "pi", {}, [EndedSession(made.result, made)]) for number in range(2)]
    written = write_dataset(groups, out, parse_acceptance("reward >= 1"))
    (out / CARD).write_text(card("generated", written, []))
    return out


def load(directory: Path, table: Table, tmp_path: Path) -> datasets.Dataset:
    return datasets.load_dataset(
        str(directory), table.value, split="train", cache_dir=str(tmp_path / "cache")
    )


def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "trained"),
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


@pytest.mark.parametrize("table", [Table.SFT, Table.TOKENS])
def test_one_sft_step_learns_from_it(directory: Path, tmp_path: Path, table: Table) -> None:
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=str(ensure_model(DEFAULT_MODEL)),
        args=SFTConfig(**options(tmp_path), max_length=256),
        train_dataset=load(directory, table, tmp_path),
    )
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    outcome = trainer.train()
    assert outcome.global_step == 1
    assert 0 < outcome.training_loss < 20
    assert any(not value.equal(before[name]) for name, value in trainer.model.named_parameters())
