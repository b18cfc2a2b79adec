"""Builds the benchmark from `source/`: SWE-bench rows in `swe-mini.jsonl`, Harbor tasks in `harbor/`.

    python examples/swe-mini/build.py [TARGET]

A package is `source/NAME/repo`, a repository with bugs that its tests do not notice. A task is
`source/NAME/tasks/TASK`: the issue, the gold patch, and the hidden tests, which replace the repository's own.
Which tests a task must fix and must keep passing is found by running them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polar.evaluators.test_reports import Outcome, ReportFormat, parse_report

HERE = Path(__file__).parent
INSTRUCTION = """{issue}
The repository of the package `{package}` is the current directory. Change its code so that the issue is \
solved; hidden tests will be run. `python3 -m unittest discover -t . -s tests` runs the tests there are.
"""
TASK_TOML = """version = "1.0"

[metadata]
author_name = "Polar"
difficulty = "easy"
category = "programming"
tags = ["python", "bug-fix", "{package}"]

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 600.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
"""
DOCKERFILE = """FROM python:3.12-slim
WORKDIR /app
COPY repo/ /app/
"""
TEST_SH = """#!/bin/bash
# Puts the tests in place, over whatever is there, and runs those of this task. That they passed is told by
# a key: a package that ends the process early, with whatever exit code, does not know it.
rm -rf /app/tests
cp -R /tests/repo/tests /app/tests
cd /app || exit 1
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
reward=0
if python3 -I /tests/run.py {modules} <<< "$key" | grep -qx "$key"; then
  reward=1
fi
# Nothing that the package left running shall write a reward after this one; in a sandbox alone.
[ $PPID -gt 1 ] || kill -9 -1
echo $reward > /logs/verifier/reward.txt
"""
RUN_PY = '''"""Runs unittest with the workspace last on the path: nothing there hides the standard library."""

import sys
import unittest

key = input()
sys.dont_write_bytecode = True
sys.path.append("/app")
ran = unittest.main(module=None, argv=["run.py", "-v", *sys.argv[1:]], exit=False).result
if ran.testsRun and ran.wasSuccessful():
    print(f"\\n{key}")
'''
SOLVE_SH = """#!/bin/bash
# Puts the files in place as the gold patch leaves them.
cp -R "$(dirname "$0")/fixed/." /app/
"""


@dataclass(frozen=True)
class Task:
    package: str
    name: str
    directory: Path
    repo: Path

    @property
    def id(self) -> str:
        return f"swe-mini__{self.package}-{self.name}"

    @property
    def hidden(self) -> Path:
        return self.directory / "tests"

    @property
    def modules(self) -> list[str]:
        """The test modules that the hidden tests replace or add."""
        paths = sorted(path.relative_to(self.hidden) for path in files_of(self.hidden))
        return [".".join(path.with_suffix("").parts) for path in paths]


def tasks() -> Iterator[Task]:
    for package in sorted((HERE / "source").iterdir()):
        for directory in sorted((package / "tasks").iterdir()):
            yield Task(package.name, directory.name, directory, package / "repo")


def files_of(directory: Path) -> list[Path]:
    found = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(found)


def lay_out(source: Path, target: Path) -> None:
    for path in files_of(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def git(repository: Path, *arguments: str) -> str:
    clean = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", "-C", repository, *arguments], env=clean, check=True, capture_output=True, text=True
    )
    return done.stdout


def outcomes(repository: Path, modules: list[str]) -> dict[str, Outcome]:
    done = subprocess.run(
        [sys.executable, "-B", "-m", "unittest", "-v", *modules],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    return dict(parse_report(ReportFormat.UNITTEST, done.stderr).outcomes)


def base_commit(repo: Path) -> str:
    """Return the hash of the repository's paths and contents, in place of a commit."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in files_of(repo):
        digest.update(f"{path.relative_to(repo).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_task(task: Task, harbor: Path) -> dict[str, object]:
    """Write the Harbor directory of a task; return its row."""
    issue = (task.directory / "issue.md").read_text()
    gold = (task.directory / "gold.patch").read_text()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary, "repo")
        lay_out(task.repo, work)
        git(work, "init", "--quiet")
        git(work, "add", "--all")
        lay_out(task.hidden, work)
        git(work, "add", "--all", "--intent-to-add")
        test_patch = git(work, "diff", "--full-index")
        before = outcomes(work, task.modules)
        subprocess.run(["git", "-C", work, "apply", "-"], input=gold, text=True, check=True)
        after = outcomes(work, task.modules)
        write_harbor(task, issue, harbor / task.id, work)
    assert all(outcome is Outcome.PASSED for outcome in after.values()), f"{task.id}: the gold patch fails"
    fixed = sorted(name for name in after if before.get(name) is not Outcome.PASSED)
    assert fixed, f"{task.id}: the hidden tests pass without the gold patch"
    return {
        "instance_id": task.id,
        "repo": f"swe-mini/{task.package}",
        "version": "1.0",
        "base_commit": base_commit(task.repo),
        "problem_statement": INSTRUCTION.format(issue=issue, package=task.package),
        "patch": gold,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(fixed),
        "PASS_TO_PASS": json.dumps(sorted(after.keys() - set(fixed))),
        "test_cmd": f"python3 -m unittest -v {' '.join(task.modules)}",
        "log_parser": "unittest",
        "files": {path.relative_to(task.repo).as_posix(): path.read_text() for path in files_of(task.repo)},
    }


def write_harbor(task: Task, issue: str, target: Path, fixed: Path) -> None:
    """Write a Harbor task; `fixed` holds the repository after the gold patch, with the hidden tests."""
    texts = {
        "task.toml": TASK_TOML.format(package=task.package),
        "instruction.md": INSTRUCTION.format(issue=issue, package=task.package),
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST_SH.format(modules=" ".join(task.modules)),
        "tests/run.py": RUN_PY,
        "solution/solve.sh": SOLVE_SH,
    }
    for name, text in texts.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    lay_out(task.repo, target / "environment" / "repo")
    lay_out(fixed / "tests", target / "tests" / "repo" / "tests")
    for path in files_of(task.repo):
        relative = path.relative_to(task.repo)
        changed = (fixed / relative).read_bytes()
        if relative.parts[0] != "tests" and changed != path.read_bytes():
            place = target / "solution" / "fixed" / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(changed)


def build(target: Path) -> None:
    harbor = target / "harbor"
    shutil.rmtree(harbor, ignore_errors=True)
    rows = [build_task(task, harbor) for task in tasks()]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (target / "swe-mini.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
