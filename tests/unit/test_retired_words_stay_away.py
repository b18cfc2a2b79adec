"""Words that were given up for those of the field stay away, and each public word has one meaning."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import polar
from polar.models.dashboard import NodeOverview
from polar.models.session import SessionStatus

SOURCE = Path(polar.__file__).parent
DOCS = SOURCE.parents[1] / "docs"

NAMES = {
    "AGENTS_A_CORE": "AGENTS_PER_CORE",
    "Bell": "Notifier",
    "Flight": "InFlight",
    "Flights": "RequestCoalescer",
    "Gateways": "Gateway",
    "Messenger": "WebhookSender",
    "SPOILED": "UNGRADABLE",
    "Script": "Paginator",
    "Setback": "RetryableFailure",
    "Spoiled": "UngradableWorkspace",
    "Spread": "Histogram",
    "TOKENS_SAMPLED_OTHERWISE": "TOKENS_OFF_DISTRIBUTION",
    "Workshop": "NodeServices",
    "_hung": "_number_runs",
    "_kept_routing": "_recover_routing",
    "_laid_out": "_lay_out",
    "_let_go": "_unload_adapter",
    "_summed_in_parts": "_multiply_in_parts",
    "_tracked": "_track",
    "_weights_of_now": "_adapter_fields",
    "begins_anew": "must_drain",
    "given_ids": "call_ids",
    "joined_routing": "concatenate_routing",
    "landed_at": "finished_at",
    "let_go": "remove_expired",
    "remembered": "memoized",
    "sessions_a_second": "sessions_per_second",
    "shop": "services",
    "spread": "standard_deviation",
    "untold": "unreported",
}
"""Identifiers, with what to write instead."""

PARTICIPLES = {"carried", "described", "held", "kept", "marked", "met", "placed", "spoiled", "told", "tried"}
"""No names of functions, which say what they do."""

EXAMPLES = {".md", ".py", ".sh", ".yaml"}

PHRASES = {
    "any more": "no longer",
    "from which on": "the minimum at which",
    "half replaced": "in the middle of a weight update",
    "has not the form of": "is not",
    "how many it were": "how many there were",
    "how to mend what": "how to fix what",
    "in no files": "not in files",
    "is no back-up": "is not a backup",
    "is no kind": "is not a kind",
    "is no name": "is not a name",
    "no call of a function": "not a call to a function",
    "nobody can tell": "unknown",
    "nodes that are alive": "nodes that are running",
    "of now": "current",
    "opens nothing any more": "is invalid or expired",
    "so many": "the number of",
    "start it anew": "restart it",
    "warm_start/": "examples/warm-start",
}
"""In pages, docstrings, messages and examples."""

FRAGMENT = re.compile(r"(Of|Or|Whose|That of)\b|(Newest|The session was|Their product)\.$")
"""Docstrings that say nothing without the line above them."""


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
    pages += [DOCS.parent / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    examples = [path for path in (DOCS.parent / "examples").rglob("*") if path.suffix in EXAMPLES]
    return {path: path.read_text() for path in (*SOURCE.rglob("*.py"), *pages, *examples)}


@pytest.mark.parametrize("name", NAMES)
def test_a_retired_name_is_nowhere(name: str) -> None:
    assert name not in identifiers(), f"{identifiers()[name]}: write {NAMES[name]}"
    quoted = [str(path) for path, text in texts().items() if path.suffix == ".md" and f"`{name}`" in text]
    assert not quoted, f"write {NAMES[name]}"


def test_functions_are_named_after_what_they_do() -> None:
    found = [
        f"{file.relative_to(SOURCE)}: {node.name}"
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in PARTICIPLES
    ]
    assert not found


def test_states_of_nodes_are_called_what_the_pages_call_them() -> None:
    sessions = dict.fromkeys((SessionStatus.RUNNING,), 1)
    shown = {
        NodeOverview(name="n", seconds_silent=0, version=0, sessions=leased, trouble=trouble, **flags).state
        for leased in ({}, sessions)
        for trouble in (None, "its disk is short")
        for flags in ({}, {"is_silent": True}, {"is_draining": True})
    }
    table = (DOCS / "dashboard.md").read_text().split("| a node is | when |")[1].split("\n\n")[0]
    assert shown == set(re.findall(r"^\| \*([a-z]+)\* \|", table, re.MULTILINE))


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_retired_phrase_is_nowhere(phrase: str) -> None:
    whole = (
        re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")
        if phrase[-1].isalnum()
        else re.compile(re.escape(phrase))
    )
    found = [str(path) for path, text in texts().items() if whole.search(" ".join(text.split()))]
    assert not found, f"write {PHRASES[phrase]!r}"


def test_every_docstring_can_be_read_on_its_own() -> None:
    found = [
        f"{file.relative_to(SOURCE)}:{node.lineno}"
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and FRAGMENT.match(node.value.value)
    ]
    assert not found


def test_each_public_word_is_listed_once() -> None:
    table = (DOCS / "concepts.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    words = re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)[1:]
    assert len(words) > 15
    assert not [word for word, count in Counter(words).items() if count > 1]
