"""The rows that examples write are those that bridges read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from polar.bridges import nemo_gym
from polar.bridges.sessions import task_of
from polar.tasksets.files import load_tasks

EXAMPLES = Path(__file__).parents[3] / "examples" / "bridges"
TASKS = load_tasks(EXAMPLES / "tasks.yaml")


def rows_module() -> Any:
    spec = importlib.util.spec_from_file_location("rows", EXAMPLES / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = rows_module()


@pytest.mark.parametrize(
    ("trainer", "where"), [("verl", "extra_info"), ("slime", "metadata"), ("skyrl", None), ("areal", None)]
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_task_comes_back_out_of_a_trainers_row(
    trainer: str, where: str | None, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows{suffix}"
    ROWS.write([ROWS.FORMS[trainer](number, task) for number, task in enumerate(TASKS)], path)
    if suffix == ".parquet":
        found = pq.read_table(path).to_pylist()
    else:
        found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [task_of(row if where is None else row[where]) for row in found] == TASKS


def test_the_rows_of_nemo_gym_are_the_tasks() -> None:
    template = yaml.safe_load((EXAMPLES / "nemo_gym" / "template.yaml").read_text())
    lines = (EXAMPLES / "nemo_gym" / "rows.jsonl").read_text().splitlines()
    # What a row does not say itself is the template's.
    found = [nemo_gym.task_of(json.loads(line), template) for line in lines]
    assert [task.id for task in found] == [task.id for task in TASKS]
    assert [task.evaluator for task in found] == [task.evaluator for task in TASKS]


def test_a_row_without_a_task_is_its_input_in_the_template() -> None:
    config = yaml.safe_load((EXAMPLES / "nemo_gym" / "configs" / "polar_agent.yaml").read_text())
    agent = config["polar_agent"]["responses_api_agents"]["polar_agent"]
    parts = [{"type": "input_text", "text": "Be kind."}, {"type": "input_text", "text": "Say hello."}]
    body = {"responses_create_params": {"input": [{"role": "user", "content": parts}]}}
    task = nemo_gym.task_of(body, agent["template"])
    assert task.instruction == "Be kind.\n\nSay hello."
    assert task.harness.name == agent["template"]["harness"]["name"]
