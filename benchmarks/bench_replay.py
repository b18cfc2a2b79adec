"""Sessions of every harness on the example tasks, and which of their replays follow the recording.

The model is a teacher that knows the tasks' solutions and plays them with each harness's own shell tool; the
harnesses, their sandboxes and the tools are real. A replay has no engine. Sessions are replayed one after the
other, and Polar's time for a call is the CPU time of its process from the parsed request to the recorded
answer, so that it is Polar's own, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from polar_file_shell.puzzle import Call, as_script
from polar_file_shell.source import FileShell

from benchmarks.report import Row, at_most, report
from polar.dialects.base import Answer
from polar.gateway.call import ModelCall, Send
from polar.models.session import SessionResult
from polar.models.task import TaskSpec
from polar.tasksets import rows as tasksets
from tests.rollouts import MAX_CONTEXT
from tests.systems import System, system
from tests.teaching import AGENTS, Agent, Teacher

TASKS = 26
"""One of each family."""
MOST_MILLISECONDS = 5.0
LEAST_SHARE = 95.0


@dataclass(frozen=True)
class Exercise:
    """A task, and the commands that solve it."""

    task: dict[str, Any]
    commands: tuple[str, ...]


def exercises(count: int) -> Iterator[Exercise]:
    source = FileShell(FileShell.Options())
    for row in islice(source.rows(None, "train"), count):
        assert isinstance(row, tasksets.Row)
        assert row.task is not None
        calls = [Call(call["tool"], call["arguments"]) for call in row.columns["solutions"][-1]]
        # It looks around first, as agents do: what it sees then is what replays may differ in.
        commands = ("ls -la && date", *(as_script((call,)) for call in calls), "ls -la")
        yield Exercise({key: value for key, value in row.task.items() if key != "solution"}, commands)


async def measure(name: str, agent: Agent, count: int) -> list[Row]:
    given = list(exercises(count))
    commands = {one.task["instruction"]: one.commands for one in given}
    with tempfile.TemporaryDirectory() as directory:
        async with system(Path(directory), [], max_context=MAX_CONTEXT) as running:
            running.engine.script.append(Teacher(running.engine, agent, commands).answer)
            async with running.node():
                return await _rows(name, agent, given, running)


async def _rows(name: str, agent: Agent, given: list[Exercise], running: System) -> list[Row]:
    client = running.client
    harness = {"name": name, "options": dict(agent.options or {})}
    specs = [TaskSpec.model_validate({**one.task, "harness": harness}) for one in given]
    for spec in specs:
        await client.submit(spec)
    recorded = await client.wait([spec.id for spec in specs], timeout=1800)
    sampled = len(running.engine.requests)
    again: list[SessionResult] = []
    with cpu_seconds() as taken:
        for result in recorded:
            view = await client.replay(result.session_id)
            again += await client.wait([view.task_id], timeout=1800)
    assert len(running.engine.requests) == sampled, "a replay asked the engine"
    return [
        _share(name, recorded, again),
        at_most(
            f"{name}: Polar's CPU time for a replayed call",
            statistics.median(taken) * 1000,
            "ms",
            MOST_MILLISECONDS,
        ),
        Row(
            f"{name}: seconds of a replayed session (peer: recorded)",
            statistics.median(result.seconds.running for result in again),
            "s",
            statistics.median(result.seconds.running for result in recorded),
        ),
    ]


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """What this process computes during each model call, threads included."""
    taken: list[float] = []
    began: dict[ModelCall, float] = {}
    prepare, run = ModelCall.prepare, ModelCall.run

    async def prepared(call: ModelCall) -> None:
        began[call] = time.process_time()
        await prepare(call)

    async def ran(call: ModelCall, send: Send) -> Answer:
        answer = await run(call, send)
        taken.append(time.process_time() - began.pop(call))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelCall, "prepare", prepared)
        patch.setattr(ModelCall, "run", ran)
        yield taken


def _share(name: str, recorded: list[SessionResult], again: list[SessionResult]) -> Row:
    faithful = [result for result in again if result.replay is not None and result.replay.is_faithful]
    for result in again:
        for divergence in result.replay.divergences if result.replay else ():
            print(
                f"{result.session_id} diverged at call {divergence.call}:\n{divergence.difference}",
                file=sys.stderr,
            )
    share = 100 * len(faithful) / len(again)
    calls = sum(result.stats.completions for result in recorded)
    what = f"{name}: {len(again)} sessions with {calls} calls that replay to the end"
    return Row(what, share, "%", None, f"≥ {LEAST_SHARE:g}", share >= LEAST_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=TASKS, help="how many tasks of each harness")
    parser.add_argument(
        "--harness", action="append", choices=sorted(AGENTS), help="only this one; repeatable"
    )
    asked = parser.parse_args()
    names = asked.harness or list(AGENTS)
    rows: list[Row] = []
    for name in names:
        print(f"{name} …", file=sys.stderr)
        rows += asyncio.run(measure(name, AGENTS[name], asked.tasks))
    is_whole = asked.tasks == TASKS and asked.harness is None
    report("replay", rows, is_whole=is_whole)


if __name__ == "__main__":
    main()
