"""Every end of an agent is scored, or is a failure of one kind, by what can be shown and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from polar.engines.base import EngineDown
from polar.errors import InvalidInput, NotInstalled, PolarError, Unavailable
from polar.evaluators.base import EvaluationFailed
from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import OUTAGE, Completion
from polar.models.session import AgentEnd, FailureReason
from polar.node import failures
from polar.node.agent import AgentRun
from polar.node.failures import BudgetExceeded, Disturbed, ModelCalls, reason_for, refuse_disturbed
from polar.node.sandboxes import PreparationFailed
from polar.recordings.capture import CaptureError, CaptureUnwritable
from polar.runtimes.base import ImageNotFound, Output, SandboxUnavailable
from tests.fakes.control_plane import idle_task

WHOLE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)


def call(finish_reason: FinishReason, *, is_outage: bool = False) -> Completion:
    extra = {"error": "EngineDown: gone", OUTAGE: "yes"} if is_outage else {}
    nothing = np.empty(0, np.int32)
    said = Message(Role.ASSISTANT, "")
    return Completion(
        "c", 0, nothing, nothing, np.empty(0, np.float32), nothing, (), said, finish_reason, extra=extra
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SandboxUnavailable("no memory"), FailureReason.INFRASTRUCTURE),
        (NotInstalled("no bwrap"), FailureReason.INFRASTRUCTURE),
        (EngineDown("gone"), FailureReason.INFRASTRUCTURE),
        (Unavailable("no server"), FailureReason.INFRASTRUCTURE),
        (Disturbed("killed"), FailureReason.INFRASTRUCTURE),
        (CaptureUnwritable("the disk is full"), FailureReason.INFRASTRUCTURE),
        (CaptureError("not a capture"), FailureReason.TASK),
        (OSError(9, "Bad file descriptor"), FailureReason.INFRASTRUCTURE),
        (ImageNotFound("no such image"), FailureReason.TASK),
        (PreparationFailed("exit code 1"), FailureReason.TASK),
        (EvaluationFailed("no verdict"), FailureReason.TASK),
        (BudgetExceeded("init_seconds"), FailureReason.TASK),
        (InvalidInput("options"), FailureReason.TASK),
    ],
)
def test_an_error_is_the_task_s_own_only_where_somebody_foresaw_it(
    error: Exception, reason: FailureReason
) -> None:
    assert reason_for(error) is reason


@given(
    end=st.sampled_from([AgentEnd.EXITED, AgentEnd.TIMEOUT]),
    exit_code=st.integers(-64, 255),
    answered=st.integers(1, 5),
    allowed=st.booleans(),
)
def test_no_exit_code_lets_an_agent_that_was_answered_escape_its_verdict(
    end: AgentEnd, exit_code: int, answered: int, allowed: bool
) -> None:
    task = idle_task(allow_no_model_calls=allowed)
    refuse_disturbed(AgentRun(end=end, exit_code=exit_code), ModelCalls(answered), task)


@given(
    end=st.sampled_from([AgentEnd.EXITED, AgentEnd.TIMEOUT, AgentEnd.BUDGET]),
    exit_code=st.integers(-64, 255),
    calls=st.sampled_from([ModelCalls(0), ModelCalls(0, "gone"), ModelCalls(3, "gone")]),
)
def test_nothing_is_scored_that_was_not_answered_to_its_end(
    end: AgentEnd, exit_code: int, calls: ModelCalls
) -> None:
    assume(not calls.answered or exit_code or end is not AgentEnd.EXITED)
    with pytest.raises(PolarError):
        refuse_disturbed(AgentRun(end=end, exit_code=exit_code), calls, idle_task())


def test_an_agent_that_ends_well_is_scored_although_its_last_call_met_an_outage() -> None:
    refuse_disturbed(AgentRun(end=AgentEnd.EXITED, exit_code=0), ModelCalls(3, "gone"), idle_task())


def test_the_error_names_the_budget_that_no_answer_fitted_in() -> None:
    agent = AgentRun(end=AgentEnd.BUDGET, spent_budget="3 model calls have failed")
    with pytest.raises(BudgetExceeded, match="before any model call was answered: 3 model calls have failed"):
        refuse_disturbed(agent, ModelCalls(), idle_task())


def test_an_agent_killed_from_outside_is_not_scored_whatever_the_task_says() -> None:
    agent = AgentRun(end=AgentEnd.EXITED, exit_code=-9, killed_from_outside=True)
    with pytest.raises(Disturbed, match="killed from outside"):
        refuse_disturbed(agent, ModelCalls(7), idle_task(allow_no_model_calls=True))


def test_the_error_repeats_what_the_agent_said_last(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    said.write_text("x" * 9_000 + "\nno such file: my-agent\n")
    agent = AgentRun(end=AgentEnd.EXITED, exit_code=127, stderr=Output(said))
    with pytest.raises(Disturbed, match=r"exit code 127: x+\nno such file: my-agent\)"):
        refuse_disturbed(agent, ModelCalls(), idle_task())


@given(st.lists(st.sampled_from([*WHOLE, FinishReason.ERROR, FinishReason.CANCELLED]), max_size=6))
def test_calls_count_as_answered_only_where_the_engine_said_something(reasons: list[FinishReason]) -> None:
    calls = ModelCalls.of([call(reason) for reason in reasons])
    assert calls == ModelCalls(sum(reason in WHOLE for reason in reasons))


def test_an_outage_is_what_the_last_call_met_that_the_session_s_end_did_not_break_off() -> None:
    down = call(FinishReason.ERROR, is_outage=True)
    fine, open_call = call(FinishReason.STOP), call(FinishReason.CANCELLED)
    assert ModelCalls.of([fine, down, open_call]) == ModelCalls(1, "EngineDown: gone")
    assert ModelCalls.of([down, fine, open_call]) == ModelCalls(1, None)
    assert ModelCalls.of([call(FinishReason.ERROR)]) == ModelCalls(0, None)


def test_work_is_not_scored_where_an_answer_could_not_be_recorded() -> None:
    agent = AgentRun(end=AgentEnd.EXITED, exit_code=0, lost_call=True)
    with pytest.raises(Disturbed, match="could not be recorded"):
        refuse_disturbed(agent, ModelCalls(3), idle_task())


def test_work_is_not_scored_while_the_nodes_own_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures.refuse_full_disk(tmp_path)
    monkeypatch.setattr(failures, "free_bytes", lambda _directory: 4096)
    with pytest.raises(failures.Disturbed, match="disk is full"):
        failures.refuse_full_disk(tmp_path)
