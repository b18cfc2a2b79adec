"""A session that begins with a recording gets its answers for as long as it asks what was recorded."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.gateway.playback import ANOTHER_REQUEST, Playback
from polar.models.chat import FinishReason
from polar.models.completion import REPLAYED, RESUMED, SUPERSEDED, Completion
from polar.models.session import AgentEnd, Origin, Progress, ReplayReport
from polar.models.task import Budgets, BudgetScope, OnDivergence
from polar.recordings.tree import TokenTree
from polar.trajectory.accounting import Exclusion
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.scripted_engine import Answer
from tests.gateways import CALL, SCHEMA
from tests.unit.gateway.conftest import Scene, SetScene
from tests.waiting import eventually

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


@asynccontextmanager
async def longest_gap() -> AsyncIterator[Callable[[], float]]:
    """How long the event loop stood still at most, in seconds of CPU time: a loaded machine stops it, too."""
    gaps = [0.0]

    async def beat() -> None:
        while True:
            begun = time.process_time()
            await asyncio.sleep(0)
            gaps.append(time.process_time() - begun)

    beating = asyncio.create_task(beat())
    yield lambda: max(gaps)
    beating.cancel()


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
    resumed = Playback(TokenTree(), Origin(session_id="same"), "same", earlier=tree)
    scene = await set_scene([], playback=resumed)
    await conversation(scene)
    again = await scene.tree()
    assert all(RESUMED in it.extra and REPLAYED not in it.extra for it in again.completions)
    stats = PrefixMerging(PrefixMerging.Options()).build(again).stats
    assert stats.trainable_tokens == stats.sampled_tokens > 0


async def test_a_branch_of_a_resumed_session_has_no_earlier_attempt(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    resumed = Playback(TokenTree(), Origin(session_id="parent"), "parent", earlier=tree)
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
    await eventually(lambda: first.gateway.progress("s1").sampled_tokens)
    gate.set()
    said = [choice["message"]["content"] for choice in (await (await asking).json())["choices"]]
    tree = await first.tree()
    assert [it.response.content for it in tree.completions] == ["Fast.", "Slow."]
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
    assert report.variations == ("Wall time: 0.0512 seconds → Wall time: 0.1 seconds",)
    # What the policy is shown for the past is what it was shown then; only what is new is as it came.
    prompt = np.array(scene.engine.requests[0].prompt_ids)
    past = np.concatenate([tree.completions[1].prompt_ids, tree.completions[1].sampled_ids])
    assert np.array_equal(prompt[: len(past)], past)
    assert "10:20:30" in scene.engine.tokenizer.decode(prompt[len(past) :].tolist())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("3 passed in 0.03s", "3 passed in 1.20s"),
        ("--- PASS: TestSum (0.00s)", "--- PASS: TestSum (0.01s)"),
        ("ok  \texample/sum\t0.005s", "ok  \texample/sum\t0.012s"),
        ("real\t0m0.012s", "real\t0m0.007s"),
        ("-rw-r--r-- 1 agent agent 20 Nov 18 20:19 a.txt", "-rw-r--r-- 1 agent agent 20 Dec  8 09:01 a.txt"),
        ("Wed Nov 18 20:19:56 UTC 2026", "Thu Nov 19 07:01:02 UTC 2026"),
        ("2026-11-18 20:19:56,123 INFO ready", "2026-11-19 07:01:02,456 INFO ready"),
        ("[20:19:56] ready", "[07:01:02] ready"),
        (
            '127.0.0.1 - - [18/Nov/2026 20:19:56] "GET / HTTP/1.1" 200 -',
            '127.0.0.1 - - [19/Nov/2026 07:01:02] "GET / HTTP/1.1" 200 -',
        ),
        ("Date: Wed, 18 Nov 2026 20:19:56 GMT", "Date: Thu, 19 Nov 2026 07:01:02 GMT"),
        ("Today's date is Wednesday, November 18, 2026 (UTC).", "Today's date is Monday, May 4, 2027 (UTC)."),
        ("<current_date>2026-11-18</current_date>", "<current_date>2027-05-04</current_date>"),
        ("Chunk ID: 9fd3e7\nok", "Chunk ID: 12ab34\nok"),
        ('{"output": "took 7 ms\\n"}', '{"output": "took 12 ms\\n"}'),
    ],
)
async def test_clock_times_and_measured_durations_may_vary(
    set_scene: SetScene, before: str, now: str
) -> None:
    first = await set_scene([CALL, "Done."])
    await conversation(first, [before], turns=2)
    scene = await set_scene([], playback=playback(await first.tree(), samples_on=False))
    messages = await conversation(scene, [now], turns=2)
    assert messages[-1]["content"] == "Done."
    report = report_of(scene)
    assert report.is_faithful
    assert len(report.variations) == report.varied_messages == 1


async def test_a_prompt_that_is_rendered_anew_holds_the_recorded_words(set_scene: SetScene) -> None:
    """Another set of tools, as for a sub-agent that inherits the conversation."""

    async def talk(scene: Scene, told: str) -> Json:
        call = await ask(scene, [QUESTION])
        messages = [QUESTION, call, result(call, told)]
        messages.append(await ask(scene, messages))
        for content in ("Sum up.", "Shorter."):
            messages.append({"role": "user", "content": content})
            messages.append(await ask(scene, messages, tools=[]))
        return messages[-1]

    first = await set_scene([CALL, "Done.", "It took no time.", "No time."])
    await talk(first, "took 7 ms")
    tree = await first.tree()
    for calls, script in ((3, [LIVE]), (2, ["It took no time.", LIVE])):
        scene = await set_scene(script, playback=playback(tree, calls=calls))
        assert (await talk(scene, "took 9 ms"))["content"] == LIVE
        assert np.array_equal(scene.engine.requests[-1].prompt_ids, tree.completions[3].prompt_ids)
        assert report_of(scene).is_faithful


async def test_a_recording_is_let_go_of_once_it_is_used_up(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    scene = await set_scene([LIVE], playback=playback(tree, calls=2))
    beyond = weakref.ref(tree.completions[2].prompt_ids)
    del tree
    await conversation(scene, turns=2)
    assert beyond() is None


async def test_long_recordings_are_soon_ready(set_scene: SetScene) -> None:
    """2,000 turns up to 2,000,000 tokens, which make 8 GB of prompts."""
    one = (await recorded(set_scene)).completions[0]
    ids = np.zeros(2_000_000, np.int32)
    completions = tuple(replace(one, id=f"{turn}", prompt_ids=ids[: turn * 1000]) for turn in range(2000))
    begun = time.process_time()
    playback(TokenTree(completions, ()))
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("3 failed", "4 failed"),
        ("a.txt", "b.txt"),
        ("exit code 0", "exit code 1"),
        ("made /tmp/tmpk3x9qzab", "made /tmp/tmpabc123de"),
        ("pid 17", "pid 18"),
        ("The sum is 1000000007", "The sum is 2000000011"),
        ("main.c:12:05: error", "main.c:44:31: error"),
        ("inserted row id: 3", "inserted row id: 4"),
        ("d41d8cd98f00b204e9800998ecf8427e  out.bin", "0cc175b9c0f1b6a831c399e269772661  out.bin"),
        ("next full moon: 2024-01-25", "next full moon: 2031-09-30"),
        ("Due on Monday", "Due on Friday"),
        ("timed out after 5 s", "timed out after 900 s"),
        ("PASSED: 17:03", "PASSED: 1:59"),
        ("took 7 ms, wrote tmpk3x9qz", "took 9 ms, wrote tmpabc123"),
        ("00:16:35:12:34:56 eth0", "00:16:36:12:34:56 eth0"),
        ('took 7 ms"b', "took 9 ms\nb"),
    ],
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
    assert f"+{now.splitlines()[0]}" in divergence.difference


async def test_what_the_policy_is_shown_next_holds_the_names_of_its_own_sandbox(set_scene: SetScene) -> None:
    first = await set_scene([CALL, CALL, "Done."])
    await conversation(first, ["made tmpk3x9qz", "b.txt"])
    scene = await set_scene([CALL, LIVE], playback=playback(await first.tree(), calls=2))
    await conversation(scene, ["made tmpabc123", "b.txt"])
    shown = [scene.engine.tokenizer.decode(list(it.prompt_ids)) for it in scene.engine.requests]
    assert all("tmpabc123" in text and "tmpk3x9qz" not in text for text in shown)


async def test_equal_messages_with_other_tokens_are_a_divergence(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    other = TokenTree(
        tuple(replace(it, prompt_ids=(it.prompt_ids + 7).astype(np.int32)) for it in tree.completions),
        tree.links,
    )
    scene = await set_scene([LIVE], playback=playback(other, calls=2))
    assert (await ask(scene, [QUESTION]))["content"] == LIVE
    (divergence,) = report_of(scene).divergences
    assert divergence.difference == "The messages are the recorded ones, and make another prompt."


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 1}, '+{"temperature":null'),
        ({"stop": ["x"]}, '"stop":["x"]'),
        ({"response_format": {"type": "json_object"}}, "-null"),
    ],
)
async def test_the_same_question_under_other_limits_is_another(
    set_scene: SetScene, fields: Json, told: str
) -> None:
    first = await set_scene(["One."])
    await ask(first, [QUESTION])
    scene = await set_scene([LIVE], playback=playback(await first.tree()))
    await ask(scene, [QUESTION], **fields)
    (divergence,) = report_of(scene).divergences
    assert told in divergence.difference


async def test_a_probe_and_its_question_keep_their_own_answers_in_any_order(set_scene: SetScene) -> None:
    answer = "A full answer to the question."
    first = await set_scene([answer, answer])
    probe = await ask(first, [QUESTION], max_tokens=1)
    await ask(first, [QUESTION])
    scene = await set_scene([], playback=playback(await first.tree(), samples_on=False))
    assert (await ask(scene, [QUESTION]))["content"] == answer
    assert await ask(scene, [QUESTION], max_tokens=1) == probe


async def test_new_conversations_after_the_branch_point_are_no_divergences(set_scene: SetScene) -> None:
    side: Json = {"role": "user", "content": "Title?"}
    first = await set_scene(["Title.", CALL, "Done."])
    await ask(first, [side])
    await conversation(first, turns=2)
    scene = await set_scene([LIVE] * 3, playback=playback(await first.tree(), calls=2))
    await conversation(scene, ["other.txt"], turns=2)
    await ask(scene, [{"role": "user", "content": "Look around for me."}])
    report = report_of(scene)
    assert (report.divergence_count, report.unused_calls) == (0, 1)
    assert (await ask(scene, [side]))["content"] == "Title."


async def test_hostile_results_do_not_hold_up_other_sessions(set_scene: SetScene) -> None:
    """Texts whose lines are shuffled, whose durations all differ, and that are one line."""
    chance = random.Random(1)
    letters = [chr(0x100 + place) for place in range(150)]
    texts = [
        ["\n".join(chance.choices(letters, k=32_000)) for _ in range(2)],
        ["\n".join(f"step {n} took {n + more} ms" for n in range(60_000)) for more in (0, 1)],
        ["took 1 ms " * 120_000 + end for end in "ab"],
    ]
    for before, now in texts:
        asked = [{"role": "user", "content": text} for text in (before, now)]
        first = await set_scene(["One."], max_context=2_000_000)
        await ask(first, asked[:1])
        longest = []
        for begun in (None, playback(await first.tree())):
            scene = await set_scene([LIVE], max_context=2_000_000, playback=begun)
            async with longest_gap() as gap:
                await ask(scene, asked[1:])
            longest.append(gap())
        assert report_of(scene).divergence_count == 1
        assert longest[1] < longest[0] + 0.4, "as long as without a recording"


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


async def test_budgets_count_what_is_new(set_scene: SetScene) -> None:
    """Calls and tokens; what runs tell of their progress is the whole session."""
    tree = await recorded(set_scene)
    shared = sum(it.sampled_tokens for it in tree.completions[:2])
    branch = playback(tree, calls=2)
    limits = Budgets(max_completions=1, max_sampled_tokens=3)
    scene = await set_scene([LIVE], playback=branch, budgets=limits)
    messages = await conversation(scene)
    assert branch.report.calls == 2
    done = Progress(completions=3, sampled_tokens=shared + 3, replayed_tokens=shared)
    assert scene.gateway.progress("s1") == done
    told = await refused(scene, [*messages, {"role": "user", "content": "And?"}])
    assert "all 1 model calls are used" in told
    assert len((await scene.captured())[-1].sampled_ids) == 3


async def test_budgets_count_the_whole_session_where_that_is_asked_for(set_scene: SetScene) -> None:
    tree = await recorded(set_scene)
    branch = playback(tree, calls=2, budgets=BudgetScope.SESSION)
    scene = await set_scene([LIVE], playback=branch, budgets=Budgets(max_completions=2))
    first = await ask(scene, [QUESTION])
    messages = [QUESTION, first, result(first, "a.txt")]
    second = await ask(scene, messages)
    told = await refused(scene, [*messages, second, result(second, "b.txt")])
    assert "all 2 model calls are used" in told


@pytest.mark.parametrize("is_branch", [False, True])
async def test_what_earlier_attempts_sampled_is_counted(set_scene: SetScene, is_branch: bool) -> None:
    tree = await recorded(set_scene) if is_branch else TokenTree()
    origin = Origin(session_id="parent" if is_branch else "s1", calls=1 if is_branch else None)
    first = await set_scene([CALL, "Half."][is_branch:], playback=Playback(tree, origin, "s1"))
    messages = await conversation(first, turns=2)
    resumed = Playback(tree, origin, "s1", earlier=await first.tree())
    again = await set_scene([LIVE], playback=resumed, budgets=Budgets(max_completions=3 - is_branch))
    assert await conversation(again, turns=2) == messages
    messages.append({"role": "user", "content": "And?"})
    messages.append(await ask(again, messages))
    messages.append({"role": "user", "content": "And then?"})
    assert "model calls are used" in await refused(again, messages)


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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    attempts=st.lists(
        st.tuples(st.lists(st.sampled_from(["alpha", "beta"]), max_size=4), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
async def test_what_all_attempts_sampled_is_trained_or_left_out_by_name(
    set_scene: SetScene, attempts: list[tuple[list[str], bool]]
) -> None:
    """Whatever tools print in each attempt, and whether or not its node is stopped during a call."""
    had: list[Completion] = []
    tree = TokenTree()
    for results, is_broken_off in attempts:
        resumed = Playback(TokenTree(), Origin(session_id="s1"), "s1", earlier=TokenTree(tuple(had)))
        scene = await set_scene([CALL] * (len(results) + 1), playback=resumed if had else None)
        messages = await conversation(scene, results, turns=len(results))
        if is_broken_off:
            scene.engine.script[:] = [Answer("Broken off here.", gate=asyncio.Event(), gate_at=2)] * 9
            asking = asyncio.create_task(ask(scene, [*messages, {"role": "user", "content": "And?"}]))
            gated = asyncio.create_task(scene.engine.waiting.wait())
            await asyncio.wait({asking, gated}, return_when=asyncio.FIRST_COMPLETED)
            gated.cancel()
        tree = await scene.tree()
        if is_broken_off:
            await asyncio.gather(asking, return_exceptions=True)
        had += [it for it in tree.completions if RESUMED not in it.extra]
    sampled = {it.id: it.sampled_tokens for it in had if it.sampled_tokens}
    assert {it.id: it.sampled_tokens for it in tree.completions if it.sampled_tokens} == sampled
    stats = PrefixMerging(PrefixMerging.Options()).build(tree).stats
    assert stats.sampled_tokens == sum(sampled.values())
    assert stats.sampled_tokens == stats.trainable_tokens + sum(stats.excluded.values())
    asked_for = [it for it in tree.completions if SUPERSEDED not in it.extra]
    left_out = stats.sampled_tokens - sum(it.sampled_tokens for it in asked_for)
    assert stats.excluded.get(Exclusion.SUPERSEDED_BY_RESUME, 0) == left_out


async def two_agents(scene: Scene, helper_turns: int = 1) -> list[str]:
    """A main agent with two turns, and beside it, after the first of them, a helper; what both were told."""
    main = [QUESTION, await ask(scene, [QUESTION])]
    helper: list[Json] = [{"role": "user", "content": "Help."}]
    for turn in range(helper_turns):
        helper += [await ask(scene, helper), {"role": "user", "content": f"And {turn}?"}]
    main.append(await ask(scene, [*main, {"role": "user", "content": "Go on."}]))
    return [message["content"] for message in (*main, *helper) if message["role"] == "assistant"]


@pytest.mark.parametrize("is_resumed", [True, False])
async def test_a_helper_that_was_broken_off_is_answered_while_others_still_replay(
    set_scene: SetScene, is_resumed: bool
) -> None:
    first = await set_scene(["Main 1.", "Helper 1.", "Main 2."])
    await two_agents(first)
    tree = await first.tree()
    begun = playback(tree, is_whole=False)
    if is_resumed:
        begun = Playback(TokenTree(), Origin(session_id="s1"), "s1", earlier=tree)
    scene = await set_scene([LIVE], playback=begun)
    assert await two_agents(scene, 2) == ["Main 1.", "Main 2.", "Helper 1.", LIVE]
    report = report_of(scene)
    assert report.is_faithful
    assert report.calls == 3
    assert len(scene.engine.requests) == 1


async def test_a_helper_that_had_ended_and_goes_on_is_a_divergence(set_scene: SetScene) -> None:
    first = await set_scene(["Main 1.", "Helper 1.", "Main 2."])
    await two_agents(first)
    scene = await set_scene([LIVE], playback=playback(await first.tree()))
    assert await two_agents(scene, 2) == ["Main 1.", "Main 2.", "Helper 1.", LIVE]
    assert report_of(scene).divergence_count == 1
