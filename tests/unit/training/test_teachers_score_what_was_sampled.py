"""A teacher is shown each sampled token after exactly the tokens that it was sampled after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from polar.engines.base import EngineDown
from polar.training.material import PolicyVersions, material
from polar.training.run import in_thread
from polar.training.settings import BatchSettings, ObjectiveSettings, Pack
from polar.training.teacher import ANSWER_SECONDS, Teacher
from polar.trajectory.per_request import PerRequest
from tests.fakes.scoring_engine import ScoringEngine, logprobs_of
from tests.fakes.scripted_rollouts import group

ANSWERS = ([[10, 11, 12], [13, 14], [15]], [[10, 11, 20], [21]], [[30, 31], [32, 33, 34], [35]])
PROMPT = (1, 2, 3)
BUILDER = PerRequest(PerRequest.Options())


@asynccontextmanager
async def teaching(engine: ScoringEngine, seconds: float = ANSWER_SECONDS) -> AsyncIterator[Teacher]:
    yield Teacher(engine, await engine.model_info(), seconds=seconds)


def contexts() -> dict[str, tuple[int, list[int]]]:
    """Of each trace the length of what it was given, and all of its tokens."""
    found = {}
    for number, answers in enumerate(ANSWERS):
        ids = list(PROMPT)
        for call, answer in enumerate(answers):
            found[f"task-{number}/{call}"] = len(ids), [*ids, *answer]
            ids += [*answer, 7, 8]
    return found


@pytest.mark.parametrize("pack", Pack)
@pytest.mark.parametrize("context", [512, 12])
def test_scores_are_those_of_the_whole_context(pack: Pack, context: int) -> None:
    engine = ScoringEngine(max_context=context)
    rolled_out = group(ANSWERS, (1.0, 0.0, 0.5), prompt=PROMPT, builder=BUILDER)
    made = material([rolled_out], ObjectiveSettings(), BatchSettings(pack=pack), PolicyVersions(0))
    with in_thread("the teacher", teaching(engine)) as teacher:
        found = teacher.logprobs(made.packing.batches)
    seen, total = 0, sum(len(answer) for answers in ANSWERS for answer in answers)
    for batch, scores in zip(made.packing.batches, found, strict=True):
        for at, name in enumerate(batch.names):
            start, ids = contexts()[name]
            # An engine needs room for one token after those that it scores.
            fits = np.arange(start, len(ids)) < context - 1
            expected = np.where(fits, logprobs_of(ids, start), np.nan)
            assert scores[batch.terms.rows == at] == pytest.approx(expected, nan_ok=True)
            seen += int(fits.sum())
    assert seen > 0
    assert (seen == total) == (context == 512)


class EndingEngine(ScoringEngine):
    """Ends while it is asked."""

    async def score(self, ids: list[int]) -> list[float]:
        raise asyncio.CancelledError


@pytest.mark.parametrize("is_before", [True, False])
def test_a_teacher_that_has_ended_is_told_from_one_that_answers(is_before: bool) -> None:
    rolled_out = group(ANSWERS, (1.0, 0.0, 0.5), prompt=PROMPT)
    made = material([rolled_out], ObjectiveSettings(), BatchSettings(), PolicyVersions(0))
    with in_thread("the teacher", teaching(EndingEngine())) as teacher:
        if not is_before:
            with pytest.raises(EngineDown, match="the teacher arithmetic has ended"):
                teacher.logprobs(made.packing.batches)
    if is_before:
        with pytest.raises(EngineDown, match="the teacher arithmetic has ended"):
            teacher.logprobs(made.packing.batches)


class SilentEngine(ScoringEngine):
    """Takes what it is asked, and says nothing."""

    async def score(self, ids: list[int]) -> list[float]:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_teacher_that_falls_silent_is_not_waited_for_without_end() -> None:
    rolled_out = group(ANSWERS, (1.0, 0.0, 0.5), prompt=PROMPT)
    made = material([rolled_out], ObjectiveSettings(), BatchSettings(), PolicyVersions(0))
    with (
        in_thread("the teacher", teaching(SilentEngine(), seconds=0.01)) as teacher,
        pytest.raises(EngineDown, match=r"has not scored a trace within 0\.01 s"),
    ):
        teacher.logprobs(made.packing.batches)
