"""Every field of a task is validated, and the message names it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from polar.errors import explain
from polar.models.task import TaskSpec

GOOD: dict[str, Any] = {"id": "t", "instruction": "do it", "harness": "pi", "evaluator": "command"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": "a b"}, "id"),
        ({"id": "../up"}, "id"),
        ({"instruction": ""}, "instruction"),
        ({"harness": "No Such Name"}, "harness"),
        ({"harness": {"name": "pi", "option": {}}}, "harness.option"),
        ({"samples": 0}, "samples"),
        ({"samples": 1025}, "samples"),
        ({"budgets": {"run_seconds": -1}}, "budgets.run_seconds"),
        ({"budgets": {"run_minutes": 1}}, "budgets.run_minutes"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"files": {"/etc/passwd": {"text": ""}}}, "files"),
        ({"files": {"a/../../b": {"text": ""}}}, "files"),
        ({"files": {"a": {"text": "x", "base64": "eA=="}}}, "files.a"),
        ({"files": {"a": {"base64": "?"}}}, "files.a"),
        ({"priority": 101}, "priority"),
        ({"smaples": 4}, "smaples"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TaskSpec.model_validate(GOOD | change)
    assert field in explain(caught.value)


def test_a_bare_name_stands_for_a_component_without_options() -> None:
    assert TaskSpec.model_validate(GOOD) == TaskSpec.model_validate(
        GOOD | {"harness": {"name": "pi"}, "evaluator": {"name": "command", "options": {}}}
    )
