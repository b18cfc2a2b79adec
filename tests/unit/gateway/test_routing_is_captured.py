"""The experts that an engine tells are recorded once for each token, or counted as missing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from polar.engines.base import WeightUpdate
from polar.models.completion import UNROUTED, Completion
from polar.models.policy import PauseMode
from polar.trajectory.materialise import materialise
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.routing import routing_of
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene


async def said(scene: Scene, messages: list[Any], **fields: Any) -> str:
    async with scene.post({"model": "scripted", "messages": messages} | fields) as response:
        assert response.status == 200
        return str((await response.json())["choices"][0]["message"]["content"])


def context(completion: Completion) -> list[int]:
    return [*completion.prompt_ids.tolist(), *completion.sampled_ids.tolist()]


async def test_a_conversation_asks_for_the_experts_of_each_token_once(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello there.", "And again.", "Bye."], records_routing=True)
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for question in ("Go on.", "And on.", ""):
        answer = await said(scene, messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    completions = await scene.captured()
    before = [0, *(len(context(one)) - 1 for one in completions[:-1])]
    assert [request.routed_from for request in scene.engine.requests] == before
    assert not any(UNROUTED in one.extra for one in completions)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions))
    (trace,) = [materialise(trajectory, ref) for ref in trajectory.traces]
    assert trace.routing is not None
    assert trace.routing[:-1].tolist() == routing_of(context(completions[-1])).tolist()
    assert trace.unrouted_tokens == 0


async def test_of_a_completion_that_was_broken_off_only_what_followed_is_routed(set_scene: SetScene) -> None:
    first = Answer("one two three four five", gate=asyncio.Event(), gate_at=3)
    scene = await set_scene([first, " and so on"], records_routing=True)
    asking = asyncio.create_task(scene.post(scene.body()).__aenter__())
    await asyncio.wait_for(scene.engine.waiting.wait(), 30)
    await scene.gateway.pause(PauseMode.ABORT)
    await scene.gateway.update_weights(WeightUpdate(1))
    await scene.gateway.resume()
    await asyncio.wait_for(asking, 30)
    (completion,) = await scene.captured()
    lost = len(completion.prompt_ids) + 3 - 1
    assert completion.routing is not None
    assert completion.routing.tolist() == routing_of(context(completion), lost).tolist()
    assert completion.extra[UNROUTED] == str(lost)


async def test_what_is_cut_before_the_engine_ends_it_is_counted(set_scene: SetScene) -> None:
    scene = await set_scene(["one two three four five", "Bye."], records_routing=True)
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    answer = await said(scene, messages, stop=["three"])
    again = [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    await said(scene, [*messages, *again])
    cut, whole = await scene.captured()
    assert cut.routing is None
    assert int(cut.extra[UNROUTED]) == len(context(cut)) - 1
    assert whole.routing is not None
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow([cut, whole]))
    for trace in (materialise(trajectory, ref) for ref in trajectory.traces):
        if trace.routing is not None:
            ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
            known = np.flatnonzero(trace.routing.any((1, 2)))
            assert trace.routing[known].tolist() == routing_of([*ids, 0])[known].tolist()


async def test_nothing_is_said_of_experts_where_none_are_recorded(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello there."])
    await said(scene, [{"role": "user", "content": "Hi"}])
    (completion,) = await scene.captured()
    assert completion.routing is None
    assert UNROUTED not in completion.extra
