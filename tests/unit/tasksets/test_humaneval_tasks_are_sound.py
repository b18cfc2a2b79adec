"""HumanEval as tasks: solvable, split without overlap, and graded where the agent's code has no say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from polar_public_tasks.humaneval import HumanEval, Reward

from polar.errors import InvalidInput
from polar.tasksets.files import load_tasks
from polar.tasksets.rows import Row

EXAMPLE = Path(__file__).parents[3] / "examples" / "public-tasks" / "humaneval.yaml"
KEY = "0123456789abcdef"
TRIED = ("HumanEval/0", "HumanEval/32", "HumanEval/38", "HumanEval/53")
"""Plain assertions, one that calls a function of the stub's file, and two with random arguments."""


def rows(split: str | None = None, reward: Reward = Reward.ALL_PASS) -> dict[str, Row]:
    made = HumanEval(HumanEval.Options(reward=reward)).rows(None, split)
    return {row.where: row for row in made if isinstance(row, Row)}


def task(row: Row) -> dict[str, Any]:
    assert row.task is not None
    return dict(row.task)


def graded(row: Row, solution: str, directory: Path) -> float | None:
    """The reward that the grader states; None if it states none."""
    options = task(row)["evaluator"]["options"]
    (directory / "solution.py").write_text(solution)
    for name, file in options["files"].items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(file["text"])
    command = [sys.executable, *options["command"][1:]]
    done = subprocess.run(command, cwd=directory, input=f"{KEY}\n", capture_output=True, text=True)
    stated = [line for line in done.stdout.splitlines() if line.startswith(f"{KEY} ")]
    return float(stated[-1].split()[1]) if stated and done.returncode == 0 else None


def test_the_splits_are_the_whole_and_share_nothing() -> None:
    train, held_out = rows("train"), rows("held_out")
    assert (len(train), len(held_out)) == (123, 41)
    assert not train.keys() & held_out.keys()
    assert {**train, **held_out}.keys() == rows().keys()


def test_the_example_is_whole_tasks_without_their_solutions() -> None:
    loaded = load_tasks(EXAMPLE)
    assert len(loaded) == 123
    assert "has_close_elements" in loaded[0].instruction
    assert rows()["HumanEval/0"].columns["canonical_solution"] not in str(loaded[0].files)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one of train, held_out"):
        rows("test")


@pytest.mark.parametrize("name", TRIED)
def test_the_solution_is_worth_1_and_the_stub_0(name: str, tmp_path: Path) -> None:
    row = rows()[name]
    solved = task(row)["solution"]["files"]["solution.py"]["text"]
    assert graded(row, solved, tmp_path) == 1.0
    assert graded(row, task(row)["files"]["solution.py"]["text"], tmp_path) == 0.0


def test_a_solution_is_a_module_like_any_other(tmp_path: Path) -> None:
    row = rows()["HumanEval/0"]
    solved = task(row)["solution"]["files"]["solution.py"]["text"]
    before = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    looked_up_by_its_module = "\n\n@dataclass\nclass Pair:\n    first: float\n"
    assert graded(row, before + solved + looked_up_by_its_module, tmp_path) == 1.0


EQUAL_TO_ALL = "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
CHEATS = {
    "equal to everything": EQUAL_TO_ALL + "def has_close_elements(*_): return Equal(7)\n",
    "ends the process": "import os\nos._exit(0)\n",
    "ends it when called": "import os\ndef has_close_elements(*_): os._exit(0)\n",
    "says so": f"def has_close_elements(*_):\n    import os; os.write(3, b'{KEY} 1.0'); print('{KEY} 1.0')\n",
    "kills the grader": "import os\nos.kill(os.getppid(), 9)\n",
    "looks for the assertions": (
        "import glob, json\n"
        "found = glob.glob('.polar*/**', recursive=True) + glob.glob('**/problem.json', recursive=True)\n"
        "def has_close_elements(*_):\n    if found: return True\n    raise ValueError\n"
    ),
    "answers ahead": (
        "import os\nfor fd in range(3, 9):\n"
        "    try: os.write(fd, b'True\\n' * 99)\n    except OSError: pass\n"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("reward", Reward)
def test_no_code_that_cheats_is_worth_1(name: str, reward: Reward, tmp_path: Path) -> None:
    row = rows(reward=reward)["HumanEval/0"]
    # Of seven assertions some want True: whoever answers that to all of them has earned as much.
    assert (graded(row, CHEATS[name], tmp_path) or 0.0) < 1.0


BREAKS_OFF = """
    if find_zero.asked:
        {ending}
    find_zero.asked = True
    return solved(xs)

find_zero.asked = False
"""


@pytest.mark.parametrize("ending", ["raise ValueError", "os._exit(0)", "return object()"])
@pytest.mark.parametrize("reward", Reward)
def test_a_loop_of_assertions_counts_only_if_it_comes_to_its_end(
    ending: str, reward: Reward, tmp_path: Path
) -> None:
    row = rows(reward=reward)["HumanEval/32"]
    solved = task(row)["solution"]["files"]["solution.py"]["text"].replace("def find_zero", "def solved")
    once = f"import os\n{solved}\ndef find_zero(xs):{BREAKS_OFF.format(ending=ending)}"
    assert graded(row, once, tmp_path) == 0.0


def test_a_function_that_never_returns_is_worth_0(tmp_path: Path) -> None:
    endless = "def has_close_elements(*_):\n    while True: pass\n"
    assert graded(rows()["HumanEval/0"], endless, tmp_path) == 0.0


def test_a_share_of_the_assertions_is_what_the_stub_does_not_fulfil(tmp_path: Path) -> None:
    row = rows(reward=Reward.FRACTION)["HumanEval/0"]
    always = task(row)["files"]["solution.py"]["text"] + "    return True\n"
    assert graded(row, always, tmp_path) == pytest.approx(4 / 7)
    assert graded(row, task(row)["files"]["solution.py"]["text"], tmp_path) == 0.0
