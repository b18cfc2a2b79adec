"""The recipe for the published set-up can be started: its files are read as the commands read them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar.config import plugins
from polar.config.settings import load_settings
from polar.tasksets.files import load_tasks
from polar.training.settings import GrpoSettings, Pack, load_run

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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe with a table of SWE-Gym's columns, prepared as its page says."""
    place = tmp_path_factory.mktemp("published") / "recipe"
    shutil.copytree(PUBLISHED, place)
    spec = importlib.util.spec_from_file_location("published_prepare", place / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [ROW, {**ROW, "instance_id": "no__tests-1", "test_patch": ""}]
    pq.write_table(module.with_commands(pa.Table.from_pylist(rows)), place / "tasks" / "swe-gym.parquet")
    return place


@pytest.mark.parametrize("name", HARNESSES)
def test_a_run_is_the_published_one(recipe: Path, name: str) -> None:
    run = load_run(recipe / f"{name}.yaml", GrpoSettings)
    assert run.rollouts is not None
    assert (run.model.name, run.groups, run.rollouts.samples) == ("Qwen/Qwen3.5-4B", 4, 16)
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
