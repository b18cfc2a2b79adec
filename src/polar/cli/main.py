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
    "callbacks",
    "generate",
    "train",
    "verify",
    "eval",
    "compare",
)
"""Each is the function of its own name in the module of its own name beside this one."""


class _LazyCommands(Mapping[str, Any]):
    """Command name → command; a command's module is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        function = getattr(import_module(f"polar.cli.{name}"), name)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, help=_reflowed(function.__doc__))(function)
        return typer.main.get_command(single)

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
