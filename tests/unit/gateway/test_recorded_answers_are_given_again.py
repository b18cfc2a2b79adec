"""A session that begins with a recording gets its answers for as long as it asks what was recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.gateway.playback import ANOTHER_REQUEST, Playback
from polar.models.chat import FinishReason
from polar.models.completion import REPLAYED, RESUMED, Completion
from polar.models.session import AgentEnd, Origin, ReplayReport
from polar.models.task import Budgets, OnDivergence
from polar.recordings.tree import TokenTree
from polar.trajectory.accounting import Exclusion
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.scripted_engine import Answer
from tests.gateways import CALL, SCHEMA
from tests.unit.gateway.conftest import Scene, SetScene

Json = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
QUESTION: Json = {"role": "user", "content": "List the files."}
LIVE = "Sampled now."


async def ask(scene: Scene, messages: Sequence[Json], **fields: Any) -> Json:
    """The assistant's message."""
    async with scene.post({"model": "scripted", "messages": list(messages), "tools": TOOLS, **fields}) as got:
        assert got.status == 200, await got.text()
        if not fields.get("stream"):
            message: Json = (await got.json())["choices"][0]["message"]
            return message
        text = await got.text()
    deltas = [
        orjson.loads(line[6:])["choices"][0]["delta"]
        for line in text.splitlines()
        if line.startswith("data: {") and orjson.loads(line[6:])["choices"]
    ]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {
        "role": "assistant",
        "content": "".join(delta.get("content") or "" for delta in deltas),
        **(
            {"tool_calls": [{key: call[key] for key in ("id", "type", "function")} for call in calls]}
            if calls
            else {}
        ),
    }


async def refused(scene: Scene, messages: Sequence[Json]) -> str:
    async with scene.post({"model": "scripted", "messages": list(messages), "tools": TOOLS}) as got:
        assert got.status >= 400
        return await got.text()


def result(message: Json, content: str) -> Json:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


async def conversation(
    scene: Scene, results: Sequence[str] = ("a.txt", "b.txt"), turns: int = 3, **fields: Any
) -> list[Json]:
    """Calls with these results, and then an answer: as many turns of it as asked for."""
    messages = [QUESTION]
    for _, content in zip(range(turns), (*results, ""), strict=False):
        messages.append(await ask(scene, messages, **fields))
        if messages[-1].get("tool_calls"):
            messages.append(result(messages[-1], content))
    return messages


async def recorded(set_scene: SetScene, script: Sequence[Any] = (CALL, CALL, "Done.")) -> TokenTree:
    scene = await set_scene(script)
    await conversation(scene)
    return await scene.tree()


def playback(tree: TokenTree, session_id: str = "branch", is_whole: bool = True, **fields: Any) -> Playback:
    return Playback(tree, Origin(session_id="parent", **fields), session_id, is_whole=is_whole)


def report_of(scene: Scene) -> ReplayReport:
    report = scene.gateway.replay_report("s1")
    assert report is not None
    return report


def same_tokens(one: Completion, other: Completion) -> bool:
    return one.id == other.id and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("prompt_ids", "sampled_ids", "logprobs", "policy_versions")
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_whole_session_is_answered_without_the_engine(set_scene: SetScene, stream: bool) -> None:
    tree = await recorded(set_scene)
    scene = await set_scene([], playback=playback(tree, samples_on=False))
    messages = await conversation(scene, stream=stream)
    assert messages[-1]["content"] == "Done."
    assert [m["tool_calls"][0]["id"] for m in messages if m.get("tool_calls")] == [
        call.id for it in tree.completions for call in it.response.tool_calls
    ]
    report = report_of(scene)
    again = await scene.captured()
    assert not scene.engine.requests
    assert all(map(same_tokens, again, tree.completions))
    assert len(again) == 3
    assert all(it.extra[REPLAYED] == "parent" for it in again)
    assert report.is_faithful
    assert (report.calls, report.sampled_tokens) == (3, sum(len(it.sampled_ids) for it in tree.completions))


