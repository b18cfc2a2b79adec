"""The quickstart's checks give nothing for nothing, all for what the instruction asks, and part between."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from polar.models.task import TaskSpec
from polar.tasksets.files import load_tasks

TASKS = load_tasks(Path(__file__).parents[3] / "examples" / "quickstart")
PARTLY = {
    "hello-file": "echo other > hello.txt",
    "make-directory": "touch photos",
    "lucky-number": "echo 13 > lucky.txt",
    "copy-file": "touch backup.txt",
    "append-line": "echo done > log.txt",
}
WHOLLY = {
    "hello-file": "echo hello > hello.txt",
    "make-directory": "mkdir photos",
    "lucky-number": "echo 7 > lucky.txt",
    "copy-file": "cp notes.txt backup.txt",
    "append-line": "echo done >> log.txt",
}


def reward_after(task: TaskSpec, command: str, workspace: Path) -> float:
    for name, file in task.files.items():
        (workspace / name).write_bytes(file.data)
    subprocess.run(["/bin/sh", "-c", command], cwd=workspace, check=True)
    check = task.evaluator.options["command"]
    assert isinstance(check, str)
    check = f'reward() {{ printf "%s\\n" "$1"; }}\n{check}'
    run = subprocess.run(["/bin/sh", "-c", check], cwd=workspace, check=True, capture_output=True, text=True)
    verdict = json.loads(run.stdout.splitlines()[-1])
    assert verdict["reward"] == pytest.approx(sum(verdict["components"].values()))
    return float(verdict["reward"])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_rewards_are_graded(task: TaskSpec, tmp_path: Path) -> None:
    for name in ("idle", "partly", "done"):
        (tmp_path / name).mkdir()
    assert reward_after(task, "true", tmp_path / "idle") == 0.0
    assert 0.0 < reward_after(task, PARTLY[task.id], tmp_path / "partly") < 1.0
    assert reward_after(task, WHOLLY[task.id], tmp_path / "done") == 1.0
