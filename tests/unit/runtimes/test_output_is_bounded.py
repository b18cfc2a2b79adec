"""No task can have a node keep, and read into memory, more output than it has room for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from polar.runtimes.base import MIB
from polar.runtimes.local import LocalOptions


def test_a_task_may_ask_for_more_output_but_not_for_any_amount() -> None:
    assert LocalOptions(output_limit=256 * MIB).output_limit == 256 * MIB
    with pytest.raises(ValidationError, match="output_limit"):
        LocalOptions(output_limit=10**15)