async def test_a_branch_samples_on_after_the_recorded_calls(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    scene = await set_scene([LIVE], playback=playback(tree, calls=2))
    messages = await conversation(scene)
    assert messages[-1]["content"] == LIVE
    (request,) = scene.engine.requests
    assert np.array_equal(request.prompt_ids, tree.completions[2].prompt_ids)
    branch = await scene.tree()
    assert [REPLAYED in it.extra for it in branch.completions] == [True, True, False]
    assert branch.links == tree.links
    stats = PrefixMerging(PrefixMerging.Options()).build(branch).stats
    assert stats.trainable_tokens == len(branch.completions[2].sampled_ids)
    assert stats.excluded == {Exclusion.REPLAYED: sum(len(it.sampled_ids) for it in branch.completions[:2])}


async def test_a_resumed_session_trains_what_it_sampled_before(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    resumed = Playback(tree, Origin(session_id="same", depth=0), "same", is_whole=False)
    scene = await set_scene([], playback=resumed)
    await conversation(scene)
    again = await scene.tree()
    assert all(RESUMED in it.extra and REPLAYED not in it.extra for it in again.completions)
    stats = PrefixMerging(PrefixMerging.Options()).build(again).stats
    assert stats.trainable_tokens == stats.sampled_tokens > 0


async def test_a_branch_of_a_resumed_session_has_no_earlier_attempt(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    resumed = Playback(tree, Origin(session_id="parent", depth=0), "parent", is_whole=False)
    scene = await set_scene([], playback=resumed)
    await conversation(scene)
    branch = await set_scene([], playback=playback(await scene.tree()))
    await conversation(branch)
    for completion in (await branch.tree()).completions:
        assert completion.extra[REPLAYED] == "parent"
        assert RESUMED not in completion.extra


async def test_requests_are_found_by_what_they_ask_not_by_their_order(set_scene: SetScene) -> None:
    questions = [[{"role": "user", "content": f"Question {number}."}] for number in range(4)]
    first = await set_scene([f"Answer {number}." for number in range(4)])
    for messages in questions:
        await ask(first, messages)
    tree = await first.tree()
    scene = await set_scene([], playback=playback(tree, samples_on=False))
    said = await asyncio.gather(*(ask(scene, messages) for messages in reversed(questions)))
    assert [message["content"] for message in said] == [f"Answer {number}." for number in (3, 2, 1, 0)]


async def test_equal_requests_get_each_recorded_answer_once(set_scene: SetScene) -> None:
    first = await set_scene(["One.", "Two."])
    for _ in range(2):
        await ask(first, [QUESTION])
    tree = await first.tree()
    scene = await set_scene([LIVE], playback=playback(tree))
    said = [(await ask(scene, [QUESTION]))["content"] for _ in range(3)]
    assert said == ["One.", "Two.", LIVE]


async def test_choices_of_one_request_keep_their_places(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    first = await set_scene([Answer("Slow.", gate=gate), "Fast."])
    asking = asyncio.create_task(first.post({**first.body(), "n": 2}).__aenter__())
    await first.engine.waiting.wait()
    while not first.gateway.progress("s1").completions:  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0)
    gate.set()
    said = [choice["message"]["content"] for choice in (await (await asking).json())["choices"]]
    tree = await first.tree()
    assert [it.response.content for it in tree.completions] == said[::-1]
    scene = await set_scene([], playback=playback(tree))
    async with scene.post({**scene.body(), "n": 2}) as got:
        assert [choice["message"]["content"] for choice in (await got.json())["choices"]] == said


async def test_another_duration_in_a_result_is_no_divergence(set_scene: SetScene) -> None:
    first = await set_scene([CALL, CALL, "Done."])
    await conversation(first, ["Wall time: 0.0512 seconds\nok", "in 1.20s at 09:15:01"])
    tree = await first.tree()
    scene = await set_scene([LIVE], playback=playback(tree, calls=2))
    messages = await conversation(scene, ["Wall time: 0.1 seconds\nok", "in 1.33s at 10:20:30"])
    assert messages[-1]["content"] == LIVE
    report = report_of(scene)
    assert report.is_faithful
    assert report.varied_messages == 1
    # What the policy is shown for the past is what it was shown then; only what is new is as it came.
    prompt = np.array(scene.engine.requests[0].prompt_ids)
    past = np.concatenate([tree.completions[1].prompt_ids, tree.completions[1].sampled_ids])
    assert np.array_equal(prompt[: len(past)], past)
    assert "10:20:30" in scene.engine.tokenizer.decode(prompt[len(past) :].tolist())


@pytest.mark.parametrize(
    ("before", "now"), [("3 failed", "4 failed"), ("a.txt", "b.txt"), ("exit code 0", "exit code 1")]
)
async def test_what_tools_found_otherwise_is_a_divergence(set_scene: SetScene, before: str, now: str) -> None:
    first = await set_scene([CALL, "Done."])
    await conversation(first, [before], turns=2)
    scene = await set_scene([LIVE], playback=playback(await first.tree()))
    messages = await conversation(scene, [now], turns=2)
    assert messages[-1]["content"] == LIVE
    report = report_of(scene)
    assert report.divergence_count == 1
    assert report.unused_calls == 1
    (divergence,) = report.divergences
    assert (divergence.call, divergence.taken) == (1, OnDivergence.LIVE)
    assert f"-{before}" in divergence.difference
    assert f"+{now}" in divergence.difference


async def test_a_request_that_lacks_a_recorded_message_is_a_divergence(set_scene: SetScene) -> None:
    reminder = {"role": "user", "content": "Go on."}
    first = await set_scene([CALL, "Done."])
    call = await ask(first, [QUESTION])
    await ask(first, [QUESTION, call, result(call, "2 failed"), reminder])
    scene = await set_scene([LIVE], playback=playback(await first.tree()))
    call = await ask(scene, [QUESTION])
    assert (await ask(scene, [QUESTION, call, reminder]))["content"] == LIVE
    assert report_of(scene).divergence_count == 1


async def test_a_divergence_ends_the_agent_where_it_is_asked_to(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    stopping = playback(tree, samples_on=False, on_divergence=OnDivergence.STOP)
    scene = await set_scene([], playback=stopping)
    first = await ask(scene, [QUESTION])
    told = await refused(scene, [QUESTION, first, result(first, "other.txt")])
    assert "model call 2 is not the recorded one" in told
    end, why = await scene.gateway.budget_spent("s1")
    assert end is AgentEnd.REPLAYED
    assert "model call 2" in why
    assert not scene.engine.requests


async def test_an_agent_that_asks_on_after_its_end_was_ended_by_the_replay(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    scene = await set_scene([], playback=playback(tree, on_divergence=OnDivergence.STOP))
    for number in range(2):  # as parallel sub-agents do before the first refusal has ended them
        await refused(scene, [{"role": "user", "content": f"Another question {number}."}])
    assert (await scene.gateway.budget_spent("s1"))[0] is AgentEnd.REPLAYED


async def test_a_recorded_answer_to_another_request_is_never_trained(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    taking = playback(tree, samples_on=False, on_divergence=OnDivergence.RECORDED)
    scene = await set_scene([], playback=taking)
    messages = await conversation(scene, ["other.txt", "b.txt"])
    assert messages[-1]["content"] == "Done."
    assert taking.report.divergence_count == 1
    assert taking.report.calls == 3
    given = await scene.captured()
    assert [it.untrainable for it in given] == [None, ANOTHER_REQUEST, ANOTHER_REQUEST]
    assert "other.txt" in scene.engine.tokenizer.decode(given[2].prompt_ids.tolist())


async def test_an_agent_that_asks_more_than_the_recorded_one_is_ended(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    for is_whole, divergences in ((True, 1), (False, 0)):
        scene = await set_scene(
            [], playback=playback(tree, is_whole=is_whole, samples_on=False, on_divergence=OnDivergence.STOP)
        )
        messages = await conversation(scene)
        await refused(scene, [*messages, {"role": "user", "content": "And now?"}])
        report = report_of(scene)
        assert report.divergence_count == divergences
        assert (await scene.gateway.budget_spent("s1"))[0] is AgentEnd.REPLAYED


async def test_a_replay_up_to_a_call_ends_there_without_a_divergence(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    scene = await set_scene([], playback=playback(tree, calls=1, samples_on=False))
    first = await ask(scene, [QUESTION])
    told = await refused(scene, [QUESTION, first, result(first, "a.txt")])
    assert "the first 1 model calls were replayed" in told
    report = report_of(scene)
    assert report.is_faithful


async def test_answers_that_were_broken_off_are_not_given(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    first = await set_scene([Answer("Broken off.", gate=gate, gate_at=2), "Whole."])
    asking = asyncio.create_task(ask(first, [QUESTION]))
    await first.engine.waiting.wait()
    asking.cancel()
    await first.engine.abort.wait()
    await ask(first, [QUESTION])
    tree = await first.tree()
    assert [it.finish_reason for it in tree.completions] == [FinishReason.CANCELLED, FinishReason.STOP]
    scene = await set_scene([], playback=playback(tree, samples_on=False))
    assert (await ask(scene, [QUESTION]))["content"] == "Whole."


async def test_what_a_branch_sampled_is_continued_by_sampling(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    branch = playback(tree, calls=1)
    scene = await set_scene([CALL, LIVE], playback=branch)
    messages = await conversation(scene, ["a.txt", "c.txt"])
    assert messages[-1]["content"] == LIVE
    assert len(scene.engine.requests) == 2
    assert branch.report.divergence_count == 0


async def test_budgets_hold_for_the_replayed_part_too(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    scene = await set_scene([LIVE], playback=playback(tree, calls=2), budgets=Budgets(max_completions=2))
    first = await ask(scene, [QUESTION])
    messages = [QUESTION, first, result(first, "a.txt")]
    second = await ask(scene, messages)
    told = await refused(scene, [*messages, second, result(second, "b.txt")])
    assert "all 2 model calls are used" in told


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    results=st.lists(st.lists(st.text(max_size=20), max_size=3), min_size=1, max_size=4),
    orders=st.tuples(st.randoms(use_true_random=False), st.randoms(use_true_random=False)),
)
async def test_conversations_replay_in_whatever_order_they_come(
    set_scene: SetScene, results: list[list[str]], orders: tuple[Any, Any]
) -> None:
    async def talk(scene: Scene, chance: Any) -> None:
        """All conversations, turn by turn, in an order that is left to chance."""
        talks = [[{"role": "user", "content": f"Question {place}."}] for place in range(len(results))]
        turns = [place for place, told in enumerate(results) for _ in range(len(told) + 1)]
        chance.shuffle(turns)
        told = [iter(one) for one in results]
        for place in turns:
            messages = talks[place]
            if len(messages) > 1:
                messages.append(result(messages[-1], next(told[place])))
            messages.append(await ask(scene, messages))

    first = await set_scene([CALL] * sum(len(told) + 1 for told in results))
    await talk(first, orders[0])
    tree = await first.tree()
    again = await set_scene([], playback=playback(tree, samples_on=False))
    await talk(again, orders[1])
    assert report_of(again).is_faithful
    given_again = {it.id: it for it in await again.captured()}
    assert all(same_tokens(given_again[it.id], it) for it in tree.completions)
