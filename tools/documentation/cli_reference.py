"""The CLI reference: every command with its arguments and options, from its own definition."""

from __future__ import annotations

from typing import Any

import click
import typer.main

from polar.cli.main import COMMANDS, app
from tools.documentation.docstrings import cell, code, table


def page() -> str:
    group: Any = typer.main.get_command(app)
    with click.Context(group, info_name="polar") as context:
        commands = [_command(group.get_command(context, name), name) for name in COMMANDS]
    return "\n\n".join(
        [
            "# Commands",
            "`polar COMMAND --help` prints the same. Commands that talk to a server use the one started"
            " in this directory, unless `$POLAR_SERVER` and `$POLAR_TOKEN` or `--server` and `--token-file`"
            " say otherwise.",
            *commands,
        ]
    )


def _command(command: Any, name: str, level: int = 2) -> str:
    with click.Context(command, info_name=f"polar {name}") as context:
        usage = " ".join(command.collect_usage_pieces(context))
        arguments = [
            _argument(each, context) for each in command.params if each.param_type_name == "argument"
        ]
        options = [_option(each, context) for each in command.params if each.param_type_name == "option"]
    parts = [f"{'#' * level} polar {name}", f"```\npolar {name} {usage}\n```", _help(command.help or "")]
    if any(meaning for _, meaning in arguments):
        parts.append(table(("argument", ""), arguments))
    if options := [option for option in options if option]:
        parts.append(table(("option", ""), options))
    for inner, sub_command in getattr(command, "commands", {}).items():
        parts.append(_command(sub_command, f"{name} {inner}", level + 1))
    return "\n\n".join(parts)


def _argument(argument: Any, context: click.Context) -> tuple[str, ...]:
    name, meaning = argument.get_help_record(context) or (argument.make_metavar(context), "")
    return code(name), cell(meaning)


def _option(option: Any, context: click.Context) -> tuple[str, ...]:
    record = option.get_help_record(context)
    return (code(record[0]), cell(record[1])) if record and "--help" not in record[0] else ()


def _help(text: str) -> str:
    """Return paragraphs; those that begin with a backspace, and so keep their lines, are examples."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b\n"):
            lines = paragraph.removeprefix("\b\n").splitlines()
            paragraphs.append("```bash\n" + "\n".join(line.strip() for line in lines) + "\n```")
        elif paragraph.startswith("Example: "):
            paragraphs.append(f"```bash\n{paragraph.removeprefix('Example: ').strip()}\n```")
        elif paragraph.strip() not in ("Example:", "Examples:"):
            paragraphs.append(cell(paragraph))
    return "\n\n".join(paragraphs)
