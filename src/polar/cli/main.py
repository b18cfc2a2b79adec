"""The `polar` command: finds its subcommands lazily and prints errors meant for people as one line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperGroup

from polar import __version__
from polar.cli.options import command_group
from polar.cli.output import fail
from polar.errors import PolarError

COMMANDS = (
    "quickstart",
    "examples",
    "doctor",
    "serve",
    "top",
    "node",
    "nodes",
    "fleet",
    "engine",
    "proxy",
    "submit",
    "tasks",
    "sessions",
    "show",
    "artifacts",
    "results",
    "db",
    "policy",
    "token",
    "webhooks",
    "generate",
    "train",
    "verify",
    "eval",
    "compare",
)
"""Each is a function, or a group of sub-commands, of its own name in the module of its own name beside this
one, or in the one that `_WITH` names."""
_WITH = {"examples": "quickstart", "nodes": "node", "artifacts": "sessions"}


class _LazyCommands(Mapping[str, Any]):
    """Command name → command; a command's module is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        found = getattr(import_module(f"polar.cli.{_WITH.get(name, name)}"), name)
        if not isinstance(found, typer.Typer):
            function, found = found, command_group()
            found.command(name)(function)
        return _with_reflowed_help(typer.main.get_command(found))

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Commands(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _LazyCommands())

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolarError as error:
            fail(error)


def _with_reflowed_help(command: Any) -> Any:
    command.help = _reflowed(command.help or "")
    for inner in getattr(command, "commands", {}).values():
        _with_reflowed_help(inner)
    return command


def _reflowed(docstring: str) -> str:
    """Help text whose paragraphs fit any terminal; indented ones, such as examples, keep their lines."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    kept = (f"\b\n{text}" if text.startswith(" ") else " ".join(text.split()) for text in paragraphs)
    return "\n\n".join(kept)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"polar {__version__}")
        raise typer.Exit


_HELP = """
Train language agents with reinforcement learning through unmodified agent harnesses.

New here? This rolls out small tasks from start to finish on this machine:

  polar quickstart

Then, with `polar serve --warm-start` in one terminal, in another:

  polar examples
  polar submit examples/quickstart --wait
  polar results --out data
"""

app = typer.Typer(
    cls=_Commands,
    help=_reflowed(_HELP),
    no_args_is_help=True,
    # Plain help: typer's decorated form costs as much time as everything else together.
    rich_markup_mode=None,
    # Locals of a frame may hold a token or a session's key.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def polar(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main() -> None:
    app()
