"""A task of every public taskset through a real Pi: the right answer is worth 1, a wrong one 0."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_tokenizer
from tests.listening import listening

EXAMPLES = Path(__file__).parents[2] / "examples"
CHOSEN = {
    "humaneval": "task_id == 'HumanEval/0'",
    "repairs": "package == 'xmltodict==0.14.2'",
    "agentbench_os": "id == 40",
}
"""A format, and which of its tasks is run."""
WRONG: Mapping[str, Any] = {"tool": "bash", "arguments": {"command": "echo 7 | tee answer.txt"}}


def teacher_module() -> Any:
    spec = importlib.util.spec_from_file_location("teacher_of_pi", EXAMPLES / "grpo-pi" / "teacher.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def engine(tasksets: list[Path], *, is_right: bool) -> AsyncIterator[str]:
    """The address of one that plays what solves the tasks, or what does not."""
    module = teacher_module()
    rows = [dict(row) for taskset in tasksets for row in module.rows(taskset)]
    if not is_right:
        rows = [{**row, "solutions": [[WRONG]]} for row in rows]
    tokenizer = Tokenizer.from_file(str(ensure_tokenizer(DEFAULT_MODEL) / "tokenizer.json"))
    server = module.TeacherServer(module.Teacher(rows), tokenizer, DEFAULT_MODEL)
    async with listening(server.app()) as url:
        yield url


@pytest.mark.sandbox
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("is_right", "reward"), [(True, 1.0), (False, 0.0)], ids=["right", "wrong"])
async def test_only_the_right_answer_is_rewarded(is_right: bool, reward: float, tmp_path: Path) -> None:
    tasksets = []
    for format, wanted in CHOSEN.items():
        taskset = tmp_path / f"{format}.yaml"
        taskset.write_text(f"format: {format}\nfilter: {wanted}\nlimit: 1\ndefaults: {{harness: pi}}\n")
        tasksets.append(taskset)
    async with engine(tasksets, is_right=is_right) as url:
        asked = f"generate --engine-url {url} --engine-mode tokens --model {DEFAULT_MODEL} --seed 1".split()
        asked += [word for taskset in tasksets for word in ("--taskset", str(taskset))]
        generate = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polar", *asked, "--accept", "reward >= 0", "--out", "data"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await generate.communicate()
    assert generate.returncode == 0, said.decode()
    rows = pq.read_table(tmp_path / "data" / "tokens.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [reward] * len(CHOSEN), said.decode()
    assert all(row["completions"] >= 2 for row in rows)
