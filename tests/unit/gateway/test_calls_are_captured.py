"""Whatever becomes of a call, its tokens are in the session's capture as they were sampled."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.engines.base import EngineError
from polar.gateway.server import new_key
from polar.models.chat import FinishReason
from polar.rendering.base import Renderer
from polar.trajectory.per_request import PerRequest
from tests.captures import grow
from tests.fakes.scripted_engine import Answer, logprob_of
from tests.unit.gateway.conftest import SetScene


async def events(response: aiohttp.ClientResponse) -> list[str]:
    """The data of each event, and the comments."""
    text = await response.text()
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def test_a_completion_is_captured_with_prompt_tokens_and_logprobs(
    set_scene: SetScene, renderer: Renderer
) -> None:
    scene = await set_scene(["Hello there."])
    async with scene.post(scene.body(temperature=0.5, max_tokens=50)) as response:
        assert response.status == 200
        body = await response.json()
    assert body["choices"][0]["message"]["content"] == "Hello there."
    (completion,) = await scene.captured()
    sampled = scene.engine.encode("Hello there.")
    assert completion.sampled_ids.tolist() == sampled
    assert completion.prompt_ids.tolist() == renderer.render(completion.messages, ())
    assert completion.prompt_ids.tolist() == scene.engine.requests[0].prompt_ids
    assert completion.logprobs.tolist() == [logprob_of(id) for id in sampled]
    assert completion.policy_versions.tolist() == [0] * len(sampled)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.asked.temperature == completion.used.temperature == 0.5
    assert completion.asked.seed is None
    assert completion.used.seed == scene.engine.requests[0].sampling.seed
    assert 0 < completion.started_at <= completion.first_token_at <= completion.ended_at
    assert body["usage"] == {
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(sampled),
        "total_tokens": len(completion.prompt_ids) + len(sampled),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_captures_the_same_tokens_as_a_whole_answer(set_scene: SetScene) -> None:
    text = 'Look:\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls 🙂"}}\n</tool_call>'
    scene = await set_scene([text, text])
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    async with scene.post(scene.body(tools=tools)) as response:
        whole = (await response.json())["choices"][0]
    async with scene.post(scene.body(tools=tools, stream=True)) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        *chunks, done = await events(response)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert content == whole["message"]["content"] == "Look:"
    assert call["function"] == whole["message"]["tool_calls"][0]["function"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    first, second = await scene.captured()
    assert np.array_equal(first.sampled_ids, second.sampled_ids)
    assert np.array_equal(first.logprobs, second.logprobs)
    assert first.finish_reason is second.finish_reason is FinishReason.TOOL_CALLS
    assert second.parent is None


async def test_a_second_turn_extends_the_exact_tokens_of_the_first(set_scene: SetScene) -> None:
    call = '{"name": "bash",  "arguments": {"b": 1.0,   "a": "x"}}'
    scene = await set_scene([f"<tool_call>\n{call}\n</tool_call>", "Done."])
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    asked = {"role": "user", "content": "Go"}
    async with scene.post(scene.body(messages=[asked], tools=tools)) as response:
        message = (await response.json())["choices"][0]["message"]
    echoed = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "other", "type": "function", "function": {"name": "bash", "arguments": '{"a":"x","b":1}'}}
        ],
    }
    assert message["tool_calls"][0]["function"]["arguments"] != '{"a":"x","b":1}'
    result = {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "ok"}]}
    async with scene.post(scene.body(messages=[asked, echoed, result], tools=tools)) as response:
        assert response.status == 200
    first, second = await scene.captured()
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.parent == first.id
    assert second.prompt_ids.tolist()[: len(before)] == before
    assert second.messages[:2] == (*first.messages, first.response)
    assert second.prompt_ids.tolist() == scene.engine.requests[1].prompt_ids


async def test_a_rewritten_history_starts_a_conversation_of_its_own(set_scene: SetScene) -> None:
    scene = await set_scene(["One.", "Two."])
    async with scene.post(scene.body("a")) as response:
        assert response.status == 200
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Something else."},
        {"role": "user", "content": "b"},
    ]
    async with scene.post(scene.body(messages=messages)) as response:
        assert response.status == 200
    assert [completion.parent for completion in await scene.captured()] == [None, None]


async def test_the_longest_sampled_turn_is_continued(set_scene: SetScene) -> None:
    scene = await set_scene(["One.", "Two.", "Three."])
    messages: list[dict[str, str]] = []
    for said in ("One.", "Two.", "Three."):
        messages.append({"role": "user", "content": "next"})
        async with scene.post(scene.body(messages=messages)) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == said
        messages.append({"role": "assistant", "content": f" {said}\n"})
    first, second, third = await scene.captured()
    assert (first.parent, second.parent, third.parent) == (None, first.id, second.id)


async def test_a_client_that_leaves_aborts_the_engine_and_is_recorded(set_scene: SetScene) -> None:
    for stream in (True, False):
        gate = asyncio.Event()
        scene = await set_scene([Answer("one two three four", gate=gate, gate_at=2)])
        call = asyncio.create_task(scene.post(scene.body(stream=stream)).__aenter__())
        await scene.engine.waiting.wait()
        if stream:
            (await call).close()
        else:
            call.cancel()
        await scene.engine.abort.wait()
        (completion,) = await scene.captured()
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.sampled_ids.tolist() == scene.engine.encode("one two three four")[:2]
        assert len(completion.logprobs) == 2


async def test_closing_a_session_aborts_its_calls_and_later_ones_get_410(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("one two", gate=asyncio.Event(), gate_at=1)])
    call = asyncio.create_task(scene.post(scene.body()).__aenter__())
    await scene.engine.waiting.wait()
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert scene.engine.aborted == [completion.id]
    await asyncio.gather(call, return_exceptions=True)
    async with scene.post(scene.body()) as response:
        assert response.status == 410
        assert (await response.json())["error"]["code"] == "session_ended"


async def test_an_engine_that_fails_midway_ends_the_stream_with_an_error(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("one two three", failure=EngineError("boom"), fail_at=2)])
    async with scene.post(scene.body(stream=True)) as response:
        assert response.status == 200
        *_, last = await events(response)
    assert json.loads(last)["error"]["code"] == "engine_failed"
    assert "boom" not in last
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.ERROR
    assert len(completion.sampled_ids) == 2
    assert "boom" in completion.extra["error"]


async def test_a_waiting_stream_is_kept_alive(set_scene: SetScene) -> None:
    from polar.config.settings import GatewaySettings

    gate = asyncio.Event()
    settings = GatewaySettings(keepalive_seconds=0.01)
    scene = await set_scene([Answer("Hi", gate=gate)], settings=settings)
    async with scene.post(scene.body(stream=True)) as response:
        seen = b""
        while b": keep-alive" not in seen:
            seen += await response.content.readany()
        assert b'"role":"assistant"' in seen
        gate.set()
        rest = await response.content.read()
    assert b'"content":"Hi"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_stop_string_ends_the_answer_and_is_not_shown(set_scene: SetScene) -> None:
    scene = await set_scene(["one STOP two", "one STOP two"])
    async with scene.post(scene.body(stop=["STOP"])) as response:
        choice = (await response.json())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    async with scene.post(scene.body(stop="STOP", stream=True)) as response:
        *chunks, _ = await events(response)
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "one "
    first, second = await scene.captured()
    assert first.response == second.response
    assert len(first.sampled_ids) < len(scene.engine.encode("one STOP two"))


async def test_a_cut_off_answer_can_be_continued(set_scene: SetScene, tokenizer: Tokenizer) -> None:
    scene = await set_scene(["1, 2, 3, 4, 5, 6", "ok"])
    async with scene.post(scene.body("Count", max_completion_tokens=4)) as response:
        choice = (await response.json())["choices"][0]
    assert choice["finish_reason"] == "length"
    messages = [{"role": "user", "content": "Count"}, choice["message"], {"role": "user", "content": "more"}]
    async with scene.post(scene.body(messages=messages)) as response:
        assert response.status == 200
    first, second = await scene.captured()
    start = len(first.prompt_ids) + 4
    assert second.parent == first.id
    assert second.prompt_ids[start] == tokenizer.token_to_id("<|im_end|>")


async def test_a_fault_of_our_own_ends_the_stream_with_an_error_and_is_recorded(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("one two", failure=RuntimeError("secret detail"), fail_at=1)])
    async with scene.post(scene.body(stream=True)) as response:
        *_, last = await events(response)
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert "secret" not in last
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.ERROR


async def test_a_key_of_stray_bytes_is_an_unknown_key(set_scene: SetScene) -> None:
    scene = await set_scene([])
    reader, writer = await asyncio.open_connection(scene.gateway.host, scene.gateway.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_a_full_disk_fails_the_call_and_keeps_the_log_sound(
    set_scene: SetScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await set_scene(["one", "two"])
    async with scene.post(scene.body()) as response:
        assert response.status == 200
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    assert not scene.gateway.has_lost_call(scene.grant.session_id)
    async with scene.post(scene.body()) as response:
        assert response.status == 500
    monkeypatch.undo()
    assert scene.gateway.has_lost_call(scene.grant.session_id)
    assert [completion.response.content for completion in await scene.captured()] == ["one"]


async def test_what_the_model_is_not_shown_is_counted_by_name(set_scene: SetScene) -> None:
    scene = await set_scene(["One.", "Two."])
    parts = [{"type": "text", "text": "See "}, {"type": "image_url"}, {"type": "image_url"}]
    body = {"model": "scripted", "messages": [{"role": "user", "content": parts}]}
    for sent in (body, scene.body()):
        async with scene.post(sent) as response:
            assert response.status == 200
    shown, plain = await scene.captured()
    assert (shown.omitted, plain.omitted) == ({"image": 2}, {})
    assert PerRequest(PerRequest.Options()).build(grow([shown, plain])).stats.omitted == {"image": 1}


async def test_whoever_follows_a_capture_is_told_how_long_it_is(set_scene: SetScene, tmp_path: Path) -> None:
    scene = await set_scene(["One.", "Two."])
    told: list[tuple[str, int]] = []
    followed = replace(
        scene.grant,
        session_id="s2",
        key=new_key(),
        capture=tmp_path / "s2.log",
        grown=lambda completion, length: told.append((completion.response.content, length)),
    )
    scene.gateway.open_session(followed)
    lengths = []
    for content in ("Hi", "Hello"):
        async with scene.post(scene.body(content), key=followed.key) as response:
            assert response.status == 200
        lengths.append(followed.capture.stat().st_size)
    assert told == [("One.", lengths[0]), ("Two.", lengths[1])]
