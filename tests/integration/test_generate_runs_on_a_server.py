"""A generation on a server: failures are tried again, an interrupt keeps what there is, text is enough."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from polar.app.datagen import DatasetGeneration, plan
from polar.client import AsyncClient, Client
from polar.models.session import SessionStatus
from polar.models.task import Run, RunKind, SamplingPin, TaskSpec
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.sft import Table
from polar.trajectory.learnable import EndedSession
from tests.fakes.answering_engine import AnsweringEngine, answering_engine
from tests.fakes.hub import TOKEN as TOKEN_OF_HUB
from tests.fakes.hub import hugging_face_hub
from tests.systems import ASK, TOKEN, System, shell_task, system

ACCEPT = parse_acceptance("reward >= 1")


async def generated(
    running: System, tasks: Sequence[TaskSpec], *, retries: int
) -> tuple[DatasetGeneration, dict[str, list[EndedSession]]]:
    generation = DatasetGeneration(plan(tasks), ACCEPT, retries, 4, Run(name="data", kind=RunKind.GENERATION))
    async with asyncio.timeout(60):
        await generation.run(running.client)

    def read() -> dict[str, list[EndedSession]]:
        with Client(running.server.url, TOKEN) as client:
            return {each.task: list(each.attempts) for each in generation.sessions(client)}

    return generation, await asyncio.to_thread(read)


def failing(id: str, marks: Path, times: int, **changes: Any) -> TaskSpec:
    """A task whose sessions cannot be prepared the first few times."""
    count = f'test "$(ls {marks} | wc -l)" -ge {times} || {{ mktemp {marks}/XXXXXX; exit 1; }}'
    return shell_task(id, ASK, prepare=({"exec": count},), **changes)


async def test_a_failed_session_is_tried_again_as_the_same_sample(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    async with system(tmp_path / "data", ["Hello."]) as running, running.node():
        task = failing("flaky", marks, 2, samples=2, sampling=SamplingPin(seed=40))
        generation, groups = await generated(running, [task, shell_task("sound", ASK)], retries=2)
    tally = generation.tally
    assert (tally.ended, tally.accepted, tally.failed, tally.retried) == (3, 3, 0, 2)
    assert [(one.result.status, one.result.sample) for one in groups["flaky"]] == [
        (SessionStatus.COMPLETED, 0),
        (SessionStatus.COMPLETED, 1),
    ]
    assert all("-retry" in one.result.session_id for one in groups["flaky"])
    seeds = [one.recording.completions[0].used.seed for one in groups["flaky"] if one.recording]
    assert len(set(seeds)) == 2, "each sample keeps a seed of its own"


async def test_what_always_fails_is_given_up_and_the_rest_is_there(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    async with system(tmp_path / "data", ["Hello."]) as running, running.node():
        tasks = [failing("broken", marks, 100), shell_task("sound", ASK)]
        generation, groups = await generated(running, tasks, retries=1)
        again, same = await generated(running, tasks, retries=1)
    assert (generation.tally.failed, generation.tally.retried, len(list(marks.iterdir()))) == (1, 1, 2)
    assert groups["broken"][0].result.status is SessionStatus.FAILED
    assert groups["sound"][0].result.status is SessionStatus.COMPLETED
    assert again.tally.found == 2, "nothing is run a second time"
    assert [one.result for one in same["broken"]] == [one.result for one in groups["broken"]]


async def start(
    engine: AnsweringEngine, directory: Path, tasks: list[dict[str, Any]], *more: str, **environment: str
) -> Any:
    path = directory / "tasks.yaml"
    defaults = {
        "runtime": "process",
        "evaluator": {"name": "command", "options": {"command": "test -s answer.txt"}},
    }
    path.write_text(yaml.safe_dump({"defaults": defaults, "tasks": tasks}))
    settings = directory / "polar.yaml"
    settings.write_text("node: {runtimes: [process]}")
    options = ["-t", str(path), "--out", str(directory / "out"), "--config", str(settings)]
    options += ["--engine-url", engine.url, *more]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "polar", "generate", *options),
        stdout=pipe,
        stderr=pipe,
        env={**os.environ, **environment},
    )


def task(id: str, command: str) -> dict[str, Any]:
    return {"id": id, "instruction": id, "harness": {"name": "shell", "options": {"command": command}}}


async def test_an_engine_of_text_only_gives_a_dataset_of_messages(tmp_path: Path) -> None:
    async with answering_engine() as engine:
        options = ("--engine-kind", "openai", "--model", "gpt", "--json")
        process = await start(engine, tmp_path, [task("a", ASK), task("b", ASK)], *options)
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, stderr.decode()
    assert json.loads(stdout)["rows"] == {"sft": 2, "tokens": 0, "rejected": 0, "preference": 0}
    rows = pq.read_table(tmp_path / "out" / Table.SFT.file).to_pylist()
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["user", "assistant"]] * 2
    assert {row["model"] for row in rows} == {"gpt"}


async def test_a_dataset_goes_to_the_hub_once_it_is_written(tmp_path: Path) -> None:
    async with answering_engine() as engine, hugging_face_hub() as hub:

        async def generate(token: str) -> tuple[int, str, str]:
            options = ("--engine-mode", "chat", "--push-to-hub", "me/data", "--private", "--json")
            place = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "hf")}
            process = await start(engine, tmp_path, [task("a", ASK)], *options, **place)
            stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
            return process.returncode, stdout.decode(), stderr.decode()

        code, out, said = await generate("hf_wrong")
        assert (code, json.loads(out)["rows"]["sft"]) == (1, 1), said
        assert "the hub rejected the token; the dataset is in" in said.splitlines()[-1]
        asked = engine.questions.copy()
        code, _, said = await generate(TOKEN_OF_HUB)
        assert code == 0, said
        assert said.splitlines()[-1] == f"• pushed to {hub.url}/datasets/me/data"
        code, _, said = await generate(TOKEN_OF_HUB)
        assert said.splitlines()[-1] == f"• {hub.url}/datasets/me/data is up to date"
    stored = hub.repositories["me/data"]
    assert stored.private
    assert stored.commits[1:] == [["README.md", *(table.file for table in Table)]]
    card = stored.files["README.md"].decode()
    assert "--accept 'reward >= 1' --push-to-hub me/data\n" in card
    assert "a" in asked
    assert "a" not in engine.questions[len(asked) :], "nothing is run again"


async def address(process: asyncio.subprocess.Process) -> str:
    """Where the system that the process started for itself listens, once it does."""
    assert process.stderr is not None
    async for line in process.stderr:
        if line.startswith("• running at ".encode()):
            return line.decode().split()[-1]
    raise AssertionError("it ended before it ran")


async def first_result(url: str, data: Path) -> None:
    async with AsyncClient(url, (data / "token").read_text().strip()) as client:
        async for _ in client.results(follow=True):
            return


async def test_an_interrupt_writes_what_there_is(tmp_path: Path) -> None:
    async with answering_engine() as engine:
        tasks = [task("quick", ASK), task("slow", "sleep 300")]
        process = await start(engine, tmp_path, tasks, "--engine-mode", "chat")
        async with asyncio.timeout(60):
            await first_result(await address(process), tmp_path / "out" / ".polar")
        process.send_signal(signal.SIGINT)
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 128 + signal.SIGINT, stderr.decode()
    assert (
        "the dataset contains the sessions that have ended; run the same command to continue"
        in stderr.decode()
    )
    rows = pq.read_table(tmp_path / "out" / Table.SFT.file).to_pylist()
    assert [row["task"] for row in rows] == ["quick"]
    assert (tmp_path / "out" / "README.md").exists()


async def test_two_generations_do_not_write_the_same_directory(tmp_path: Path) -> None:
    async with answering_engine() as engine:
        tasks = [task("slow", "sleep 300")]
        first = await start(engine, tmp_path, tasks, "--engine-mode", "chat")
        await asyncio.wait_for(address(first), 60)
        second = await start(engine, tmp_path, tasks, "--engine-mode", "chat")
        _, stderr = await asyncio.wait_for(second.communicate(), 60)
        first.kill()
        await first.wait()
    assert second.returncode == 1
    assert b"another `polar generate` is writing there" in stderr
