"""Words that were given up for those of the field stay away, and each public word has one meaning."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import polar

SOURCE = Path(polar.__file__).parent
DOCS = SOURCE.parents[1] / "docs"

NAMES = {
    "AGENTS_A_CORE": "AGENTS_PER_CORE",
    "Bell": "Notifier",
    "Flight": "InFlight",
    "Flights": "RequestCoalescer",
    "Gateways": "Gateway",
    "Messenger": "WebhookSender",
    "Script": "Paginator",
    "Setback": "RetryableFailure",
    "Spoiled": "UngradableWorkspace",
    "Spread": "Histogram",
    "TOKENS_SAMPLED_OTHERWISE": "TOKENS_OFF_DISTRIBUTION",
    "Workshop": "NodeServices",
    "landed_at": "finished_at",
    "let_go": "remove_expired",
    "remembered": "memoized",
    "sessions_a_second": "sessions_per_second",
    "shop": "services",
}
"""Identifiers, with what to write instead."""

PHRASES = {
    "from which on": "the minimum at which",
    "has not the form of": "is not",
    "how many it were": "how many there were",
    "opens nothing any more": "is invalid or expired",
    "warm_start/": "examples/warm-start",
}
"""In pages, docstrings and messages."""


@cache
def identifiers() -> dict[str, str]:
    """Every name that the source defines or uses, with one place where it does."""
    found: dict[str, str] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.setdefault(name, str(file))
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.setdefault(name, str(file))
    return found


@cache
def texts() -> dict[Path, str]:
    pages = [page for page in DOCS.rglob("*.md") if "results" not in page.parts]
    return {path: path.read_text() for path in (*SOURCE.rglob("*.py"), *pages)}


@pytest.mark.parametrize("name", NAMES)
def test_a_retired_name_is_nowhere(name: str) -> None:
    assert name not in identifiers(), f"{identifiers()[name]}: write {NAMES[name]}"
    quoted = [str(path) for path, text in texts().items() if path.suffix == ".md" and f"`{name}`" in text]
    assert not quoted, f"write {NAMES[name]}"


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_retired_phrase_is_nowhere(phrase: str) -> None:
    found = [str(path) for path, text in texts().items() if phrase in " ".join(text.split())]
    assert not found, f"write {PHRASES[phrase]!r}"


def test_each_public_word_is_listed_once() -> None:
    table = (DOCS / "concepts.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    words = re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)[1:]
    assert len(words) > 15
    assert not [word for word, count in Counter(words).items() if count > 1]
