"""How long 10,000 rows take to become checked tasks, and how memory grows with the size of a dataset."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.report import Row, at_most, report

ROWS = 10_000
LOAD_GOAL_SECONDS = 5.0
GROWTH_GOAL = 1.3
"""How much more memory a dataset of ten times the size may take while it is written."""

DESCRIPTION = {
    "source": "rows.jsonl",
    "filter": "level >= 0",
    "shuffle": 7,
    "template": {
        "id": "task-{{ number }}",
        "instruction": "{{ question }}\n\nWrite the answer to answer.txt.\n",
        "files": {"notes.txt": {"text": "{{ notes }}"}},
        "evaluator": {"name": "command", "options": {"command": "grep -qx {{ answer }} answer.txt"}},
        "metadata": {"answer": "{{ answer }}"},
    },
    "defaults": {"harness": {"name": "pi", "options": {"tools": ["bash"]}}, "samples": 8},
}

LOAD = """
import sys, time
from pathlib import Path
from polar.tasksets.files import read_tasks
started = time.process_time()
loaded = read_tasks(Path(sys.argv[1]), over={"harness": {"name": "pi"}})
assert not loaded.problems, loaded.problems[:3]
print(len(loaded.tasks), time.process_time() - started)
"""

WRITE = """
import resource, sys
from pathlib import Path
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.sft import TaskSessions, write_dataset
from polar.trajectory.learnable import EndedSession
from tests.fakes.recordings import recording
made = recording()
groups = (TaskSessions(f"t{n}", "pi", {}, [EndedSession(made.result, made)]) for n in range(int(sys.argv[2])))
written = write_dataset(groups, Path(sys.argv[1]), parse_acceptance("reward >= 1"))
print(written.tasks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def measured(program: str, *arguments: str) -> tuple[int, float]:
    """What a fresh interpreter prints: a count and a number."""
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True
    )
    count, number = run.stdout.split()
    return int(count), float(number)


def plain_rows(path: Path) -> None:
    rows = (
        {"question": f"What is {n} times {n}?", "answer": n * n, "level": n % 5, "notes": "note " * 100}
        for n in range(ROWS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def swe_rows(path: Path) -> None:
    """The rows of examples/swe-mini again and again, each under an id of its own."""
    source = Path(__file__).parents[1] / "examples" / "swe-mini" / "swe-mini.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    with path.open("w") as file:
        for number in range(ROWS):
            row = rows[number % len(rows)]
            file.write(json.dumps({**row, "instance_id": f"{row['instance_id']}-{number}"}) + "\n")


def parsing(path: Path) -> float:
    """What reading the JSON alone takes."""
    started = time.process_time()
    for line in path.read_bytes().splitlines():
        json.loads(line)
    return time.process_time() - started


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plain_rows(directory / "rows.jsonl")
        (directory / "taskset.yaml").write_text(yaml.safe_dump(DESCRIPTION, sort_keys=False))
        swe_rows(directory / "swe.jsonl")
        sources = (("templates", "taskset.yaml", "rows.jsonl"), ("SWE-bench rows", "swe.jsonl", "swe.jsonl"))
        for kind, path, data in sources:
            count, seconds = measured(LOAD, str(directory / path))
            assert count == ROWS
            label = f"{ROWS:,} rows to checked tasks, {kind} (peer: json.loads)"
            rows.append(
                at_most(label, seconds, "s of one core", LOAD_GOAL_SECONDS, peer=parsing(directory / data))
            )
        _, small = measured(WRITE, str(directory / "small"), "2000")
        _, large = measured(WRITE, str(directory / "large"), "20000")
        goal = f"≤ {GROWTH_GOAL:g} × peer"
        label = "memory while 20,000 conversations are written (peer: 2,000)"
        rows.append(Row(label, large, "MB", small, goal, large <= GROWTH_GOAL * small))
    report("tasksets", rows)


if __name__ == "__main__":
    main()
