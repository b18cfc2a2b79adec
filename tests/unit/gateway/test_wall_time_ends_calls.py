"""A session opened with a deadline: when it is over, open calls end and later ones are refused as unpaid."""

from __future__ import annotations

import asyncio

import pytest

from polar.gateway.playback import Playback
from polar.gateway.server import SessionGrant, new_key
from polar.models.chat import FinishReason
from polar.models.session import AgentEnd, Origin
from polar.models.task import Budgets, BudgetScope, SamplingPin
from polar.recordings.tree import TokenTree
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene
from tests.waiting import leap, still_waits


async def with_deadline(scene: Scene, seconds: float, playback: Playback | None = None) -> None:
    grant = SessionGrant(
        "s2",
        new_key(),
        scene.grant.capture.with_suffix(".timed"),
        SamplingPin(),
        Budgets(),
        deadline_seconds=seconds,
        playback=playback,
    )
    scene.gateway.open_session(grant)
    scene.grant = grant


async def test_an_open_call_ends_with_the_deadline_and_is_recorded(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("too slow", gate=asyncio.Event(), gate_at=1)])
    await with_deadline(scene, 60.0)
    asking = asyncio.create_task(scene.post(scene.body()).__aenter__())
    await scene.engine.waiting.wait()
    leap(60.0)
    response = await asking
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "insufficient_quota")
    assert "its 60 seconds are over" in error["message"]
    await asyncio.wait_for(scene.engine.abort.wait(), 30)
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert len(completion.sampled_ids) == 1


async def test_an_open_stream_ends_with_the_provider_s_error(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("too slow", gate=asyncio.Event(), gate_at=1)])
    await with_deadline(scene, 60.0)
    async with scene.post(scene.body(stream=True)) as response:
        await scene.engine.waiting.wait()
        leap(60.0)
        text = await response.text()
    assert response.status == 200
    assert "insufficient_quota" in text


async def test_later_calls_are_refused_and_the_opener_is_told(set_scene: SetScene) -> None:
    scene = await set_scene(["never asked for"])
    await with_deadline(scene, 0.0)
    await asyncio.wait_for(scene.gateway.budget_spent("s2"), 30)
    async with scene.post(scene.body()) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "insufficient_quota")
    assert scene.engine.requests == []
    assert await scene.captured() == []


async def test_a_session_that_ends_in_time_has_no_deadline_left(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."])
    await with_deadline(scene, 60.0)
    async with scene.post(scene.body()) as response:
        assert response.status == 200
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.STOP
    async with scene.post(scene.body()) as response:
        assert response.status == 410


async def asked_twice(scene: Scene, seconds_each: float = 0) -> None:
    for question in ("One?", "Two?"):
        async with scene.post(scene.body(question)) as response:
            assert response.status == 200
        leap(seconds_each)


async def answers_of_half_a_minute(set_scene: SetScene) -> TokenTree:
    scene = await set_scene(["One.", "Two."])
    await with_deadline(scene, 100)
    await asked_twice(scene, seconds_each=30)
    return await scene.tree()


async def assert_ends_after(scene: Scene, seconds: float) -> None:
    spent = asyncio.create_task(scene.gateway.budget_spent("s2"))
    leap(seconds - 10)
    assert await still_waits(spent)
    leap(20)
    assert (await spent)[0] is AgentEnd.TIMEOUT


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_what_was_answered_before_took_the_time_that_it_took(
    set_scene: SetScene, is_resumed: bool
) -> None:
    """In the session that sampled it; what replaying it takes comes on top only where that was longer."""
    tree = await answers_of_half_a_minute(set_scene)
    origin = Origin(session_id="s2" if is_resumed else "s1", budgets=BudgetScope.SESSION)
    parts = (TokenTree(), tree) if is_resumed else (tree, None)
    again = await set_scene([])
    await with_deadline(again, 100, Playback(parts[0], origin, "s2", earlier=parts[1]))
    await asked_twice(again)
    await assert_ends_after(again, 70)


async def test_the_time_of_a_branch_begins_after_what_it_was_given_again(set_scene: SetScene) -> None:
    tree = await answers_of_half_a_minute(set_scene)
    branch = await set_scene([])
    await with_deadline(branch, 100, Playback(tree, Origin(session_id="s1"), "s2"))
    await asked_twice(branch, seconds_each=60)
    await assert_ends_after(branch, 40)


async def test_a_resumed_branch_has_the_time_that_was_left_to_it(set_scene: SetScene) -> None:
    tree = await answers_of_half_a_minute(set_scene)
    origin = Origin(session_id="s1", calls=1)
    first = await set_scene(["Another."])
    await with_deadline(first, 100, Playback(tree, origin, "s2"))
    await asked_twice(first, seconds_each=40)
    again = await set_scene([])
    await with_deadline(again, 100, Playback(tree, origin, "s2", earlier=await first.tree()))
    await asked_twice(again)
    await assert_ends_after(again, 60)
