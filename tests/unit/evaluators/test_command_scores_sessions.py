"""How the command evaluator reads a reward."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar import plugins
from polar.errors import InvalidInput
from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.command import CommandEvaluator, _parse
from polar.models.component import Component
from polar.models.session import TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.runtimes.base import Command, Sandbox, SandboxSpec
from polar.runtimes.process import ProcessRuntime

TASK = TaskSpec.model_validate({"id": "t", "instruction": "x", "harness": "shell", "evaluator": "command"})


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    spec = SandboxSpec("s1", tmp_path / "s1", "127.0.0.1", 9)
    started = await ProcessRuntime(ProcessRuntime.Options()).start(spec)
    yield started
    await started.stop()


async def evaluate(sandbox: Sandbox, *, timeout: float = 20.0, **options: Any) -> Verdict:
    evaluator = CommandEvaluator(CommandEvaluator.Options.model_validate(options))
    return await evaluator.evaluate(EvaluationContext(TASK, sandbox, TrajectoryStats(), timeout))


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("true", 1.0),
        ("exit 3", 0.0),
        ("kill -9 $$", 0.0),
        ("echo noise; echo 0.25; echo", 0.25),
        ("echo -1e-1", -0.1),
        ("echo all good", 1.0),
        ("echo 5; exit 1", 0.0),
        ("""echo '{"reward": 0.5}'; exit 1""", 0.5),
        ("""echo '{"score": 0.5}'""", 1.0),
    ],
)
async def test_auto_takes_json_then_number_then_exit_code(
    sandbox: Sandbox, script: str, reward: float
) -> None:
    assert (await evaluate(sandbox, command=script)).reward == reward


@pytest.mark.parametrize(("script", "reward"), [("echo 0.25", 1.0), ("echo 1; exit 9", 0.0)])
async def test_exit_code_alone_ignores_the_output(sandbox: Sandbox, script: str, reward: float) -> None:
    assert (await evaluate(sandbox, command=script, reward="exit_code")).reward == reward


async def test_last_line_gives_components(sandbox: Sandbox) -> None:
    line = json.dumps({"reward": 2, "components": {"style": 0.5, "tests": 1}})
    verdict = await evaluate(sandbox, command=["echo", line], reward="last_line")
    assert (verdict.reward, verdict.components) == (2.0, {"style": 0.5, "tests": 1.0})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fine",
        "nan",
        "-inf",
        "1e999",
        "1_0",
        "0x10",
        "{}",
        '{"reward": null}',
        '{"reward": true}',
        '{"reward": "1"}',
        '{"reward": NaN}',
        '{"reward": 1e999}',
        '{"reward": 1' + "0" * 400 + "}",
        '{"reward": 1, "components": [1]}',
        '{"reward": 1, "components": {"a": "b"}}',
        "[" * 100_000,
    ],
)
async def test_last_line_without_a_reward_is_a_failed_evaluation(sandbox: Sandbox, line: str) -> None:
    await sandbox.upload(PurePosixPath("line"), line.encode())
    with pytest.raises(EvaluationFailed):
        await evaluate(sandbox, command="cat line", reward="last_line")


@pytest.mark.parametrize("script", ["echo nan", """echo '{"reward": NaN}'"""])
async def test_auto_never_yields_what_is_not_finite(sandbox: Sandbox, script: str) -> None:
    with pytest.raises(EvaluationFailed):
        await evaluate(sandbox, command=script)


async def test_timeout_is_a_failed_evaluation(sandbox: Sandbox) -> None:
    with pytest.raises(EvaluationFailed, match=r"did not end within 0\.2 s"):
        await evaluate(sandbox, command="sleep 60", timeout=0.2)


async def test_files_are_put_over_what_the_agent_left(sandbox: Sandbox) -> None:
    await sandbox.upload(PurePosixPath("tests/check.sh"), b"exit 0")
    files = {"tests/check.sh": {"text": "echo checked >&2; exit 4", "executable": True}}
    verdict = await evaluate(sandbox, command="sh tests/check.sh", files=files)
    assert verdict.reward == 0.0
    assert verdict.report == "exit code 4\n--- stderr\nchecked"


async def test_agent_that_blocks_the_evaluators_files_gets_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec(Command(("ln", "-s", str(tmp_path), "tests")), timeout=20, log_name="agent")
    verdict = await evaluate(sandbox, command="true", files={"tests/check.sh": {"text": "exit 0"}})
    assert verdict.reward == 0.0
    assert "tests/check.sh" in verdict.report
    assert not (tmp_path / "check.sh").exists()


async def test_report_keeps_the_end_of_a_long_output(sandbox: Sandbox) -> None:
    verdict = await evaluate(sandbox, command="yes | head -c 1000000; echo; echo 0.5")
    assert verdict.reward == 0.5
    assert verdict.report.endswith("0.5")
    assert len(verdict.report) < 64 * 1024


@pytest.mark.parametrize("reward", ["auto", "last_line"])
async def test_a_verdict_that_output_has_pushed_out_is_a_failed_evaluation(
    tmp_path: Path, reward: str
) -> None:
    """By its exit code alone the agent would have earned it all, for printing much."""
    spec = SandboxSpec("s1", tmp_path / "s1", "127.0.0.1", 9)
    sandbox = await ProcessRuntime(ProcessRuntime.Options(output_limit=4096)).start(spec)
    try:
        flooded = "yes | head -c 5000; echo; echo 0.25"
        with pytest.raises(EvaluationFailed, match="more than is kept"):
            await evaluate(sandbox, command=flooded, reward=reward)
        assert (await evaluate(sandbox, command=flooded, reward="exit_code")).reward == 1.0
    finally:
        await sandbox.stop()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_is_read_back(number: float) -> None:
    for line in (repr(number), json.dumps({"reward": number})):
        assert _parse(line) == (number, {})


@given(st.text())
def test_no_line_gives_a_reward_that_is_not_finite(line: str) -> None:
    try:
        reward, _ = _parse(line)
    except EvaluationFailed:
        return
    assert math.isfinite(reward)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "command"),
        ({"command": ""}, "command"),
        ({"command": "true", "files": {"../x": {"text": ""}}}, "files"),
        ({"command": "true", "reward": "best"}, "reward"),
        ({"command": "true", "rewards": 1}, "rewards"),
    ],
)
def test_bad_options_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"evaluator\.options\.{field}"):
        plugins.create("evaluators", "evaluator", Component(name="command", options=options))
