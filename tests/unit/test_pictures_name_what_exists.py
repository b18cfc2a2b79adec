"""The pictures in docs/architecture.md are small, and name files, classes and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polar

ROOT = Path(polar.__file__).parent
DOCS = ROOT.parents[1] / "docs" / "architecture.md"
PICTURE = re.compile(r"^### (`[^\n]+`)\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"([\w/]+\.py)(?::([\w.]*\w))?")
FLOWING = (
    "recordings gateway rendering engines runtimes evaluators node store rollout trajectory training app"
)
MOST_LINES = 13
MOST_COLUMNS = 115


def pictures() -> list[tuple[str, str]]:
    part = DOCS.read_text().split("\n## Rooms in pictures\n")[1].split("\n## ")[0]
    return PICTURE.findall(part)


def file_of(path: str, rooms: list[str]) -> Path | None:
    """The file that a picture names: of the room itself, unless the path begins with another."""
    places = (*(ROOT / room / path for room in rooms), ROOT / path)
    return next((place for place in places if place.is_file()), None)


def defines(text: str, names: str) -> bool:
    """Whether there is a class or function for each part of `Class.method`."""
    parts = filter(None, names.split("."))
    return all(re.search(rf"^ *(async )?(def|class) {part}\b", text, re.MULTILINE) for part in parts)


def test_every_room_in_which_something_flows_has_a_picture() -> None:
    pictured = {room for title, _ in pictures() for room in re.findall(r"`(\w+)`", title)}
    assert pictured == set(FLOWING.split())


@pytest.mark.parametrize(("title", "picture"), pictures())
def test_what_a_picture_names_exists(title: str, picture: str) -> None:
    rooms = re.findall(r"`(\w+)`", title)
    wrong = [
        f"{path}:{names}"
        for path, names in REFERENCE.findall(picture)
        if (file := file_of(path, rooms)) is None or not defines(file.read_text(), names)
    ]
    assert not wrong


@pytest.mark.parametrize(("title", "picture"), pictures())
def test_a_picture_is_small(title: str, picture: str) -> None:
    lines = picture.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_COLUMNS
