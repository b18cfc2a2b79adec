"""The manifests under examples/ call commands, options and settings that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from polar.cli.main import app
from polar.config.settings import Settings

EXAMPLES = Path(__file__).parents[4] / "examples"
MANIFESTS = sorted((EXAMPLES / "kuberay").glob("*.yaml"))


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def commands(value: Any) -> list[list[str]]:
    """Every container's command, wherever it stands."""
    if isinstance(value, dict):
        own = [value["command"]] if "command" in value else []
        return own + [found for inner in value.values() for found in commands(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in commands(inner)]
    return []


def polar_calls() -> list[list[str]]:
    calls = [command for command in commands(documents()) if command[0] == "polar"]
    for script in (EXAMPLES / "slurm").iterdir():
        text = re.sub(r"\\\n\s*", "", re.sub(r"#.*", "", script.read_text()))
        lines = re.findall(r"^polar .*$", text, re.MULTILINE)
        calls += [[word.strip('"') for word in line.rstrip(" &").split()] for line in lines]
    return calls


@pytest.mark.parametrize("call", polar_calls(), ids=" ".join)
def test_every_call_names_a_command_and_options_that_there_are(call: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, call[1])
    command = getattr(command, "commands", {}).get(call[2], command)
    options = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    assert {word.split("=")[0] for word in call[2:] if word.startswith("-")} <= options


def test_there_are_calls_of_every_kind() -> None:
    assert {"serve", "fleet", "submit", "results"} <= {call[1] for call in polar_calls()}


def test_settings_in_manifests_are_valid() -> None:
    (written,) = [document["data"]["polar.yaml"] for document in documents() if "data" in document]
    assert Settings.model_validate(yaml.safe_load(written)).server.port == 8700
