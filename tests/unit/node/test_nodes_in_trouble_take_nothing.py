"""A node on which everything fails, or whose disk is short, takes no sessions, says so, and tries again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config.settings import NodeSettings
from polar.models.session import FailureReason, SessionResult, SessionStatus
from polar.models.views import MOST_LEASES
from polar.node.admission import Admission, Breaker
from polar.runtimes.base import SandboxUnavailable
from polar.runtimes.disk import SMALLEST_BYTES, fitting_size
from tests.fakes.control_plane import Clock


def ended(status: SessionStatus, failure: FailureReason | None = None) -> SessionResult:
    return SessionResult(
        session_id="t.0", task_id="t", sample=0, attempt=1, status=status, failure=failure, error="no engine"
    )


BROKEN = ended(SessionStatus.FAILED, FailureReason.INFRASTRUCTURE)
FINE = ended(SessionStatus.COMPLETED)


def tripped(clock: Clock) -> Breaker:
    breaker = Breaker(3, 30.0, clock)
    for task in ("a", "b", "a"):
        assert breaker.allowed() == MOST_LEASES
        breaker.ended(f"{task}@1", task, BROKEN)
    return breaker


def test_a_node_on_which_everything_fails_takes_nothing_and_says_why() -> None:
    breaker = tripped(Clock())
    assert breaker.allowed() == 0
    assert breaker.reason == "sessions failed here in a row (3), the last with: no engine"


def test_one_session_is_tried_after_the_pause_and_its_success_opens_the_node() -> None:
    clock = Clock()
    breaker = tripped(clock)
    clock.now += 30.0
    assert breaker.allowed() == 1
    breaker.began("trial@2")
    assert breaker.allowed() == 0
    breaker.ended("trial@2", "b", FINE)
    assert (breaker.allowed(), breaker.reason) == (MOST_LEASES, None)


def test_a_trial_that_fails_makes_the_next_pause_longer_up_to_a_bound() -> None:
    clock = Clock()
    breaker = tripped(clock)
    for pause in (30.0, 60.0, 120.0, 120.0):
        clock.now += pause - 1.0
        assert breaker.allowed() == 0
        clock.now += 1.0
        assert breaker.allowed() == 1
        breaker.began("trial@2")
        breaker.ended("trial@2", "b", BROKEN)


def test_a_trial_is_rather_of_a_task_that_did_not_fail_here() -> None:
    clock = Clock()
    breaker = tripped(clock)
    assert list(breaker.suspects) == ["a", "b"]
    clock.now += 30.0
    breaker.began("trial@2")
    breaker.ended("trial@2", "c", FINE)
    assert not breaker.suspects


def test_a_trial_that_was_given_back_is_followed_by_another() -> None:
    clock = Clock()
    breaker = tripped(clock)
    clock.now += 30.0
    breaker.began("trial@2")
    breaker.ended("trial@2", "b", None)
    assert breaker.allowed() == 1


def test_a_session_that_began_earlier_makes_no_room_for_a_second_trial() -> None:
    clock = Clock()
    breaker = tripped(clock)
    clock.now += 30.0
    breaker.began("trial@2")
    breaker.ended("earlier@1", "c", ended(SessionStatus.CANCELLED))
    assert breaker.allowed() == 0


@given(st.lists(st.sampled_from([BROKEN, ended(SessionStatus.CANCELLED)]), max_size=20))
def test_one_task_alone_never_stops_a_node(results: list[SessionResult]) -> None:
    breaker = Breaker(3, 30.0, Clock())
    for result in results:
        breaker.ended("only@1", "only", result)
    assert breaker.allowed() == MOST_LEASES


def test_failures_of_the_task_s_own_are_none_of_the_node_s() -> None:
    breaker = Breaker(2, 30.0, Clock())
    for task in "abcd":
        breaker.ended(f"{task}@1", task, BROKEN)
        breaker.ended(f"{task}@1", task, ended(SessionStatus.FAILED, FailureReason.TASK))
    assert breaker.allowed() == MOST_LEASES


async def test_a_node_whose_disk_is_short_takes_nothing_and_says_so(tmp_path: Path) -> None:
    told: list[str | None] = []
    settings = NodeSettings(disk_reserve_bytes=1 << 60)
    admission = Admission(settings, tmp_path / "not/there/yet", lambda: told.append(admission.trouble))
    waiting = asyncio.create_task(admission.allowed())
    while not told:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not waiting.done()
    assert "less than node.disk_reserve_bytes" in str(told[0])
    waiting.cancel()
    roomy = Admission(NodeSettings(disk_reserve_bytes=0), tmp_path, lambda: None)
    assert await roomy.allowed() == MOST_LEASES


@given(st.integers(1, 1 << 40), st.integers(-(1 << 40), 1 << 40))
def test_no_sandbox_s_disk_reaches_into_the_reserve(size: int, room: int) -> None:
    try:
        assert fitting_size(size, room) <= min(size, room)
    except SandboxUnavailable:
        assert room < max(SMALLEST_BYTES, min(size, SMALLEST_BYTES))


def test_a_disk_that_has_room_is_as_large_as_its_task_asks() -> None:
    assert fitting_size(10 << 30, 10 << 30) == 10 << 30
    assert fitting_size(10 << 30, 6 << 30) == 5 << 30
    with pytest.raises(SandboxUnavailable, match="too full"):
        fitting_size(10 << 30, 1 << 20)
