"""Tasks of examples/swe-mini through the whole system: server, node, sandboxes, gateway."""

from __future__ import annotations

import io
import json
import shlex
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from polar.evaluators.harbor_task import read_harbor_task
from polar.models.session import SessionStatus
from polar.models.task import TaskSpec
from tests.systems import ASK, system

SWE_MINI = Path(__file__).parents[2] / "examples" / "swe-mini"
ROW: dict[str, Any] = json.loads((SWE_MINI / "swe-mini.jsonl").read_text().splitlines()[0])


def agent(script: str) -> dict[str, Any]:
    """An agent that makes one model call and then runs a script."""
    ask = ASK.replace(sys.executable, "python3", 1)
    return {"name": "shell", "options": {"command": f"{ask}\n{script}"}}


REPAIR = f"printf %s {shlex.quote(ROW['patch'])} | git apply -"


@pytest.mark.sandbox
async def test_repairs_are_scored_in_fresh_sandboxes_on_a_node(tmp_path: Path) -> None:
    swebench = {"name": "swebench", "options": {"row": ROW}, "gate": True}
    both = {"evaluators": [swebench, {"name": "session_completed", "weight": 0.5}]}
    fields = {
        "instruction": ROW["problem_statement"],
        "files": {path: {"text": text} for path, text in ROW["files"].items()},
        "evaluator": {"name": "weighted", "options": both},
    }
    harbor = read_harbor_task(SWE_MINI / "harbor" / ROW["instance_id"]).fields()
    tasks = [
        {"id": "repaired", "harness": agent(REPAIR), **fields},
        {"id": "untouched", "harness": agent("true"), **fields},
        {"id": "harbor", "harness": agent(REPAIR), **harbor},
    ]
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        for task in tasks:
            await running.client.submit(TaskSpec.model_validate(task))
        async with running.node():
            results = await running.client.wait([str(task["id"]) for task in tasks], timeout=120)
        by_task = {result.task_id: result for result in results}
        assert {result.status for result in results} == {SessionStatus.COMPLETED}, results
        assert {name: result.reward for name, result in by_task.items()} == {
            "repaired": 1.5,
            "untouched": 0.0,
            "harbor": 1.0,
        }
        archive = await running.client.artifacts(by_task["repaired"].session_id)
    with zipfile.ZipFile(io.BytesIO(archive)) as kept:
        assert kept.read("evaluation/patch.diff").startswith(b"diff --git a/")
