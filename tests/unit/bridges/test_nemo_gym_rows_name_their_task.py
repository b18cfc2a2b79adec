"""A row of NeMo Gym carries its task as an object or as text; anything else is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from polar.bridges.nemo_gym import task_of
from polar.bridges.sessions import TASK
from polar.errors import InvalidInput

TEMPLATE = {
    "harness": {"name": "shell", "options": {"command": "true"}},
    "runtime": "bubblewrap",
    "evaluator": "session_completed",
}


@pytest.mark.parametrize("given", [{"id": "a"}, '{"id": "a"}'])
def test_a_task_may_be_text(given: Any) -> None:
    body = {"responses_create_params": {"input": "Say hello."}, TASK: given}
    task = task_of(body, TEMPLATE)
    assert (task.id, task.instruction) == ("a", "Say hello.")


@pytest.mark.parametrize(("given", "reason"), [("[1]", "must be a mapping"), ("{", "not JSON")])
def test_a_task_that_is_none_is_refused(given: str, reason: str) -> None:
    body = {"responses_create_params": {"input": "Say hello."}, TASK: given}
    with pytest.raises(InvalidInput, match=reason):
        task_of(body, TEMPLATE)
