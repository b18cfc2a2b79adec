"""The `polar` command: finds its subcommands lazily and prints errors meant for people as one line."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperGroup

from polar import __version__
from polar.cli.options import command_group
from polar.errors import PolarError

COMMANDS = {
    "quickstart": "Roll out the example tasks from start to finish.",
    "examples": "Copy the packaged examples here.",
    "doctor": "Check this machine, its settings and the engine, and say how to fix problems.",
    "serve": "Run the whole system on this machine until Ctrl-C.",
    "top": "Show nodes, pools, throughput, rewards, the policy and the engines, until Ctrl-C.",
    "node": "Join a rollout server and run its sessions on this machine.",
    "nodes": "Show the nodes and how full they are, drain one, or resume it.",
    "fleet": "Run nodes on a Ray cluster, one a machine, for a rollout server.",
    "engine": "Serve a model in a subset of vLLM's API.",
    "proxy": "Run a program against the gateway and keep every token.",
    "submit": "Submit tasks from files, or those of an earlier run again.",
    "tasks": "List tasks, show or cancel one, or try files of tasks out before they are submitted.",
    "runs": "List runs: trainings, evaluations, generations, submissions and those of other trainers.",
    "sessions": "List sessions, show the state of one, or cancel one.",
    "show": "Show what one session's agent said and did, token by token.",
    "watch": "Follow what one session's agent says and does, token by token, until it ends.",
    "replay": "Run an ended session again, with its model calls answered from its recording.",
    "branch": "Add sessions to a task that begin as one of its ended sessions did, and go on by themselves.",
    "artifacts": "List what was kept of a session's files and logs, print one, or unpack them all.",
    "results": "Print the results of ended sessions, or write them to files.",
    "db": "Bring a server's database up to date, back it up, or restore it.",
    "policy": "Show the policy's version, pause it, replace its weights, or resume it.",
    "token": "Make, list and revoke tokens; this needs an admin's.",
    "webhooks": "Show the URLs that tasks want their results sent to, and how far each has got.",
    "generate": "Roll a taskset out and write a dataset.",
    "train": "Train a policy.",
    "verify": "Check what was recorded of sessions.",
    "eval": "Evaluate harnesses and models on tasksets.",
    "compare": "Compare two evaluations, paired by task and sample.",
}
"""Each with the first line of its help. It is a function, or a group of sub-commands, of its own name in the
module of its own name beside this one, or in the one that `_WITH` names. Modules are imported when their
command is asked for, so that `polar --help` need not wait for them."""
_WITH = {
    "examples": "quickstart",
    "nodes": "node",
    "artifacts": "sessions",
    "watch": "show",
    "replay": "branch",
    "webhooks": "results",
    "compare": "eval",
}


class _Commands(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, dict.fromkeys(COMMANDS))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = getattr(import_module(f"polar.cli.{_WITH.get(cmd_name, cmd_name)}"), cmd_name)
        if not isinstance(found, typer.Typer):
            function, found = found, command_group()
            found.command(cmd_name)(function)
        return _with_reflowed_help(typer.main.get_command(found))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolarError as error:
            from polar.cli.output import say

            say(f"error: {error}", typer.colors.RED)
            raise typer.Exit(1) from None


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
