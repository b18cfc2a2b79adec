"""The SGLang client passes on tokens only with their ids and logprobs, and aborts by name when closed."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines import http
from polar.engines.base import (
    ContextOverflow,
    EngineDown,
    EngineError,
    GenerateRequest,
    ModelInfo,
    TokenChunk,
)
from polar.engines.sglang import SglangEngine, _SglangReader
from polar.models.chat import FinishReason, Sampling
from tests.fakes.sglang_wire import event, sglang_wire

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=9, stop=("END",))
REQUEST = GenerateRequest("r1", [1, 2, 3], SAMPLING, (2,))
WHOLE = [
    event([5], [-0.5], 1, weight_version="4"),
    event([5, 6], [-0.5, -1.0], 2, weight_version="4"),
    event([5, 6, 2], [-0.5, -1.0, -0.1], 3, "stop", weight_version="4"),
]
DELTAS = [
    event([5], [-0.5], 1, weight_version="4"),
    event([6], [-1.0], 2, weight_version="4"),
    event([2], [-0.1], 3, "stop", weight_version="4"),
]


async def generated(url: str, request: GenerateRequest = REQUEST) -> list[TokenChunk]:
    engine = SglangEngine(url)
    engine.policy_version = 4
    try:
        return [chunk async for chunk in engine.generate(request)]
    finally:
        await engine.close()


def tokens(chunks: list[TokenChunk]) -> list[tuple[int, float, int]]:
    """Each with its logprob and version, however many arrived at once."""
    return [
        (id, logprob, chunk.policy_version)
        for chunk in chunks
        for id, logprob in zip(chunk.ids, chunk.logprobs, strict=True)
    ]


@pytest.mark.parametrize("events", [WHOLE, DELTAS], ids=["cumulative", "incremental"])
async def test_tokens_come_once_with_logprobs_version_and_cache_hits(events: list[Any]) -> None:
    async with sglang_wire([*events, "[DONE]"]) as wire:
        *first, last = await generated(wire.url)
        assert tokens(first) == [(5, -0.5, 4), (6, -1.0, 4)]
        assert {chunk.cached_tokens for chunk in first} == {2}
        assert last == TokenChunk([2], [-0.1], 4, FinishReason.STOP, 2)
    body = wire.bodies[0]
    assert (body["input_ids"], body["rid"]) == ([1, 2, 3], "r1")
    assert (body["return_logprob"], body["stream"]) == (True, True)
    sampling = body["sampling_params"]
    assert (sampling["stop_token_ids"], sampling["stop"], sampling["top_k"]) == ([2], ["END"], -1)
    assert (sampling["max_new_tokens"], sampling["sampling_seed"]) == (9, 5)


async def test_what_is_not_asked_for_is_left_to_the_server_but_for_its_short_answers() -> None:
    async with sglang_wire([event([2], [-1.0], 1, "length"), "[DONE]"]) as wire:
        await generated(wire.url, GenerateRequest("r1", [1], Sampling()))
    sampling = wire.bodies[0]["sampling_params"]
    assert sampling["max_new_tokens"] is None
    assert sampling.keys().isdisjoint({"temperature", "top_p", "top_k", "sampling_seed", "stop"})


async def test_the_servers_own_version_is_taken_where_it_says_one() -> None:
    """A name that is no number is that of the weights it was started with."""
    answer = [
        event([5], [-1.0], 1, weight_version=None),
        event([5, 6], [-1.0] * 2, 2, weight_version="7"),
        event([5, 6, 7], [-1.0] * 3, 3, weight_version=8),
        event([5, 6, 7, 2], [-1.0] * 4, 4, "stop", weight_version="v9"),
        "[DONE]",
    ]
    async with sglang_wire(answer) as wire:
        assert [chunk.policy_version for chunk in await generated(wire.url)] == [4, 7, 8, 0]


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
    incremental=st.booleans(),
    ahead=st.integers(0, 2),
)
def test_every_token_is_passed_on_exactly_once(
    ids: list[int], cuts: set[int], incremental: bool, ahead: int
) -> None:
    """However the server cuts its stream, and though its lists may run ahead of its counts."""
    bounds = sorted({0, len(ids)} | {cut for cut in cuts if cut < len(ids)})
    stream = _SglangReader("http://x", int)
    got: list[TokenChunk] = []
    for start, stop in pairwise(bounds):
        is_last = stop == len(ids)
        end = stop if incremental else min(len(ids), stop + (0 if is_last else ahead))
        piece = ids[start if incremental else 0 : end]
        chunk = stream.read(event(piece, [-float(id) for id in piece], stop, "stop" if is_last else None))
        got += [chunk] if chunk is not None else []
    got.append(stream.last())
    assert [id for chunk in got for id in chunk.ids] == ids
    assert [p for chunk in got for p in chunk.logprobs] == [-float(id) for id in ids]


OTHER_ROWS = event([5], [-1.0], 1, "stop")
OTHER_ROWS["meta_info"]["output_token_logprobs"][0][1] = 6


@pytest.mark.parametrize(
    "answer",
    [
        [event(None, [-1.0], 1, "stop"), "[DONE]"],
        [event([5], None, 1, "stop"), "[DONE]"],
        [event([5, 6], [-1.0], 2, "stop"), "[DONE]"],
        [event([5], [None], 1, "stop"), "[DONE]"],
        [OTHER_ROWS, "[DONE]"],
        [event([5], [-1.0], 1), "[DONE]"],
        [event([5], [-1.0], 1)],
        [event([5], [-1.0], 2, "stop"), "[DONE]"],
        [event([5, 6], [-1.0, -1.0], 1, "stop"), "[DONE]"],
        [event([5], [-1.0], 1, "stop", completion_tokens=None), "[DONE]"],
        [event([5], [-1.0], 1), event([5], [-1.0], 1, "abort"), "[DONE]"],
        [event([5], [-1.0], 1, "stop"), event([5, 6], [-1.0] * 2, 2, "stop"), "[DONE]"],
        [{"error": {"message": "CUDA error"}}, "[DONE]"],
        [event([5], [-1.0], 1), ConnectionError()],
        [{"text": "no meta_info"}],
        ["not json"],
    ],
)
async def test_a_stream_without_exact_tokens_is_an_error(answer: list[object]) -> None:
    async with sglang_wire(answer) as wire:
        with pytest.raises(EngineError) as caught:
            await generated(wire.url)
        assert not isinstance(caught.value, EngineDown)
        assert len(wire.bodies) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (
            400,
            {"error": {"message": "The input (600 tokens) is longer than the model's context length (512)."}},
        ),
        [{"error": {"message": "Requested token count exceeds the model's maximum context length of 512."}}],
        [
            event(
                [],
                [],
                0,
                {
                    "type": "abort",
                    "message": "Input length (600 tokens) exceeds the maximum allowed length (500 tokens).",
                    "status_code": 400,
                },
            )
        ],
    ],
)
async def test_an_overlong_prompt_is_a_context_overflow(answer: Any) -> None:
    async with sglang_wire(answer) as wire:
        with pytest.raises(ContextOverflow):
            await generated(wire.url)
        assert len(wire.bodies) == 1


async def test_trouble_before_the_first_token_is_tried_again() -> None:
    busy = (503, {"error": {"message": "loading"}})
    async with sglang_wire(busy, [ConnectionError()], [*WHOLE, "[DONE]"]) as wire:
        assert [id for id, _, _ in tokens(await generated(wire.url))] == [5, 6, 2]
        assert len(wire.bodies) == 3


async def test_an_abort_before_the_first_token_may_be_tried_elsewhere() -> None:
    async with sglang_wire([event([], [], 0, "abort"), "[DONE]"]) as wire:
        with pytest.raises(EngineDown):
            await generated(wire.url)


async def test_an_engine_that_stays_busy_or_absent_is_down() -> None:
    async with sglang_wire((503, {"error": {"message": "loading"}})) as wire:
        with pytest.raises(EngineDown, match="loading"):
            await generated(wire.url)
        assert len(wire.bodies) == http.ATTEMPTS
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(EngineDown, match="cannot be reached"):
            await generated(f"http://127.0.0.1:{unused.getsockname()[1]}")


async def test_closing_the_iterator_aborts_the_request_by_name() -> None:
    async with sglang_wire([event([5], [-1.0], 1), asyncio.Event()]) as wire:
        engine = SglangEngine(wire.url)
        chunks = engine.generate(REQUEST)
        assert (await anext(chunks)).ids == [5]
        await chunks.aclose()
        assert await wire.aborted.get() == "r1"
        await wire.disconnected.wait()
        await engine.close()


async def test_a_cancelled_call_aborts_a_request_that_has_no_token_yet() -> None:
    async with sglang_wire([asyncio.Event()]) as wire:
        engine = SglangEngine(wire.url)
        call = asyncio.create_task(anext(engine.generate(REQUEST)))
        await wire.arrived.wait()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert await wire.aborted.get() == "r1"
        await engine.close()


async def test_a_finished_request_is_not_aborted_and_leaves_its_connection_for_the_next() -> None:
    async with sglang_wire([*WHOLE, "[DONE]"]) as wire:
        engine = SglangEngine(wire.url)
        for _ in range(3):
            chunks = engine.generate(REQUEST)
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    break
            await chunks.aclose()
        await engine.close()
        assert wire.aborted.empty()
        assert len(wire.ports) == 1


@pytest.mark.parametrize("is_old", [False, True])
async def test_the_model_is_described_under_new_and_old_names(is_old: bool) -> None:
    async with sglang_wire([], is_old=is_old, weight_version="12") as wire:
        engine = SglangEngine(wire.url + "/v1/")
        assert await engine.model_info() == ModelInfo("small", 511, 12)
        assert await engine.tokenize("ab") == [97, 98]
        await engine.close()


async def test_the_check_passes_and_warns_of_a_stream_that_repeats_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    one = [event([5], [-1.0], 1, "length"), "[DONE]"]
    for is_incremental in (True, False):
        async with sglang_wire(one, is_incremental=is_incremental) as wire:
            engine = SglangEngine(wire.url)
            await engine.check()
            await engine.close()
            assert wire.bodies[0]["sampling_params"]["max_new_tokens"] == 1
            assert ("--incremental-streaming-output" in caplog.text) is not is_incremental
    assert "sk-secret" not in caplog.text


async def test_the_check_says_what_the_server_lacks() -> None:
    async with sglang_wire([event([5], None, 1, "length"), "[DONE]"]) as wire:
        engine = SglangEngine(wire.url)
        with pytest.raises(EngineError, match=r"without ids or logprobs.*SGLang 0\.5 or newer"):
            await engine.check()
        await engine.close()
