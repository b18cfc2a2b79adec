"""The script that starts a task's tool server gives it its arguments and variables as the task has them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.harnesses.base import launchers
from polar.models.task import ToolServer
from tests.fakes.harness_context import harness_context

TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['A'], os.getcwd()]))"
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=25)
@given(st.lists(words, max_size=3), words)
def test_arguments_and_variables_arrive_unchanged(arguments: list[str], value: str) -> None:
    server = ToolServer(command=sys.executable, args=("-c", TELL, *arguments), env={"A": value})
    with tempfile.TemporaryDirectory(prefix="it's a $place ") as place:
        context = harness_context({}, workspace=PurePosixPath(place), tools={"words": server})
        ((path, script),) = launchers(context).items()
        assert path == context.launcher("words")
        run = subprocess.run(["/bin/sh"], input=script, capture_output=True, check=True)
        assert json.loads(run.stdout) == [arguments, value, str(Path(place).resolve())]


@pytest.mark.parametrize("shell", [("/bin/sh",), ("bash", "--posix")], ids=["own", "bash"])
def test_no_shell_has_a_say_in_variables(shell: tuple[str, ...]) -> None:
    """`UID` cannot be set in bash, which is `/bin/sh` in many images, and `OPTIND` to no text in dash."""
    variables = {"UID": "7", "OPTIND": "none", "PWD": "here"}
    server = ToolServer(command="printenv", args=tuple(variables), env=variables)
    context = harness_context({}, workspace=PurePosixPath("/"), tools={"words": server})
    (script,) = launchers(context).values()
    run = subprocess.run(shell, input=script, capture_output=True)
    assert run.stdout.decode().split() == [*variables.values()], run.stderr.decode()


def test_values_of_variables_and_headers_are_not_shown() -> None:
    shown = repr(
        [
            ToolServer(command="a", env={"KEY": "a secret"}),
            ToolServer(url="https://a.example", headers={"Authorization": "a secret"}),
        ]
    )
    assert "a secret" not in shown
