"""How the command evaluator reads a reward."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config import plugins
from polar.errors import InvalidInput
from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.command import CommandEvaluator, parse_reward
from polar.models.component import Component
from polar.models.session import TrajectoryStats, Verdict
from polar.models.task import TaskSpec
from polar.runtimes.base import Host, Sandbox, SandboxSpec
from polar.runtimes.process import ProcessRuntime
from tests.evaluations import agent_does, evaluation, make_task
from tests.evaluations import evaluate as judge

TASK = TaskSpec.model_validate({"id": "t", "instruction": "x", "harness": "shell", "evaluator": "command"})


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    spec = SandboxSpec("s1", "127.0.0.1", 9)
    started = await ProcessRuntime(ProcessRuntime.Options()).start(spec, Host(tmp_path))
    yield started
    await started.stop()


async def evaluate(sandbox: Sandbox, *, timeout: float = 20.0, **options: Any) -> Verdict:
    options = {"sandbox": "live", **options}
    evaluator = CommandEvaluator(CommandEvaluator.Options.model_validate(options))
    return await evaluator.evaluate(
        EvaluationContext(TASK, sandbox, TrajectoryStats(), timeout, sandbox_maker=untouched)
    )


@asynccontextmanager
async def untouched() -> AsyncIterator[Sandbox]:
    with TemporaryDirectory() as directory:
        spec = SandboxSpec("fresh", "127.0.0.1", 9)
        fresh = await ProcessRuntime(ProcessRuntime.Options()).start(spec, Host(Path(directory)))
        try:
            yield fresh
        finally:
            await fresh.stop()


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("true", 1.0),
        ("exit 3", 0.0),
        ("kill -9 $$", 0.0),
        ("echo noise; reward 0.25; echo", 0.25),
        ("printf noise; reward 0.25; printf noise", 0.25),
        ("reward 1; reward 0.5", 0.5),
        ("reward -1e-1", -0.1),
        ("echo all good", 1.0),
        ("reward 5; exit 1", 0.0),
        ("""reward '{"reward": 0.5}'; exit 1""", 0.0),
    ],
)
async def test_a_stated_reward_comes_before_a_good_exit_code_and_after_a_bad_one(
    sandbox: Sandbox, script: str, reward: float
) -> None:
    assert (await evaluate(sandbox, command=script)).reward == reward


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$", "sleep 60", "reward 1; exit 1"])
async def test_a_command_that_fails_gets_the_lowest_reward(sandbox: Sandbox, script: str) -> None:
    verdict = await evaluate(sandbox, command=script, lowest_reward=-1.0, timeout_seconds=0.2)
    assert verdict.reward == -1.0


@pytest.mark.parametrize("line", ["1.0", '{"reward": 1.0}', "reward 1.0", "0" * 32 + " 1.0"])
async def test_lines_that_anybody_can_print_are_no_reward(sandbox: Sandbox, line: str) -> None:
    verdict = await evaluate(sandbox, command=f"reward 0; printf '%s\\n' '{line}'", reward="stated")
    assert verdict.reward == 0.0


async def test_programs_that_the_command_starts_do_not_learn_its_key(sandbox: Sandbox) -> None:
    snoop = (
        "import os, glob, sys\nprint(sys.stdin.read(), dict(os.environ))\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline') + "
        "glob.glob('/proc/[0-9]*/fd/0'):\n"
        "    if os.path.islink(path) and 'memfd' not in os.readlink(path): continue\n"
        "    try: print(open(path, 'rb').read(100000))\n"
        "    except OSError: pass\n"
    )
    await sandbox.upload(PurePosixPath("snoop.py"), snoop.encode())
    script = 'seen=$(python3 snoop.py); case $seen in *"$polar_key"*) reward 1;; *) reward 0;; esac'
    assert (await evaluate(sandbox, command=script, reward="stated")).reward == 0.0


async def test_a_program_without_a_shell_reads_its_key(sandbox: Sandbox) -> None:
    program = "key = input(); print('noise'); print(key, 0.75)"
    verdict = await evaluate(sandbox, command=["python3", "-c", program], reward="stated")
    assert verdict.reward == 0.75


async def test_reports_do_not_tell_the_key(sandbox: Sandbox) -> None:
    assert (await evaluate(sandbox, command="reward 0.5")).report == "exit code 0\n--- stdout\n\nreward 0.5"


@pytest.mark.parametrize(("script", "reward"), [("reward 0.25", 1.0), ("reward 1; exit 9", 0.0)])
async def test_exit_code_alone_ignores_the_output(sandbox: Sandbox, script: str, reward: float) -> None:
    assert (await evaluate(sandbox, command=script, reward="exit_code")).reward == reward


async def test_a_reward_has_components(sandbox: Sandbox) -> None:
    stated = json.dumps({"reward": 2, "components": {"style": 0.5, "tests": 1}})
    verdict = await evaluate(sandbox, command=f"reward '{stated}'")
    assert (verdict.reward, verdict.components) == (2.0, {"style": 0.5, "tests": 1.0})


@pytest.mark.parametrize(
    "stated",
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
def test_what_is_no_finite_reward_is_a_failed_evaluation(stated: str) -> None:
    with pytest.raises(EvaluationFailed):
        parse_reward(stated)


async def test_a_command_that_does_not_end_is_worth_nothing(sandbox: Sandbox) -> None:
    verdict = await evaluate(sandbox, command="reward 1; sleep 60", timeout_seconds=0.2)
    assert verdict.reward == 0.0
    assert "timed out" in verdict.report


@pytest.mark.parametrize("place", ["live", "fresh"])
async def test_files_are_put_over_what_the_agent_left(tmp_path: Path, place: str) -> None:
    files = {"tests/check.sh": {"text": "echo checked >&2; exit 4", "executable": True}}
    async with evaluation(make_task(runtime="process"), tmp_path) as context:
        await agent_does(context, "mkdir tests; echo 'exit 0' > tests/check.sh")
        verdict = await judge(context, "command", command="sh tests/check.sh", files=files, sandbox=place)
    assert verdict.reward == 0.0
    assert verdict.report == "tampering: added tests/check.sh\nexit code 4\n--- stderr\nchecked"


async def test_a_link_in_the_way_of_the_evaluators_files_leads_them_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with evaluation(make_task(runtime="process"), tmp_path / "sandboxes") as context:
        await agent_does(context, f"ln -s {outside} tests")
        verdict = await judge(
            context,
            "command",
            command="sh tests/check.sh",
            files={"tests/check.sh": {"text": "exit 3"}},
            sandbox="live",
        )
    assert (verdict.reward, list(outside.iterdir())) == (0.0, [])


async def test_report_keeps_the_end_of_a_long_output(sandbox: Sandbox) -> None:
    verdict = await evaluate(sandbox, command="yes | head -c 1000000; reward 0.5")
    assert verdict.reward == 0.5
    assert verdict.report.endswith("reward 0.5")
    assert len(verdict.report) < 64 * 1024


FLOOD = "cat flood; reward 0.25"


@pytest.mark.parametrize("source", ["auto", "stated"])
async def test_a_statement_that_the_agent_has_pushed_out_is_worth_nothing(
    tmp_path: Path, source: str
) -> None:
    """By its exit code alone it would have earned it all, for printing much."""
    runtime = {"name": "process", "options": {"output_limit": 4096}}
    async with evaluation(make_task({"flood": ""}, runtime=runtime), tmp_path) as context:
        assert (await judge(context, "command", command=FLOOD, reward=source)).reward == 0.25
        await agent_does(context, "yes | head -c 5000 > flood")
        assert (await judge(context, "command", command=FLOOD, reward=source)).reward == 0.0
        assert (await judge(context, "command", command=FLOOD, reward="exit_code")).reward == 1.0


async def test_a_statement_that_the_agent_ruined_is_worth_nothing(tmp_path: Path) -> None:
    async with evaluation(make_task({"answer": "0.5"}, runtime="process"), tmp_path) as context:
        copied = {"command": 'reward "$(cat answer)"'}
        assert (await judge(context, "command", **copied)).reward == 0.5
        await agent_does(context, "echo nonsense > answer")
        assert (await judge(context, "command", **copied)).reward == 0.0
        with pytest.raises(EvaluationFailed, match="invalid reward"):
            await judge(context, "command", command="reward nonsense")


async def test_much_output_is_no_harm_where_only_the_exit_code_counts(tmp_path: Path) -> None:
    runtime = {"name": "process", "options": {"output_limit": 4096}}
    async with evaluation(make_task(runtime=runtime), tmp_path) as context:
        assert (await judge(context, "command", command="yes | head -c 5000")).reward == 1.0


@pytest.mark.parametrize("command", ["yes | head -c 5000", "true"])
async def test_a_command_that_never_states_a_reward_is_a_failed_evaluation(
    tmp_path: Path, command: str
) -> None:
    runtime = {"name": "process", "options": {"output_limit": 4096}}
    async with evaluation(make_task(runtime=runtime), tmp_path) as context:
        with pytest.raises(EvaluationFailed, match="stated no reward"):
            await judge(context, "command", command=command, reward="stated")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_is_read_back(number: float) -> None:
    for line in (repr(number), json.dumps({"reward": number})):
        assert parse_reward(line) == (number, {})


@given(st.text())
def test_no_line_gives_a_reward_that_is_not_finite(line: str) -> None:
    try:
        reward, _ = parse_reward(line)
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
