"""A session holds one seat at a time, and every seat is freed exactly once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config.settings import NodeSettings
from polar.node.pools import Pool, Pools, Seat


async def test_a_seat_takes_the_next_place_before_it_gives_up_the_last() -> None:
    first, second = Pool("first", 1), Pool("second", 1)
    await first.enter()
    await second.enter()
    seat = Seat(first)
    move = asyncio.create_task(seat.move(second))
    await asyncio.sleep(0)
    assert first.free == 0
    second.leave()
    await move
    assert (first.free, second.free) == (1, 0)


async def test_a_cancelled_move_keeps_and_then_frees_the_old_place_once() -> None:
    first, second = Pool("first", 1), Pool("second", 1)
    await first.enter()
    await second.enter()
    with Seat(first) as seat:
        move = asyncio.create_task(seat.move(second))
        await asyncio.sleep(0)
        move.cancel()
        with pytest.raises(asyncio.CancelledError):
            await move
        assert first.free == 0
    assert (first.free, second.free) == (1, 0)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=25), st.integers(1, 3), st.integers(1, 3))
def test_no_place_leaks_however_sessions_are_cancelled(
    cancel_after: list[int], ready: int, slots: int
) -> None:
    async def scenario() -> None:
        pools = Pools(NodeSettings(ready_buffer=ready, run_slots=slots, postrun_workers=1, init_workers=1))

        async def session() -> None:
            await pools.ready.enter()
            with Seat(pools.ready) as seat:
                async with pools.init:
                    await asyncio.sleep(0)
                await seat.move(pools.run)
                assert pools.run.occupied <= slots
                await asyncio.sleep(0)
                await seat.move(pools.postrun)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(session()) for _ in cancel_after]
        for step in range(7):
            for task, when in zip(tasks, cancel_after, strict=True):
                if when == step and when < 6:
                    task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (pools.init, pools.ready, pools.run, pools.postrun):
            assert pool.free == pool.size

    asyncio.run(scenario())
