"""Every session that did not pass has a reason that equal failures share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evals.report import LONGEST_REASON, attempt_of, error_class
from polar.models.session import AgentEnd, SessionStatus
from tests.fakes.recordings import recording
from tests.fakes.reports import attempt


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"reward": 0.5}, "agent finished, reward too low"),
        ({"reward": 0.0, "agent_end": AgentEnd.TIMEOUT}, "agent ran out of time"),
        ({"reward": 1.0, "agent_end": AgentEnd.TIMEOUT}, None),
        (
            {"reward": 0.0, "agent_end": AgentEnd.BUDGET},
            "agent used up its budget of completions or tokens",
        ),
        ({"reward": 0.0, "completions": 0, "exit_code": 1}, "agent made no model call"),
        ({"reward": 0.0, "exit_code": 3}, "agent exited with 3"),
        ({"reward": None}, "failed: no sandbox"),
        ({"reward": None, "error": None}, "failed: no reason given"),
        ({"reward": 1.0, "status": SessionStatus.FAILED, "error": "late"}, "failed: late"),
        ({"reward": None, "status": SessionStatus.CANCELLED}, "cancelled"),
        ({"reward": 0.0, "agent_end": AgentEnd.NOT_STARTED}, "agent not started"),
    ],
)
def test_a_session_that_did_not_pass_says_why(changes: dict[str, Any], reason: str | None) -> None:
    made = attempt("t", 0, **changes)
    assert made.reason(1.0) == reason
    assert made.passed(1.0) == (reason is None)


def test_errors_that_differ_in_particulars_are_one_class() -> None:
    one = "sandbox 9f8e7d6c5b4a: exec of /tmp/a-1/run.sh failed after 3.5 s at http://127.0.0.1:1\nmore"
    other = "sandbox 0a1b2c3d4e5f: exec of /var/lib/x/run.sh failed after 12 s at http://127.0.0.1:2"
    assert error_class(one) == error_class(other) == "sandbox ID: exec of PATH failed after N s at URL"


@given(st.text(max_size=400))
def test_a_class_is_one_short_line(error: str) -> None:
    made = error_class(error)
    assert len(made) <= LONGEST_REASON
    assert "\n" not in made


def test_cost_comes_from_the_recording() -> None:
    made = recording()
    kept = attempt_of(made.result, made.completions)
    assert kept.prompt_tokens == sum(len(completion.prompt_ids) for completion in made.completions)
    assert kept.sampled_tokens == sum(len(completion.sampled_ids) for completion in made.completions)
    assert kept.completions == 3
    assert kept.excluded == {"cancelled": len(made.completions[2].sampled_ids)}
    assert (kept.seconds, kept.agent_seconds) == (3.75, 3.25)
