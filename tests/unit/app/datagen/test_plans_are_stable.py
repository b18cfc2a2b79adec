"""Ids follow from content, retries repeat the sample they stand for, and counts say what has happened."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from polar import errors
from polar.app.datagen import DatasetGeneration, Tally, plan, show_tally
from polar.app.rollouts import RolledOut, may_be_retried, retry_of
from polar.client import Client
from polar.errors import Backoff, Unavailable
from polar.models.session import SessionStatus
from polar.models.task import Branching, Run, RunKind, SamplingPin, TaskSpec
from polar.tasksets.expressions import parse_acceptance
from tests.fakes.blocking_client import Blocking
from tests.fakes.recordings import recording
from tests.fakes.rollout_client import RolloutClient
from tests.systems import shell_task

RUN = Run(name="data", kind=RunKind.GENERATION)
ACCEPT = parse_acceptance("reward >= 1")


def test_the_same_task_always_gets_the_same_id() -> None:
    one = plan([shell_task("a", "true")])
    assert one == plan([TaskSpec.model_validate_json(shell_task("a", "true").model_dump_json())])
    assert one["a"].id.startswith("a-")


@pytest.mark.parametrize(
    "changed",
    [
        plan([shell_task("a", "false")]),
        plan([shell_task("a", "true", samples=2)]),
        plan([shell_task("a", "true", sampling=SamplingPin(seed=1))]),
        plan([shell_task("a", "true")], run="again"),
    ],
)
def test_anything_else_gets_another_id(changed: Any) -> None:
    assert changed["a"].id != plan([shell_task("a", "true")])["a"].id


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
    st.integers(0, 1023),
    st.integers(1, 20),
    st.none() | st.integers(0, 1000),
)
def test_a_retry_is_a_valid_task_with_the_samples_own_seed(
    id: str, sample: int, retry: int, seed: int | None
) -> None:
    branching = Branching.model_validate({"at": "calls"})
    asked = shell_task(id, "true", samples=1024, early_stop=4, branching=branching)
    planned = plan([asked.model_copy(update={"sampling": SamplingPin(seed=seed)})])
    again = retry_of(planned[id], sample, retry)
    assert TaskSpec.model_validate(again.model_dump()) == again
    assert (again.samples, again.early_stop, again.branching) == (1, None, None)
    # The only sample of the retry is its sample 0.
    assert again.sampling.seed == (None if seed is None else seed + sample)


def ended(*, was_found: bool = False, **changes: Any) -> RolledOut:
    result = recording().result.model_copy(update=changes)
    return RolledOut(result, task=shell_task("a", "true"), was_found=was_found, retries=0)


def test_the_tally_learns_of_branches_as_they_end() -> None:
    tally = Tally(1)
    for sample in range(3):
        tally.add(ended(sample=sample), is_accepted=True)
    assert (tally.wanted, tally.ended, tally.seconds_left) == (3, 3, 0.0)


def test_only_samples_are_tried_again() -> None:
    task = shell_task("a", "true", samples=2)
    failed = [ended(sample=sample, status=SessionStatus.FAILED).result for sample in range(3)]
    assert [may_be_retried(task, result) for result in failed] == [True, True, False]
    assert not may_be_retried(task, ended().result)


def test_the_tally_counts_and_foretells() -> None:
    now = 0.0
    tally = Tally(10, clock=lambda: now)
    for place in range(4):
        tally.add(ended(was_found=place < 2), is_accepted=place % 2 == 0)
    now = 60.0
    assert (tally.ended, tally.accepted, tally.found, tally.acceptance) == (4, 2, 2, 0.5)
    assert tally.per_minute == 2.0, "what an earlier run did says nothing of the speed"
    assert tally.seconds_left == 180.0
    assert tally.line().startswith("4/10 sessions · 2 accepted (50%) · 2.0 sessions/min")
    assert tally.line().endswith("0:03:00 left")


def test_without_a_terminal_lines_come_seldom_and_the_last_always(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    tally = Tally(3, clock=lambda: now)
    with show_tally(tally, Console(force_terminal=False, width=200)) as changed:
        for moment in (1.0, 2.0, 11.0):
            now = moment
            tally.add(ended(), is_accepted=True)
            changed()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" sessions")[0] for line in lines] == ["3/3", "3/3"]


def test_a_dataset_holds_what_was_sampled_by_older_policies_too() -> None:
    server = RolloutClient()
    server.all_are_stale = True
    generation = DatasetGeneration(plan([shell_task("a", "true", samples=2)]), ACCEPT, 0, 4, RUN)
    with Blocking(server) as client:
        client.submit(generation.plan["a"])
        found = generation.sessions(cast(Client, client))
        assert [len(list(task.attempts)) for task in found] == [2]


async def test_a_server_that_goes_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "RESTART", Backoff(0.0, 0.0, attempts=3))
    client: Any = RolloutClient()
    client.breaks_off = True
    tasks = plan([shell_task(name, "true", samples=2) for name in "ab"])
    generation = DatasetGeneration(tasks, ACCEPT, 0, 4, RUN)
    await asyncio.wait_for(generation.run(client), 10)
    assert generation.tally.ended == 4, "every session counts once"
    assert len(client.cursors) > 2


async def test_a_server_that_stays_away_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "RESTART", Backoff(0.0, 0.0, attempts=3))
    client: Any = RolloutClient()
    client.failures = 100
    generation = DatasetGeneration(plan([shell_task("a", "true")]), ACCEPT, 0, 1, RUN)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await generation.run(client)


def test_a_failed_session_is_counted_as_one() -> None:
    tally = Tally(1)
    tally.add(ended(status=SessionStatus.FAILED), is_accepted=False)
    assert tally.failed == 1
