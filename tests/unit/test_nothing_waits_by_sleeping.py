"""Tests wait for what happens and not for a while: a sleep is too short on one machine, too long on all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAITING = "tests/waiting.py"
FAULT = "how long a fault lasts is what a plan of faults says"
ALLOWED = {
    "tests/fakes/answering_engine.py:completions": "a call is in flight for as long as its engine takes",
    "tests/faults/killable_postgres.py:killed": FAULT,
    "tests/faults/link.py:_pass_on": "a slow link holds data back for a while",
    "tests/faults/link.py:_repeat": "the copy of a request comes some time after it",
    "tests/faults/mischief.py:_bad": FAULT,
    "tests/faults/mischief.py:_full": FAULT,
    "tests/faults/mischief.py:follow": "when a fault begins is what a plan of faults says",
    "tests/faults/part.py:_keep": "a supervisor of processes lets a moment pass before it starts one again",
    "tests/faults/part.py:killed": FAULT,
}
"""Functions in which time itself is what is wanted, and why."""


def sleeps(source: str) -> Iterator[str]:
    """The functions that sleep for longer than a turn of the event loop."""

    def walk(node: ast.AST, function: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and _is_sleep(node):
            yield function
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    return walk(ast.parse(source), "the module")


def _is_sleep(call: ast.Call) -> bool:
    """A sleep by name, or a wait for less than a second, which nobody expects to end sooner."""
    called = ast.unparse(call.func)
    if called.rpartition(".")[2] == "sleep":
        return [ast.unparse(argument) for argument in call.args] != ["0"]
    limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    return called == "asyncio.wait" and any(ast.unparse(limit).startswith("0.") for limit in limits)


def test_sleeps_are_in_one_place() -> None:
    files = [path for directory in ("tests", "suites") for path in (ROOT / directory).rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)}:{function}"
        for path in files
        if str(path.relative_to(ROOT)) != WAITING
        for function in sleeps(path.read_text())
    }
    assert not sorted(found - ALLOWED.keys()), f"wait for an event, or with {WAITING}"
    assert not sorted(ALLOWED.keys() - found), "these no longer sleep"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("await asyncio.sleep(0)", False),
        ("await asyncio.sleep(0.01)", True),
        ("time.sleep(seconds)", True),
        ("sleep(1)", True),
        ("await asyncio.sleep(delay=1)", True),
        ("await asyncio.wait({task}, timeout=0.2)", True),
        ("await asyncio.wait({task}, timeout=30)", False),
        ("await asyncio.sleep(0 if is_quick else 1)", True),
    ],
)
def test_a_sleep_is_found_however_it_is_written(line: str, is_found: bool) -> None:
    assert list(sleeps(f"async def wait():\n    {line}")) == ["wait"] * is_found
