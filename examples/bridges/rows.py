"""Writes tasks as rows of a trainer's dataset.

python examples/bridges/rows.py verl examples/bridges/tasks.yaml rows.parquet
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polar.bridges.sessions import task_row
from polar.models.task import TaskSpec
from polar.tasksets.files import load_tasks


def messages(task: TaskSpec) -> list[dict[str, str]]:
    """Return what the trainer shows as the prompt; the harness gets the task instead."""
    return [{"role": "user", "content": task.instruction}]


def verl(number: int, task: TaskSpec) -> dict[str, Any]:
    return {
        "data_source": "polar",
        "agent_name": "polar",
        "prompt": messages(task),
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": number, **task_row(task)},
    }


def slime(number: int, task: TaskSpec) -> dict[str, Any]:
    return {"prompt": task.instruction, "label": "", "metadata": task_row(task)}


def skyrl(number: int, task: TaskSpec) -> dict[str, Any]:
    return {"prompt": messages(task), "env_class": "polar", "data_source": "polar", **task_row(task)}


def areal(number: int, task: TaskSpec) -> dict[str, Any]:
    return {"messages": messages(task), **task_row(task)}


def nemo_gym(number: int, task: TaskSpec) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": messages(task), "temperature": 1.0},
        "agent_ref": {"type": "responses_api_agents", "name": "polar_agent"},
        "polar_task": task.model_dump(mode="json", exclude_defaults=True),
    }


FORMS: dict[str, Callable[[int, TaskSpec], dict[str, Any]]] = {
    form.__name__: form for form in (verl, slime, skyrl, areal, nemo_gym)
}


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=sorted(FORMS))
    parser.add_argument("tasks", type=Path, help="a file of tasks, or a taskset")
    parser.add_argument("out", type=Path, help="a .parquet or .jsonl file")
    given = parser.parse_args()
    form = FORMS[given.trainer]
    write([form(number, task) for number, task in enumerate(load_tasks(given.tasks))], given.out)


if __name__ == "__main__":
    main()
