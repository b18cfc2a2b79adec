"""`polar generate` as a process: killed at any point it goes on, and the dataset is the same in the end."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from polar.tasksets.sft import Table
from tests.fakes.answering_engine import AnsweringEngine, answering_engine
from tests.systems import ASK, allow_processes

TASKS = 6
SAMPLES = 2
KILLS = 10
MOMENTS: list[str | int] = ["preparing harness", "rollout server", "gateway", "running at", 1, 1, 1, 2, 2, 3]
END = f"{TASKS * SAMPLES}/{TASKS * SAMPLES} sessions"
"""Printed when every session has ended and nothing is written yet."""


def taskset(directory: Path, command: str = ASK) -> Path:
    """Questions in a JSONL file, one of whose lines is broken, and their description."""
    lines = [json.dumps({"question": f"Is {number} even?"}) for number in range(TASKS)]
    (directory / "questions.jsonl").write_text("\n".join([*lines, '{"question": ']) + "\n")
    description = {
        "source": "questions.jsonl",
        "template": {"id": "even-{{ number }}", "instruction": "{{ question }}"},
        "defaults": {
            "harness": {"name": "shell", "options": {"command": command}},
            "runtime": "process",
            "evaluator": {"name": "command", "options": {"command": "grep -q yes answer.txt"}},
        },
    }
    path = directory / "taskset.yaml"
    path.write_text(yaml.safe_dump(description))
    return path


async def start(engine: AnsweringEngine, path: Path, out: Path, *more: str) -> asyncio.subprocess.Process:
    options = ["--samples", str(SAMPLES), "--seed", "11", "--concurrency", "4", "--out", str(out), *more]
    options += ["--engine-url", engine.url, "--engine-mode", "chat", "--json"]
    options += ["--config", str(allow_processes(path.parent))]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polar", "generate", "-t", str(path), *options, stdout=pipe, stderr=pipe
    )


async def finished(process: asyncio.subprocess.Process) -> tuple[dict[str, Any], str]:
    stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, stderr.decode()
    return json.loads(stdout), stderr.decode()


def asked(engine: AnsweringEngine) -> list[str]:
    """What agents asked; the engine is probed besides."""
    return [question for question in engine.questions if question.startswith("Is ")]


def content(out: Path) -> dict[str, list[str]]:
    """All rows of all tables, in no order."""
    return {
        table: sorted(json.dumps(row, sort_keys=True) for row in pq.read_table(out / table.file).to_pylist())
        for table in Table
    }


async def reached(process: asyncio.subprocess.Process, engine: AnsweringEngine, moment: str | int) -> None:
    """Wait for a line that the process prints, or for so many questions of its agents."""
    assert process.stderr is not None
    before = len(asked(engine))
    async for line in process.stderr:
        if (moment if isinstance(moment, str) else "running at") in line.decode():
            break
    while isinstance(moment, int) and len(asked(engine)) < before + moment:
        engine.arrived.clear()
        await engine.arrived.wait()


async def is_killed(process: asyncio.subprocess.Process, engine: AnsweringEngine, moment: str | int) -> bool:
    """Kill the process at a moment; False: it had ended before."""
    waiting = asyncio.ensure_future(reached(process, engine, moment))
    ending = asyncio.ensure_future(process.wait())
    await asyncio.wait({waiting, ending}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    ended_before = process.returncode is not None
    if not ended_before:
        process.kill()
    waiting.cancel()
    await asyncio.wait({waiting, ending})
    return not ended_before


async def test_ten_kills_leave_the_same_dataset_as_none(tmp_path: Path) -> None:
    path = taskset(tmp_path)
    choice = random.Random(5)
    async with answering_engine() as engine:
        whole, said = await finished(await start(engine, path, tmp_path / "whole"))
        assert "questions.jsonl:7:13: not JSON" in said
        assert sum(whole["sessions"].values()) == TASKS * SAMPLES
        assert len(asked(engine)) == TASKS * SAMPLES

        kills = 0
        while kills < KILLS:
            moment = END if kills == KILLS - 1 else choice.choice(MOMENTS)
            if await is_killed(await start(engine, path, tmp_path / "killed"), engine, moment):
                kills += 1
            else:
                shutil.rmtree(tmp_path / "killed")
        again, _ = await finished(await start(engine, path, tmp_path / "killed"))
        assert again["sessions"] == whole["sessions"]
        assert content(tmp_path / "killed") == content(tmp_path / "whole")

        done = len(asked(engine))
        _, said = await finished(await start(engine, path, tmp_path / "killed"))
        assert END in said
        assert len(asked(engine)) == done, "what has ended is not run again"
        assert content(tmp_path / "killed") == content(tmp_path / "whole")
