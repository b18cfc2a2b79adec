"""What is Unavailable for a while is tried again with growing pauses, and errors are worded in one way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from polar.errors import Backoff, Unavailable, explain, problems, retry, retry_async

AT_ONCE = Backoff(0.0, 0.0, attempts=3)


def failing(times: int) -> Callable[[], int]:
    """A call that fails so often; then it returns how often it was called."""
    calls = 0

    def call() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise Unavailable(f"failure {calls}")
        return calls

    return call


@given(st.floats(0.01, 10), st.floats(10, 100), st.integers(1, 200))
def test_pauses_double_up_to_the_longest_with_jitter(first: float, longest: float, failures: int) -> None:
    whole = min(first * 2.0 ** min(failures - 1, 30), longest)
    assert whole / 2 <= Backoff(first, longest).pause(failures) <= whole


def test_there_is_one_pause_less_than_attempts() -> None:
    assert len(list(Backoff(1, 2, attempts=5).pauses())) == 4


async def test_a_call_is_tried_until_it_answers() -> None:
    assert retry(failing(2), AT_ONCE) == 3
    call = failing(2)

    async def awaited() -> int:
        return call()

    assert await retry_async(awaited, AT_ONCE) == 3


def test_the_last_failure_is_raised() -> None:
    with pytest.raises(Unavailable, match="failure 3"):
        retry(failing(3), AT_ONCE)


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: int
    label: str = ""


def test_validation_errors_name_each_field_and_what_it_accepts() -> None:
    with pytest.raises(ValidationError) as caught:
        Point.model_validate({"x": "a", "lable": ""})
    line = explain(caught.value, within="point")
    assert line.startswith("point.x: Input should be a valid integer")
    assert line.endswith("; point.lable: unknown key")
    assert problems(caught.value.errors(), known=Point.model_fields)[1] == (
        "lable: unknown key (did you mean 'label'?)"
    )
    with pytest.raises(ValidationError) as caught:
        Point.model_validate({})
    assert explain(caught.value) == "x: is required"
