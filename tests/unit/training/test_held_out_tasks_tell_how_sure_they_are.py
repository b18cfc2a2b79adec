"""Held-out success comes with its interval, and with which tasks were passed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from polar.models.task import TaskSpec
from polar.training.rollouts import HeldOut
from polar.training.settings import GrpoSettings, HeldOutSettings
from tests.fakes.rollout_client import RolloutClient
from tests.systems import shell_task

TASKS = [shell_task(f"t{number}", "true") for number in range(4)]


def held_out(connect: Callable[[], RolloutClient], tasks: Sequence[TaskSpec], out: Path) -> HeldOut:
    asked = HeldOutSettings(tasks=(out,), samples=2)
    run = GrpoSettings(out=out, steps=9, recordings=out)
    return HeldOut(asked, cast(Any, connect), tasks, run)


def test_each_time_is_an_interval_over_tasks_and_a_line(tmp_path: Path) -> None:
    client = RolloutClient()
    client.equal = {"-t0", "-t1"}
    told = tmp_path / "held-out.jsonl"
    tried = held_out(lambda: client, TASKS, tmp_path)
    before = tried(0, False)
    # Of the scripted server's two sessions the second fails, but for those rewarded alike.
    assert before["held_out_success"] == before["held_out_reward"] == 0.75
    assert 0.5 <= before["held_out_low"] < 0.75 < before["held_out_high"] <= 1.0
    client.equal |= {"-t2", "-t3"}
    assert tried(9, False) == {}
    after = tried(10, False)
    assert after["held_out_success"] == after["held_out_high"] == 1.0
    assert client.cursors == [0, 2 * len(TASKS)], "each time reads what came since it began"
    assert [json.loads(line) for line in told.read_text().splitlines()] == [
        {"step": 0, "passed": {"t0": 1.0, "t1": 1.0, "t2": 0.5, "t3": 0.5}},
        {"step": 10, "passed": dict.fromkeys(("t0", "t1", "t2", "t3"), 1.0)},
    ]
    assert all(TaskSpec.model_validate(task.model_dump()).priority == 100 for task in client.submitted)


def test_one_task_has_no_interval(tmp_path: Path) -> None:
    assert held_out(RolloutClient, TASKS[:1], tmp_path)(9, True).keys() == {
        "held_out_reward",
        "held_out_success",
    }


def test_nothing_held_out_is_nothing_told(tmp_path: Path) -> None:
    assert held_out(RolloutClient, [], tmp_path)(0, False) == {}
    assert not (tmp_path / "held-out.jsonl").exists()
