"""What the pages of bridges name of Polar's exists: settings, modules, files, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from polar.cli.main import COMMANDS
from polar.config.settings import Settings
from polar.models.component import Component
from polar.trajectory.learnable import Excluded
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.trainer_types import bridge

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "bridges").glob("*.md"))
SNIPPET = re.compile(r"`((?:engine|builder): \{.*?\})`")
SETTING = re.compile(r"`((?:engine|server|gateway|node)\.[a-z_.]+)`")
NAME = re.compile(r"polar\.bridges\.([a-z_]+)\.(\w+)")
FILE = re.compile(r"(?:examples|tests|suites)/[\w/.-]+\w")
COMMAND = re.compile(r"^polar (\w+)", re.MULTILINE)
TARGET = re.compile(r"`make ([a-z-]+)`")
LEFT_OUT = re.compile(r"^\| `((?:tokens|sessions)_\w+)` \|", re.MULTILINE)
TRAINERS = {"verl", "slime", "skyrl", "prime_rl", "areal"}

everywhere = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def found(pattern: re.Pattern[str], page: Path) -> Iterator[Any]:
    yield from pattern.findall(page.read_text())


@pytest.mark.parametrize("pattern", [SNIPPET, SETTING, NAME, FILE, COMMAND, TARGET], ids=str)
def test_pages_name_something_of_every_kind(pattern: re.Pattern[str]) -> None:
    assert any(pattern.search(page.read_text()) for page in PAGES)


@everywhere
def test_snippets_of_configuration_are_valid(page: Path) -> None:
    for snippet in found(SNIPPET, page):
        given = yaml.safe_load(snippet.replace("url: …", "url: http://host:8000"))
        if "engine" in given:
            Settings.model_validate(given)
        else:
            spec = Component.model_validate(given["builder"])
            PrefixMerging.Options.model_validate(spec.options)


@everywhere
def test_settings_exist(page: Path) -> None:
    for path in found(SETTING, page):
        settings: type[BaseModel] = Settings
        *sections, name = path.split(".")
        for section in sections:
            annotation = settings.model_fields[section].annotation
            assert isinstance(annotation, type), path
            settings = annotation
        assert name in settings.model_fields, path


@everywhere
def test_modules_have_what_is_named_of_them(page: Path) -> None:
    for module, name in found(NAME, page):
        made = bridge(module) if module in TRAINERS else import_module(f"polar.bridges.{module}")
        assert hasattr(made, name), f"polar.bridges.{module}.{name}"


@everywhere
def test_files_and_commands_are_there(page: Path) -> None:
    assert [path for path in found(FILE, page) if not (ROOT / path).exists()] == []
    targets = (ROOT / "Makefile").read_text()
    assert [name for name in found(TARGET, page) if f"\n{name}:" not in targets] == []
    assert [name for name in found(COMMAND, page) if name not in COMMANDS] == []


def test_reasons_to_leave_out_are_those_there_are() -> None:
    (index,) = (page for page in PAGES if page.name == "index.md")
    # How stale a token may be is for the trainer to say.
    ours = {one for one in Excluded if one.startswith(("tokens_", "sessions_"))} - {Excluded.TOKENS_STALE}
    assert set(found(LEFT_OUT, index)) == ours
