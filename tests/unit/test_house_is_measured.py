"""`make house` counts what it says, on a package made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import house

MODULES = {
    "__init__.py": "",
    "errors.py": "class Refused(Exception):\n    pass\n",
    "store/__init__.py": "",
    "store/rows.py": "from polar import errors\n\nclass _Refused:\n    pass\n",
    "store/tables.py": "def long():\n" + "    print()\n" * 60,
    "cli/__init__.py": "",
    "cli/main.py": "from polar.store.rows import _Refused\nfrom polar.errors import Refused as Other\n",
}


@pytest.fixture
def modules(tmp_path: Path) -> list[house.Module]:
    for name, text in MODULES.items():
        path = tmp_path / "src" / "polar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.read_modules(tmp_path / "src")


def test_lines_files_and_top_names(modules: list[house.Module]) -> None:
    values = {measure.name: measure.value for measure in house.measures(modules)}
    assert values["lines of source"] == sum(text.count("\n") for text in MODULES.values())
    assert values["files"] == len(MODULES)
    assert house.top_names(modules) == {"errors", "store", "cli"}


def test_the_longest_function_is_named_with_its_place(modules: list[house.Module]) -> None:
    longest = house.functions(modules)[0]
    assert (longest.name, longest.place, longest.lines) == ("long", "src/polar/store/tables.py:1", 61)


def test_duplicate_classes_and_single_importers_are_listed(modules: list[house.Module]) -> None:
    assert house.duplicate_classes(modules) == {"Refused": ["polar.errors", "polar.store.rows"]}
    assert house.single_importers(modules) == {"polar.store.rows": "polar.cli.main"}


def test_a_missed_target_is_marked() -> None:
    assert "missed" in str(house.Measure("files", 3, 2))
    assert "missed" not in str(house.Measure("files", 2, 2))


def test_what_was_reached_on_the_way_to_a_target_is_not_given_up() -> None:
    assert not house.Measure("lines", 52, 45, limit=52).is_refused
    assert house.Measure("lines", 53, 45, limit=52).is_refused
    assert house.Measure("files", 321, 320).is_refused
