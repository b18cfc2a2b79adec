"""Tokens that arrive together are joined: none is lost, moves, or gets another's logprob or version."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.base import EngineError, GenerateRequest, TokenChunk
from polar.engines.http import coalesce_chunks
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from tests.fakes.vllm_wire import event, vllm_wire

CHUNKS = st.builds(
    lambda ids, version, cached: TokenChunk(ids, [-float(id) for id in ids], version, None, cached),
    *(st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2), st.integers(0, 2)),
)


def then(chunks: list[TokenChunk | None], failure: Exception | None) -> Iterator[TokenChunk | None]:
    yield from chunks
    if failure is not None:
        raise failure


def taken(chunks: Iterator[TokenChunk]) -> tuple[list[TokenChunk], Exception | None]:
    """What came, and the error after it."""
    got: list[TokenChunk] = []
    while True:
        try:
            got.append(next(chunks))
        except StopIteration:
            return got, None
        except EngineError as error:
            return got, error


async def take(chunks: AsyncIterator[TokenChunk], into: list[TokenChunk]) -> None:
    async for chunk in chunks:
        into += [chunk]


def sampled(chunks: list[TokenChunk]) -> list[tuple[int, float, int]]:
    return [
        (id, logprob, chunk.policy_version)
        for chunk in chunks
        for id, logprob in zip(chunk.ids, chunk.logprobs, strict=True)
    ]


@given(st.lists(st.none() | CHUNKS), st.none() | st.just(EngineError("broken")))
def test_tokens_keep_their_order_logprobs_and_versions(
    read: list[TokenChunk | None], failure: Exception | None
) -> None:
    sent = [chunk for chunk in read if chunk is not None]
    got, error = taken(coalesce_chunks(then(read, failure)))
    assert sampled(got) == sampled(sent)
    assert error is failure
    assert all(one.policy_version != other.policy_version for one, other in pairwise(got))
    cached = [max((chunk.cached_tokens for chunk in chunks), default=0) for chunks in (got, sent)]
    assert cached[0] == cached[1]


@pytest.mark.parametrize("broken", ["not json", "[1]", json.dumps({"error": {"message": "CUDA error"}})])
async def test_tokens_that_came_before_an_error_are_passed_on(broken: str) -> None:
    """All in one write, so that they arrive together as good as always."""
    sent = [json.dumps(event([5], [-1.0])), json.dumps(event([6], [-2.0])), broken]
    async with vllm_wire(["\n\ndata: ".join(sent)]) as wire:
        engine = VllmEngine(wire.url)
        got: list[TokenChunk] = []
        with pytest.raises(EngineError):
            await take(engine.generate(GenerateRequest("r1", [1], Sampling(max_tokens=9))), got)
        await engine.close()
    assert sampled(got) == [(5, -1.0, 0), (6, -2.0, 0)]
