"""No command takes a token as an argument: it comes from a file or the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from typer.testing import CliRunner

from polar.cli import options
from polar.cli.main import COMMANDS, app
from polar.errors import InvalidInput


def test_no_command_takes_a_token_on_its_command_line() -> None:
    group: Any = typer.main.get_command(app)
    with click.Context(group) as context:
        for name in COMMANDS:
            command = group.get_command(context, name)
            assert "--token" not in {option for parameter in command.params for option in parameter.opts}, (
                name
            )
    refused = CliRunner().invoke(app, ["node", "--token", "x" * 16])
    assert refused.exit_code == 2
    assert "--token-file" in refused.output


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-a-node\n")
    assert options.token_in(str(file)) == "a-token-of-a-node"
    assert options.token_in(None) is None


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput, match="--token-file"):
        options.token_in(str(file))
