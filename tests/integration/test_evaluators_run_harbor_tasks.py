"""Harbor task directories as their public documentation shows them, in the default sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar.errors import InvalidInput
from polar.evaluators.base import EvaluationFailed
from polar.evaluators.harbor_task import read_harbor_task
from polar.models.session import Verdict
from polar.models.task import TaskSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from tests.evaluations import agent_does, evaluate, evaluation, make_task

HELLO = {
    "task.toml": """\
version = "1.0"

[metadata]
author_name = "Somebody"
difficulty = "easy"
category = "programming"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
""",
    "instruction.md": 'Create a file called hello.txt with "Hello, world!" as the content.\n',
    "environment/Dockerfile": "FROM ubuntu:24.04\n\nWORKDIR /app\n",
    "tests/test.sh": """\
#!/bin/bash
set -e

if [[ -f "/app/hello.txt" ]] && [[ $(cat /app/hello.txt) == "Hello, world!" ]]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "solution/solve.sh": '#!/bin/bash\necho "Hello, world!" > /app/hello.txt\n',
}


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def task_of(directory: Path) -> TaskSpec:
    return TaskSpec.model_validate({"id": "h", "harness": "shell", **read_harbor_task(directory).fields()})


async def score(directory: Path, tmp_path: Path, script: str, **options: Any) -> Verdict:
    task = task_of(directory)
    async with evaluation(task, tmp_path / "sandboxes") as context:
        await agent_does(context, script)
        return await evaluate(context, "harbor", **{**task.evaluator.options, **options})


@pytest.mark.sandbox
@pytest.mark.parametrize("place", ["live", "fresh"])
async def test_a_documented_task_runs_unmodified(tmp_path: Path, place: str) -> None:
    directory = write(tmp_path / "hello", HELLO)
    task = task_of(directory)
    assert task.instruction == HELLO["instruction.md"]
    assert (task.budgets.run_seconds, task.budgets.evaluate_seconds) == (120.0, 180.0)
    async with evaluation(task, tmp_path / "sandboxes") as context:
        options = {**task.evaluator.options, "sandbox": place}
        assert (await evaluate(context, "harbor", **options)).reward == 0.0
        await agent_does(context, HELLO["solution/solve.sh"])
        assert (await evaluate(context, "harbor", **options)).reward == 1.0


@pytest.mark.sandbox
async def test_rewards_come_as_json_with_components(tmp_path: Path) -> None:
    rewards = json.dumps({"reward": 0.75, "style": 0.5})
    script = f"echo '{rewards}' > /logs/verifier/reward.json"
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": f"#!/bin/bash\n{script}\n"})
    verdict = await score(directory, tmp_path, "true")
    assert verdict.reward == 0.75
    assert verdict.components == {"reward": 0.75, "style": 0.5, "tampering": 0.0}


FORGED = """echo '{"reward": 1.0}' > /logs/verifier/reward.json"""
"""What code of the agent's does that the verifier runs."""


@pytest.mark.sandbox
async def test_only_the_file_that_the_tests_name_is_the_reward(tmp_path: Path) -> None:
    script = "#!/bin/bash\n[ -f work.sh ] && bash work.sh\necho 0 > /logs/verifier/reward.txt\n"
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": script})
    verdict = await score(directory, tmp_path, f"cat > work.sh <<'END'\n{FORGED}\nEND")
    assert (verdict.reward, verdict.components) == (0.0, {"reward": 0.0, "tampering": 0.0})


BOTH = """#!/bin/bash
# Writes reward.txt, or reward.json
[ -f work.sh ] && bash work.sh
echo 0 > /logs/verifier/reward.txt
"""


@pytest.mark.sandbox
async def test_files_that_contradict_each_other_are_no_reward(tmp_path: Path) -> None:
    """The agent's doing where its code wrote one of them, the task's where the verifier does so itself."""
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": BOTH})
    verdict = await score(directory, tmp_path / "1", f"cat > work.sh <<'END'\n{FORGED}\nEND")
    assert verdict.reward == 0.0
    assert "disagree" in verdict.report
    broken = write(tmp_path / "b", {**HELLO, "tests/test.sh": f"{BOTH}{FORGED}\n"})
    with pytest.raises(EvaluationFailed, match="disagree"):
        await score(broken, tmp_path / "2", "true")


