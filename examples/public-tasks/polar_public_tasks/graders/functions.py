"""Grades a function by its hidden assertions: `functions.py DIRECTORY all_pass|fraction`.

The function runs in a process of its own, which is sent arguments and sends back what it returned as plain
data. So nothing of the agent's is where assertions are judged: no object that is equal to everything, no
process ended early. The key by which the reward is stated, and the assertions, are in this process alone,
whose memory is closed; their file is gone before the function's process begins.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 10
LONGEST = 1 << 20
PR_SET_DUMPABLE = 4
CALLS = """
import ast, importlib.util, os, sys
sys.path.append(os.getcwd())
answers, questions = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0), os.dup2(nothing, 1), os.dup2(nothing, 2)

def plain(value):
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(map(plain, value))
    return value

spec = importlib.util.spec_from_file_location("solution", sys.argv[1])
module = sys.modules["solution"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for question in questions:
    try:
        answer = ascii(plain(getattr(module, sys.argv[2])(*ast.literal_eval(question))))
    except Exception:
        answer = "it raised"
    answers.write(answer.replace(chr(10), " ") + chr(10))
    answers.flush()
"""
"""The other process: a question is a line with the arguments, an answer a line with what was returned."""


class Failed(Exception):
    """The function raised, returned what is no plain data, or did not return."""


class Function:
    """The agent's function, called in its own process."""

    def __init__(self, file: str, name: str) -> None:
        command = [sys.executable, "-I", "-c", CALLS, file, name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        self._questions, self._answers = process.stdin, process.stdout
        self.end = process.kill
        self._deadline = time.monotonic() + SECONDS

    def __call__(self, *arguments: Any) -> Any:
        try:
            self._questions.write(ascii(arguments).encode() + b"\n")
            self._questions.flush()
            return ast.literal_eval(self._line())
        except Exception:
            raise Failed from None

    def _line(self) -> str:
        said = b""
        while not said.endswith(b"\n"):
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise Failed
            part = os.read(self._answers.fileno(), LONGEST)
            said += part
            if not part or len(said) > LONGEST:
                raise Failed
        return said.decode("ascii")


class Counted(ast.NodeTransformer):
    """Assertions that are numbered and told one by one instead of ending the check."""

    count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        number, self.count = self.count, self.count + 1
        told = ast.parse(
            f"try: pass\nexcept Exception: told({number}, False)\nelse: told({number}, True)"
        ).body[0]
        assert isinstance(told, ast.Try)
        told.body = [node]
        return told


def holding(problem: dict[str, str], function: Callable[..., Any]) -> tuple[set[int], int]:
    """Which of the assertions hold, by number, and how many there are; one that is not reached does not.

    None do where the check ends early: one in a loop would be known to hold only for some of its rounds.
    """
    outcomes: dict[int, bool] = {}

    def told(number: int, holds: bool) -> None:
        outcomes[number] = outcomes.get(number, True) and holds

    counted = Counted()
    tree = ast.fix_missing_locations(counted.visit(ast.parse(problem["test"])))
    names: dict[str, Any] = {"told": told}
    exec(problem["prompt"], names)
    exec(compile(tree, "test", "exec"), names)
    names[problem["entry_point"]] = function
    random.seed(0)
    try:
        names["check"](function)
    except Exception as error:
        print(f"the check ended early: {error!r}", file=sys.stderr)
        return set(), counted.count
    return {number for number, holds in outcomes.items() if holds}, counted.count


def main() -> None:
    key = sys.stdin.readline().strip()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    hidden = Path(sys.argv[1])
    problem = json.loads((hidden / "problem.json").read_text())
    shutil.rmtree(hidden)
    free, count = holding(problem, lambda *_: None)
    function = Function("solution.py", problem["entry_point"])
    passed, _ = holding(problem, function)
    function.end()
    if sys.argv[2] == "fraction" and count > len(free):
        reward = len(passed - free) / (count - len(free))
    else:
        reward = float(len(passed) == count)
    print(f"{len(passed)} of {count} assertions hold", file=sys.stderr)
    print(f"\n{key} {reward}", flush=True)


main()
