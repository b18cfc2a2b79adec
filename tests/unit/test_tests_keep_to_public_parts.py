"""Tests look at what users see: a name that begins with an underscore is its owner's to change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "suites/bridges/test_trl_learns_from_any_group.py:_logs": "TRL tells advantages nowhere else",
    "tests/unit/engines/test_sglang_client_fails_closed.py:_SglangReader": (
        "thousands of streams are cut at random, which a server for each would make slow"
    ),
    "tests/unit/engines/test_vllm_is_started_here.py:_GPU_FILES": (
        "the machine of the test may have a GPU, and is to look as if it had none"
    ),
    "tests/unit/gateway/conftest.py:_RequestContextManager": "aiohttp's name for the type of its own answer",
    "tests/unit/node/test_workers_leave_the_loop_alone.py:_exit": "os._exit is public",
    "tests/unit/rendering/test_any_template_is_rendered_exactly.py:_form": (
        "in which form a template takes messages was found out there, and there is no standard"
    ),
    "tests/unit/telemetry/test_metrics_are_documented.py:_collector_to_names": "see _labelnames",
    "tests/unit/telemetry/test_metrics_are_documented.py:_labelnames": (
        "prometheus_client names the labels of what was never counted nowhere else"
    ),
    "tests/unit/telemetry/test_metrics_are_documented.py:_name": "see _labelnames",
    "tests/unit/telemetry/test_metrics_are_documented.py:_type": "see _labelnames",
    "tests/unit/training/test_training_keeps_the_gpu_busy.py:_granule": "only a GPU pads its batches",
}
"""Private names that tests use all the same, and why."""


def private_names(source: str) -> Iterator[str]:
    """Those of others: what a class keeps for itself is its own."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=owner, attr=name) if ast.unparse(owner) not in (
                "self",
                "cls",
                "super()",
            ):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=arguments):
                texts = (each.value for each in arguments[:2] if isinstance(each, ast.Constant))
                yield from (str(text).rpartition(".")[2] for text in texts)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_are_left_to_their_owners() -> None:
    files = [path for directory in ("tests", "suites") for path in (ROOT / directory).rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in files
        for name in private_names(path.read_text())
        if is_private(name)
    }
    assert not sorted(found - ALLOWED.keys()), "use the public part, or say above why not"
    assert not sorted(ALLOWED.keys() - found), "these are no longer used"


def test_private_names_are_found_in_every_form() -> None:
    source = """
from polar.thing import _one
polar.thing._two(3)
monkeypatch.setattr(thing, "_three", 3)
monkeypatch.setattr("polar.thing._four", 4)
self._own = thing.__doc__
"""
    assert [name for name in private_names(source) if is_private(name)] == ["_one", "_three", "_four", "_two"]