@pytest.mark.sandbox
async def test_files_that_agree_are_one_reward(tmp_path: Path) -> None:
    script = f"#!/bin/bash\n{FORGED}\necho 1 > /logs/verifier/reward.txt\n"
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": script})
    assert (await score(directory, tmp_path, "true")).reward == 1.0


@pytest.mark.sandbox
async def test_a_verifier_that_is_killed_is_not_believed(tmp_path: Path) -> None:
    script = "#!/bin/bash\nbash work.sh\necho 0 > /logs/verifier/reward.txt\n"
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": script})
    verdict = await score(
        directory, tmp_path, "echo 'echo 1 > /logs/verifier/reward.txt; kill -9 $PPID' > work.sh"
    )
    assert verdict.reward == 0.0
    assert "the verifier was killed" in verdict.report


RUNS_WORK = "#!/bin/bash\nbash work.sh\n{}echo 0 > /logs/verifier/reward.txt\n"
ENDS_OTHERS = "[ $PPID -gt 1 ] || kill -9 -1\n"
"""What docs/evaluators.md tells verifiers to do before they write their reward."""
LEAVES_A_PROCESS = """cat > work.sh <<'END'
setsid bash -c 'touch /tmp/begun; while :; do
  grep -qs 0 /logs/verifier/reward.txt && echo 1 > /logs/verifier/reward.txt
done' > /dev/null 2>&1 < /dev/null &
until [ -e /tmp/begun ]; do :; done
END"""


@pytest.mark.sandbox
@pytest.mark.parametrize("place", ["live", "fresh"])
async def test_a_verifier_that_ends_all_others_writes_the_last_word(tmp_path: Path, place: str) -> None:
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": RUNS_WORK.format(ENDS_OTHERS)})
    verdict = await score(directory, tmp_path, LEAVES_A_PROCESS, sandbox=place)
    assert (verdict.reward, verdict.components) == (0.0, {"reward": 0.0, "tampering": 0.0})


@pytest.mark.sandbox
async def test_a_reward_that_graded_code_has_locked_does_not_count(tmp_path: Path) -> None:
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": RUNS_WORK.format("")})
    lock = "echo 1 > /logs/verifier/reward.txt; chmod -R a-w /logs/verifier"
    verdict = await score(directory, tmp_path, f"echo '{lock}' > work.sh")
    assert (verdict.reward, verdict.components) == (0.0, {"ungradable": 1.0})
    assert "was made unreadable" in verdict.report


@pytest.mark.sandbox
async def test_graded_code_is_the_verifier_s_own_user_and_can_be_no_other(tmp_path: Path) -> None:
    """Why the documentation sends verifiers to keys and programs of their own, and not to another user."""
    script = f"""#!/bin/bash
[ "$(bash work.sh)" = "$(id -u)" ] || exit 1
! setpriv --reuid=65534 true && ! su nobody -s /bin/true && ! chown 65534 work.sh || exit 1
{FORGED}
"""
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": script})
    assert (await score(directory, tmp_path, "echo 'id -u' > work.sh")).reward == 1.0


@pytest.mark.sandbox
async def test_a_fresh_sandbox_is_not_the_agent_s_user_where_the_node_can_choose(tmp_path: Path) -> None:
    task = task_of(write(tmp_path / "t", HELLO))
    async with evaluation(task, tmp_path / "sandboxes") as context, context.fresh_sandbox():
        users = {path.stat().st_uid for path in (tmp_path / "sandboxes/sessions").glob("*/files/workspace")}
    kept = await BubblewrapRuntime.enforcement()
    assert len(users) == (2 if kept["user"].startswith("one of its own") else 1)


@pytest.mark.sandbox
async def test_what_the_agent_leaves_in_harbors_places_is_gone(tmp_path: Path) -> None:
    """A reward, a log directory that is a file, and tests of its own."""
    files = {
        **HELLO,
        "tests/test.sh": "#!/bin/bash\nls -A /tests /logs; cat /tests/data.txt\n",
        "tests/data.txt": "x",
    }
    directory = write(tmp_path / "t", files)
    attack = (
        "mkdir -p /logs/verifier /tests/data.txt; echo 1 > /logs/verifier/reward.txt; touch /tests/evil.py"
    )
    with pytest.raises(EvaluationFailed, match="left no valid reward"):
        await score(directory, tmp_path, attack)
    assert (
        await score(write(tmp_path / "h", HELLO), tmp_path / "2", "rm -rf /logs/*; echo 1 > /logs/verifier")
    ).reward == 0.0


