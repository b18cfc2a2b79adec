"""AgentBench's operating-system tasks as a source of rows: questions about files, answered in answer.txt.

The benchmark runs its tasks as root in a container. Here they run as an ordinary user in a closed sandbox,
with the benchmark's home directories in the workspace. `left_out` lists the tasks for which that does not
work.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polar.assets.pypi import Wheel
from polar.errors import InvalidInput
from polar.tasksets.rows import BadRow, Row, RowSource
from polar_public_tasks.index import wheel_directory

WHEEL = Wheel(
    "inspect-evals==0.26.0", sha256=("b76d15813182807da141a0f06bb6f18a5f82d1f06291ec2633bb84cdf661f8d0",)
)
LICENCE = "MIT"
SPLITS = {"dev": "agent_bench_os.json", "test": "agent_bench_os_test.json"}
"""The benchmark's own splits."""
WORKSPACE = "/workspace"
ANSWER = "answer.txt"
_HOMES = re.compile(r"/home/agent(?![\w.-])|/root(?![\w.-])|/home(?![\w.-])|/usr(?=/local)")
_TEMPORARY = re.compile(r"(?<![\w/])/tmp(?![\w.-])")
_EXACT = "check/string-match.py"

NOT_HERE = {
    "counts the programs of the harness with those of the system": (
        "dev-10 dev-22 test-7 test-8 test-15 test-16 test-25"
    ),
    "counts running processes": "test-38 test-112",
    "needs users or groups of its own": "dev-18 dev-19 dev-20 dev-24 test-28 test-29",
    "its set-up is random": "test-71 test-122",
    "asks for /var/log, which a sandbox has not": "test-74 test-104",
    "asks for file modes, which were others when it was graded": "test-48",
    "its reference answer prints nothing here": "dev-16",
}
"""Tasks that do not work in a sandbox, by reason."""


class AgentBenchOs(RowSource):
    """`split: dev` or `split: test`, or both.

    A row's columns are those of the benchmark, its `instruction`, and `solutions`, each a list of Pi's tool
    calls. Only the instruction is part of the task.
    """

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        if split is not None and split not in SPLITS:
            raise InvalidInput(f"split: {split} must be one of {', '.join(SPLITS)}")
        for name in [split] if split else SPLITS:
            for record in records(name):
                if left_out(name, record) is None:
                    yield _row(name, record)


def records(split: str) -> list[dict[str, Any]]:
    """Return the benchmark's rows, with the paths of this sandbox."""
    text = (_data() / SPLITS[split]).read_text()
    moved = _TEMPORARY.sub(f"{WORKSPACE}/tmp", _HOMES.sub(WORKSPACE, text))
    found: list[dict[str, Any]] = json.loads(moved)
    return found


def _data() -> Path:
    return wheel_directory(WHEEL) / "inspect_evals" / "agent_bench" / "data"


def left_out(split: str, record: Mapping[str, Any]) -> str | None:
    """Return why a task is left out, or None."""
    create = record.get("create")
    if "start" in record or (isinstance(create, Mapping) and create.get("init_at_start")):
        return "needs a program that runs beside the agent"
    if isinstance(record["evaluation"].get("check"), Mapping):
        return "changes the system, as root"
    if any(isinstance(step, Mapping) and "file" in step for step in _steps(create)):
        return "its set-up script is not in the package"
    name = f"{split}-{record['id']}"
    return next((reason for reason, names in NOT_HERE.items() if name in names.split()), None)


def _steps(create: Any) -> list[Any]:
    if not isinstance(create, Mapping) or create.get("init") is None:
        return []
    init = create["init"]
    return init if isinstance(init, list) else [init]


def _row(split: str, record: Mapping[str, Any]) -> Row:
    steps = [step["code"] if isinstance(step, Mapping) else step for step in _steps(record.get("create"))]
    right = _right_answer(record["evaluation"])
    asked = (
        f"{record['description'].strip()}\n\nYour home directory is {WORKSPACE}, where you are. Write the "
        f"answer alone to {ANSWER}, without explanation or units; if a script or a command is asked for, "
        f"write what it prints. {ANSWER} itself does not count as one of the files here."
    )
    # The answer's file must not exist while files are counted.
    solve = f'answer={right}; printf "%s" "$answer" > {ANSWER}'
    task = {
        "id": f"agentbench-os-{split}-{record['id']}",
        "instruction": asked,
        "prepare": [{"exec": _bash(f"RANDOM=3\n{step}")} for step in steps],
        "evaluator": {"name": "command", "options": _grading(record["evaluation"], right)},
        "metadata": {"benchmark": "AgentBench OS", "split": split, "licence": LICENCE},
        "solution": solve,
    }
    solutions = [[{"tool": "bash", "arguments": {"command": solve}}]]
    return Row(f"{split} {record['id']}", {**record, "instruction": asked, "solutions": solutions}, task)


def _bash(code: str) -> str:
    return f"HOME=$PWD bash -c {shlex.quote(code)}"


def _right_answer(evaluation: Mapping[str, Any]) -> str:
    """Return a shell expression for the right answer: the reference's output, or the benchmark's own."""
    example = evaluation.get("example")
    if example is None:
        return shlex.quote(str(evaluation["match"]))
    return f"$({_bash(example['code'] if isinstance(example, Mapping) else example)})"


def _grading(evaluation: Mapping[str, Any], right: str) -> dict[str, Any]:
    """Return the grading, which takes only the answer from the agent's workspace."""
    check = evaluation.get("check")
    program = (_data() / "scripts" / (check[1]["file"] if isinstance(check, list) else _EXACT)).read_text()
    lines = (
        # Reading a pipe would block until the timeout.
        f"[ -f {ANSWER} ] || exit 1",
        f"answer=$(head -c 10000 {ANSWER}) || exit 1",
        f"rm {ANSWER}",
        f"right={right}",
        '[ -n "$right" ] || exit 1',
        f'python3 -I -c {shlex.quote(program)} "$answer" "$right"',
    )
    return {"command": "\n".join(lines), "allow": [ANSWER], "reward": "exit_code"}
