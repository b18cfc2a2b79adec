"""The recipe for the published set-up can be started: its files are read as the commands read them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar.config import plugins
from polar.config.settings import load_settings
from polar.tasksets.files import load_tasks
from polar.training.settings import GrpoSettings, Pack, load_run
from tests.fakes.reports import cell, report

PUBLISHED = Path(__file__).parents[3] / "examples" / "published"
HARNESSES = {"codex": "codex", "claude-code": "claude_code", "qwen-code": "qwen_code", "pi": "pi"}
TEST_PATCH = """diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1 +1,2 @@
 import core
+assert core
"""
ROW = {
    "instance_id": "getmoto__moto-5752",
    "repo": "getmoto/moto",
    "version": "4.0",
    "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
    "problem_statement": "describe_parameters depends on filter order",
    "patch": "",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": ["tests/test_core.py::test_it"],
    "PASS_TO_PASS": [],
}


STANDIN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
case "$(basename "$0") $1" in
    "polar train") until grep -q "^polar serve" "$LOG"; do sleep 0.05; done; exit 3 ;;
    "polar node" | "curl "*) exit 0 ;;
    "vllm serve") until [ "$(grep -c "^vllm" "$LOG")" -ge 2 ]; do sleep 0.05; done; exit 1 ;;
esac
exec sleep 600
"""
"""For the programs that a part starts: training fails with 3, and an engine ends once there are two."""


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_prepare", PUBLISHED / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, prepare: ModuleType) -> Path:
    """The recipe with a table of SWE-Gym's columns, prepared as its page says."""
    place = tmp_path_factory.mktemp("published") / "recipe"
    shutil.copytree(PUBLISHED, place)
    rows = [ROW, {**ROW, "instance_id": "no__tests-1", "test_patch": ""}]
    pq.write_table(pa.Table.from_pylist([ROW]), place / "tasks" / "verified.parquet")
    pq.write_table(prepare.with_commands(pa.Table.from_pylist(rows)), place / "tasks" / "swe-gym.parquet")
    return place


@pytest.mark.parametrize("name", HARNESSES)
def test_a_run_is_the_published_one(recipe: Path, name: str) -> None:
    run = load_run(recipe / f"{name}.yaml", GrpoSettings)
    assert run.rollouts is not None
    assert (run.model.name, run.groups, run.rollouts.samples) == ("Qwen/Qwen3.5-4B", 4, 16)
    assert run.model.precision == "bfloat16"
    assert (run.optimizer.lr, run.objective.max_importance, run.batch.pack) == (1e-6, 2.0, Pack.ALONE)
    (task,) = load_tasks(*run.rollouts.tasks)
    assert (task.harness.name, task.builder.name) == (HARNESSES[name], "prefix_merging")
    assert task.runtime.options["image"] == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752"
    assert task.budgets.max_context_tokens is not None
    assert task.budgets.max_context_tokens <= run.batch.tokens
    for kind, singular in (("harnesses", "harness"), ("runtimes", "runtime"), ("evaluators", "evaluator")):
        plugins.create(kind, singular, getattr(task, singular))
    row = task.evaluator.options["row"]
    assert isinstance(row, dict)
    assert str(row["test_cmd"]).endswith("tests/test_core.py")


def test_the_system_that_rolls_out_takes_what_the_runs_send(recipe: Path) -> None:
    system = load_settings(recipe / "polar.yaml", {})
    run = load_run(recipe / "codex.yaml", GrpoSettings)
    assert run.rollouts is not None
    assert system.engine.model == run.model.name
    assert run.rollouts.weights in system.node.weight_roots
    assert "docker" in system.node.runtimes


def test_verified_is_evaluated_in_its_own_images(recipe: Path) -> None:
    (task,) = load_tasks(recipe / "tasks" / "verified.yaml")
    assert task.evaluator.name == "swebench"
    assert task.runtime.options["image"] == "swebench/sweb.eval.x86_64.getmoto_1776_moto-5752"


def test_tasks_are_chosen_that_are_sometimes_passed(prepare: ModuleType) -> None:
    made = report(cell({"always": [1.0, 1.0], "never": [0.0, None], "sometimes": [1.0, 0.0]}))
    assert prepare.sometimes_passed(made) == {"sometimes"}


@pytest.mark.parametrize(
    ("rank", "code", "started"),
    [
        (
            0,
            3,
            {
                "polar serve --no-node --host 0.0.0.0 --insecure --port 8700 --data-dir DATA",
                "polar train pi.yaml --processes 2",
            },
        ),
        (
            1,
            1,
            {
                f"vllm serve Qwen/Qwen3.5-4B --host 0.0.0.0 --port {port} --max-model-len 40960"
                " --logprobs-mode processed_logprobs --enable-prefix-caching --language-model-only"
                for port in (8000, 8001)
            },
        ),
        (
            2,
            0,
            {
                "polar node --config PUBLISHED/polar.yaml --server http://a:8700 --name node-2"
                " --data-dir DATA --engine-url http://b:8000 --engine-url http://b:8001"
            },
        ),
    ],
)
def test_each_machine_starts_its_part_and_ends_it(
    tmp_path: Path, rank: int, code: int, started: set[str]
) -> None:
    for name in ("polar", "vllm", "curl"):
        (tmp_path / name).write_text(STANDIN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "token").write_text("secret")
    log, data = tmp_path / "log", tmp_path / "data"
    log.touch()
    variables = {"RANK": rank, "HOSTS": "a b c", "GPUS": 2, "SHARED": tmp_path, "DATA": data, "LOG": log}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", str(PUBLISHED / "start.sh"), "pi.yaml"],
        env={**path, **{name: str(value) for name, value in variables.items()}},
        timeout=60,
        check=False,
    )
    found = {line for line in log.read_text().splitlines() if not line.startswith("curl")}
    expected = {line.replace("DATA", str(data)).replace("PUBLISHED", str(PUBLISHED)) for line in started}
    assert (ended.returncode, found) == (code, expected)
    if rank == 0:
        assert (data / "token").read_text() == "secret"