@pytest.mark.sandbox
async def test_an_agent_that_breaks_the_verifier_gets_nothing(tmp_path: Path) -> None:
    script = "#!/bin/bash\nset -e\n[ ! -e broken ]\necho 0.5 > /logs/verifier/reward.txt\n"
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": script})
    assert (await score(directory, tmp_path / "1", "true")).reward == 0.5
    verdict = await score(directory, tmp_path / "2", "touch broken")
    assert (verdict.reward, verdict.components) == (0.0, {"ungradable": 1.0})
    assert "the verifier wrote no reward" in verdict.report


@pytest.mark.sandbox
@pytest.mark.parametrize("content", ["yes", "nan", '{"a": 1, "b": 2}', '{"reward": "high"}'])
async def test_a_reward_that_is_no_number_fails_the_evaluation(tmp_path: Path, content: str) -> None:
    name = "reward.json" if content.startswith("{") else "reward.txt"
    script = f"#!/bin/bash\necho '{content}' > /logs/verifier/{name}\n"
    directory = write(tmp_path / "t", {**HELLO, "tests/test.sh": script})
    with pytest.raises(EvaluationFailed, match="reward"):
        await score(directory, tmp_path, "true")


async def test_a_runtime_without_harbors_places_is_refused_before_it_touches_the_host(tmp_path: Path) -> None:
    task = make_task(runtime="process")
    async with evaluation(task, tmp_path) as context:
        with pytest.raises(EvaluationFailed, match=r"no writable /tests .*directories"):
            await evaluate(context, "harbor", tests={"test.sh": {"text": "exit 0"}})


def test_copied_files_are_the_workspace(tmp_path: Path) -> None:
    files = {
        **HELLO,
        "environment/Dockerfile": (
            "FROM x\nWORKDIR /srv\nWORKDIR app\nCOPY . /srv/app/all\nCOPY src/ ./\nCOPY a.txt b.txt\n"
        ),
        "environment/src/main.py": "x",
        "environment/src/deep/er.py": "y",
        "environment/a.txt": "a",
    }
    task = read_harbor_task(write(tmp_path / "t", files))
    assert task.workdir == "/srv/app"
    assert {"main.py", "deep/er.py", "b.txt", "all/src/main.py", "all/Dockerfile"} <= set(task.files)
    assert task.fields()["runtime"]["options"] == {
        "workspace": "/srv/app",
        "directories": ["/tests", "/logs"],
    }


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"environment/Dockerfile": "FROM x\nRUN apt-get install -y \\\n  curl\n"},
            "RUN apt-get install -y curl",
        ),
        ({"environment/Dockerfile": "FROM x\nENV A=1\n"}, "ENV A=1"),
        ({"environment/Dockerfile": "FROM x AS y\nCOPY --from=y /a /app/a\n"}, "COPY --from=y"),
        (
            {"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY Dockerfile /etc/x\n"},
            "COPY Dockerfile /etc/x",
        ),
        ({"environment/Dockerfile": "FROM x\nCOPY nothing /app/\n"}, "COPY nothing: no such file"),
        ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml"),
        ({"task.toml": "[agent]\ntimeout_sec = 'long'\n"}, r"task\.toml: agent\.timeout_sec"),
        ({"task.toml": "not toml"}, r"task\.toml: not TOML"),
        ({"task.toml": "[verifier]\nenv = {KEY = '${SECRET}'}\n"}, r"verifier\.env\.KEY"),
        ({"instruction.md": " \n"}, r"instruction\.md: is empty"),
        ({"steps/1/instruction.md": "x"}, "multi-step"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, files: dict[str, str], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        read_harbor_task(write(tmp_path / "t", {**HELLO, **files}))


def test_a_host_that_has_what_is_needed_can_say_so(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "t", {**HELLO, "environment/Dockerfile": "FROM x\nRUN apt-get install -y git\n"}
    )
    task = read_harbor_task(directory, ignore_unmet=True)
    assert task.unmet == ("RUN apt-get install -y git",)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    files = {name: text for name, text in HELLO.items() if name != missing}
    with pytest.raises(InvalidInput, match=missing.replace(".", r"\.")):
        read_harbor_task(write(tmp_path / "t", files))
