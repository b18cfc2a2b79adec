"""`polar --help` teaches every command and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polar import __version__
from polar.cli.main import COMMANDS, app

SLOW = {"torch", "transformers", "fastapi", "sqlalchemy", "aiohttp", "pyarrow"}
"""What no command's help is worth waiting for."""
HEAVY = {*SLOW, "httpx", "pydantic", "numpy", "rich"}


def modules_after(*arguments: str) -> set[str]:
    """What a fresh interpreter has imported once the command has run."""
    program = (
        "import json, sys\n"
        "from polar.cli.main import main\n"
        f"sys.argv = ['polar', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def polar(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not modules_after(*arguments) & HEAVY


@pytest.mark.parametrize("command", ["submit", "serve", "eval", "generate", "fleet"])
def test_help_of_one_command_does_not_import_what_carries_it_out(command: str) -> None:
    assert not modules_after(command, "--help") & SLOW


def test_one_command_does_not_import_the_others() -> None:
    modules = modules_after("results", "--help")
    assert "polar.cli.results" in modules
    assert not modules & {f"polar.cli.{name}" for name in COMMANDS if name != "results"}


@pytest.mark.parametrize(("name", "summary"), COMMANDS.items())
def test_help_lists_every_command_with_the_first_line_of_its_own(name: str, summary: str) -> None:
    assert f" {name} {summary} " in " ".join([*polar("--help").split(), ""])
    assert f" {summary} " in " ".join(polar(name, "--help").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_in_its_help(name: str) -> None:
    assert f"polar {name} " in polar(name, "--help").split("Usage:")[1].split("\n", 1)[1]


def test_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"polar {__version__}\n"


def test_a_mistyped_command_gets_a_suggestion() -> None:
    result = CliRunner().invoke(app, ["sumbit"])
    assert result.exit_code == 2
    assert "Did you mean 'submit'" in result.stderr
