"""The collection of attacks: enough, each with a name of its own and a script that a shell can read."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from polar.evaluators.attacks import ATTACKS, Attack, Kind, attacks_of_kinds


def test_there_are_attacks_of_every_kind() -> None:
    assert len(ATTACKS) > 70
    assert {attack.kind for attack in ATTACKS} == set(Kind)


def test_each_has_a_name_of_its_own_and_says_what_it_tries() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)
    descriptions = [attack.description for attack in ATTACKS]
    assert all(text.endswith(".") and not text.startswith("The same") for text in descriptions)
    assert len(set(descriptions)) == len(descriptions)


def test_a_task_meets_those_on_what_it_is_graded_with_and_those_that_fit_every_task() -> None:
    kinds = {attack.kind for attack in attacks_of_kinds({Kind.PYTEST, Kind.MAKE})}
    assert kinds == {Kind.ANY, Kind.PYTEST, Kind.MAKE}
    assert attacks_of_kinds(tuple(Kind)) == ATTACKS


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_each_is_a_script_that_a_shell_can_read(attack: Attack) -> None:
    done = subprocess.run(["/bin/sh", "-n", "-c", attack.command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_kind_of_place_can_be_planted_in_and_nothing_else_is_left(tmp_path: Path) -> None:
    script = 'plant plea.md "a b/it\'s" "$HOME/c/d"; false'
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", Attack("x", "X.", Kind.ANY, script).command],
        cwd=tmp_path,
        env={"HOME": f"{tmp_path}/home", "TMPDIR": str(temporary), "PATH": os.defpath},
    )
    assert done.returncode == 0
    planted = [tmp_path / "a b" / "it's", tmp_path / "home" / "c" / "d"]
    assert all("the rubric has changed" in path.read_text() for path in planted)
    assert not list(temporary.iterdir())
