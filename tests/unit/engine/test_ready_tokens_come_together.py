"""Tokens that are there by the time they are asked for travel in one chunk, never across versions."""

from __future__ import annotations

from contextlib import aclosing

from polar.engines.embedded.model import NewWeights, SlotModel
from polar.engines.embedded.sampler import Draw
from polar.engines.embedded.scheduler import Generation, Sampled, Scheduler
from polar.engines.embedded.worker import Worker
from polar.models.chat import FinishReason
from polar.models.policy import PauseMode

PROMPT = list(range(20, 40))


def asked(tokens: int) -> Generation:
    return Generation(PROMPT, tokens, Draw(seed=3))


async def test_a_slow_reader_gets_the_same_tokens_in_fewer_pieces(tiny: SlotModel) -> None:
    worker = Worker(Scheduler(tiny))
    try:
        each = [token for batch in [b async for b in worker.generate(asked(30))] for token in batch]
        async with aclosing(worker.generate(asked(30))) as batches:
            first = await anext(batches)
            await worker.pause(PauseMode.DRAIN)
            rest = [batch async for batch in batches]
    finally:
        await worker.stop()
    assert len(rest) == 1
    joined = [*first, *rest[0]]
    assert [token.token_id for token in joined] == [token.token_id for token in each]
    assert joined[-1].finish_reason is FinishReason.LENGTH


async def test_a_chunk_has_one_policy_version(tiny: SlotModel) -> None:
    worker = Worker(Scheduler(tiny))
    try:
        async with aclosing(worker.generate(asked(2000))) as batches:
            await anext(batches)
            await worker.use(NewWeights(1, {}))
            versions = []
            async for batch in batches:
                versions.append({token.policy_version for token in batch})
                if versions[-1] == {1}:
                    break
    finally:
        await worker.stop()
    assert all(len(found) == 1 for found in versions)
    assert {1} in versions


def test_a_failure_stands_alone() -> None:
    token = Sampled(0, 5, -1.0, "a", 0, 0)
    failure = Sampled(0, -1, 0.0, "", 0, 0, FinishReason.ERROR)
    assert token.goes_with(token)
    assert not failure.goes_with(token)
