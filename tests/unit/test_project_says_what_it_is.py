"""What people look for in a project before they use it is there, and agrees with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import polar
from polar.app.quickstart import WARM_START

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (polar.__version__, "Apache-2.0")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_changelog_begins_with_this_version() -> None:
    heading = next(
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    )
    assert heading.startswith(f"## {polar.__version__}")


MEASURED = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
ROWS = [row for row in MEASURED.splitlines() if "](" in row]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_numbers_of_the_readme_stand_on_the_pages_it_names(row: str) -> None:
    pages = " ".join((ROOT / page).read_text() for page in re.findall(r"\]\(([^)#]+\.md)", row))
    _, _, claim = re.sub(r"\]\([^)]*\)", "]", row).partition(" | ")
    numbers = re.findall(r"\d+(?:[.,]\d+)*(?:e-\d+)?", claim)
    assert numbers
    assert [number for number in numbers if number not in pages] == []


@pytest.mark.parametrize("name", ["SECURITY.md", "LICENSE"])
def test_reports_and_licence_have_their_page(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_the_adapter_has_a_card_and_a_licence() -> None:
    _, head, _ = (WARM_START / "README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(head)
    assert (card["license"], card["base_model"]) == ("apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (WARM_START / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    config = json.loads((WARM_START / "adapter_config.json").read_text())
    assert f"rank {config['r']}, alpha {config['lora_alpha']}" in (WARM_START / "README.md").read_text()
