"""Chat mode: the engine renders; the gateway records its ids, finds what a request follows, keeps budgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from polar.config.settings import GatewaySettings
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.gateway.playback import Playback
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.chat import FinishReason
from polar.models.completion import Completion
from polar.models.session import Origin
from polar.models.task import Budgets, SamplingPin
from polar.recordings.capture import parse_capture
from tests.captures import read_capture
from tests.fakes.character_chat import END, ROLES, Said, logprob_of, prompt_ids
from tests.fakes.sglang_wire import SglangWire, sglang_wire
from tests.fakes.vllm_wire import VllmWire, vllm_wire

CLIENTS: dict[str, Any] = {"vllm": VllmEngine, "sglang": SglangEngine, "openai": OpenAIEngine}
LS = {"type": "function", "function": {"name": "ls", "description": "", "parameters": {}}}

Wire = VllmWire | SglangWire


@dataclass
class Scene:
    gateway: Gateway
    wire: Wire
    grant: SessionGrant
    http: aiohttp.ClientSession

    def ask(self, messages: list[dict[str, Any]], retry: str = "0", **fields: Any) -> Any:
        url = f"http://{self.gateway.host}:{self.gateway.port}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {self.grant.key}", "x-stainless-retry-count": retry}
        return self.http.post(url, json={"model": "small", "messages": messages} | fields, headers=headers)

    async def said(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        async with self.ask(messages, **fields) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def refused(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[int, str, str]:
        async with self.ask(messages, **fields) as response:
            error = (await response.json())["error"]
            return response.status, error["code"], error["message"]

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


SetScene = Callable[..., Awaitable[Scene]]


@pytest.fixture
async def set_scene(tmp_path: Path) -> AsyncIterator[SetScene]:
    async with AsyncExitStack() as stack:

        async def scene(
            *answers: Any, kind: str = "vllm", budgets: Budgets | None = None, **grant: Any
        ) -> Scene:
            served = sglang_wire if kind == "sglang" else vllm_wire
            wire: Wire = await stack.enter_async_context(served(*answers))
            engine = CLIENTS[kind](wire.url)
            stack.push_async_callback(engine.close)
            gateway = Gateway(
                GatewaySettings(keepalive_seconds=0.05), engine, None, await engine.model_info()
            )
            await stack.enter_async_context(gateway)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            granted = SessionGrant(
                "s1",
                new_key(),
                tmp_path / f"{gateway.port}.capture",
                SamplingPin(),
                budgets or Budgets(),
                **grant,
            )
            gateway.open_session(granted)
            return Scene(gateway, wire, granted, http)

        yield scene


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_and_logprobs_are_those_the_engine_gives(
    set_scene: SetScene, kind: str, stream: bool
) -> None:
    scene = await set_scene(Said("Hello.", reasoning="Hm."), kind=kind)
    async with scene.ask([user("Hi")], stream=stream) as response:
        assert response.status == 200
        await response.read()
    (completion,) = await scene.captured()
    tokens = Said("Hello.").tokens
    assert completion.prompt_ids.tolist() == prompt_ids(scene.wire.bodies[0])
    assert completion.sampled_ids.tolist() == tokens
    assert completion.logprobs.tolist() == [logprob_of(id) for id in tokens]
    assert completion.policy_versions.tolist() == [0] * len(tokens)
    assert (completion.response.content, completion.response.reasoning) == ("Hello.", "Hm.")
    assert (completion.untrainable, completion.finish_reason) == (None, FinishReason.STOP)


async def test_a_second_turn_extends_the_first_where_its_tokens_do(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."), Said("Fine."))
    await scene.said([user("Hi")])
    answer = await scene.said([user("Hi"), assistant("Hello."), user("You?")])
    first, second = await scene.captured()
    assert (second.parent, second.follows) == (first.id, first.id)
    before = np.concatenate([first.prompt_ids, first.sampled_ids])
    assert second.prompt_ids[: len(before)].tolist() == before.tolist()
    assert answer["usage"]["prompt_tokens"] == len(second.prompt_ids)


async def test_a_second_turn_whose_history_drifted_has_no_parent(set_scene: SetScene) -> None:
    drifted = Said("Hello.", ids=[ord("H"), ord("e") + 1000, END])
    scene = await set_scene(drifted, Said("Fine."))
    await scene.said([user("Hi")])
    await scene.said([user("Hi"), assistant("Hello."), user("You?")])
    first, second = await scene.captured()
    assert first.sampled_ids.tolist() == drifted.ids
    assert (second.parent, second.follows) == (None, first.id)
    assert second.prompt_ids.tolist() == prompt_ids(scene.wire.bodies[1])


async def test_the_engine_knows_its_tool_calls_again(set_scene: SetScene) -> None:
    calls = Said("", calls=(("ls", {"path": "a"}),))
    scene = await set_scene(calls, Said("Done."))
    answer = await scene.said([user("Hi")], tools=[LS])
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["id"] == "call-0"
    result = {"role": "tool", "tool_call_id": "call-0", "content": "a.txt"}
    await scene.said([user("Hi"), message, result], tools=[LS])
    first, second = await scene.captured()
    assert second.parent == first.id
    assert scene.wire.bodies[1]["messages"][1]["tool_calls"][0]["id"] == "call-0"


@pytest.mark.parametrize("stream", [False, True])
async def test_text_alone_is_recorded_counted_and_never_trainable(set_scene: SetScene, stream: bool) -> None:
    scene = await set_scene(Said("Hello."), kind="openai")
    async with scene.ask([user("Hi")], stream=stream, stream_options={"include_usage": True}) as response:
        text = await response.text()
    assert '"completion_tokens":7' in text
    completions = await scene.captured()
    (completion,) = completions
    assert completion.untrainable == "the engine gives no token ids"
    assert (completion.response.content, len(completion.sampled_ids)) == ("Hello.", 0)
    assert completion.sampled_tokens == 7


async def test_tokens_without_logprobs_are_delivered_and_never_trained(set_scene: SetScene) -> None:
    def event(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
        return {"choices": [{"delta": delta} | choice], "prompt_token_ids": [1, 2]}

    answer = [
        event({"content": "Hel"}, token_ids=[5]),
        event({"content": "lo"}, token_ids=[6], finish_reason="stop"),
        "[DONE]",
    ]
    scene = await set_scene(answer)
    async with scene.ask([user("Hi")], stream=True) as response:
        assert "lo" in await response.text()
    (completion,) = await scene.captured()
    assert completion.untrainable == "the engine sent 1 token ids with 0 logprobs"
    assert len(completion.logprobs) == len(completion.sampled_ids) == 2
    assert np.isnan(completion.logprobs).all()


async def test_pins_go_to_the_engine_and_are_recorded(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."))
    await scene.gateway.close_session("s1")
    grant = SessionGrant(
        "s2", new_key(), scene.grant.capture, SamplingPin(temperature=1.0, seed=3, max_tokens=50), Budgets()
    )
    scene.gateway.open_session(grant)
    scene.grant = grant
    await scene.said([user("Hi")], temperature=0.1, max_tokens=400, stop=["x"])
    (completion,) = await scene.captured()
    (asked,) = scene.wire.bodies
    assert (asked["temperature"], asked["max_tokens"], asked["stop"]) == (1.0, 50, ["x"])
    assert (completion.asked.temperature, completion.used.temperature) == (0.1, 1.0)
    assert (completion.used.seed, completion.used.max_tokens) == (asked["seed"], 50)


async def test_without_a_limit_the_engine_fills_its_context(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."))
    await scene.said([user("Hi")])
    assert "max_tokens" not in scene.wire.bodies[0]


async def test_a_limit_that_runs_over_the_context_is_shortened(set_scene: SetScene) -> None:
    over = "This model's maximum context length is 512 tokens and your request has 100 input tokens"
    scene = await set_scene((400, {"error": {"message": over}}), Said("Hello."))
    await scene.said([user("Hi")], max_tokens=500)
    (completion,) = await scene.captured()
    assert [body["max_tokens"] for body in scene.wire.bodies] == [500, 412]
    assert (completion.asked.max_tokens, completion.used.max_tokens) == (500, 412)


async def test_a_prompt_that_does_not_fit_is_the_provider_s_overflow(set_scene: SetScene) -> None:
    over = "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens"
    scene = await set_scene((400, {"error": {"message": over}}))
    status, code, message = await scene.refused([user("Hi")], max_tokens=10)
    assert (status, code) == (400, "context_length_exceeded")
    assert "512" in message
    assert "600" in message
    assert len(scene.wire.bodies) == 1


async def test_what_the_engine_does_not_take_is_the_client_s_error(set_scene: SetScene) -> None:
    scene = await set_scene((400, {"error": {"message": "roles must alternate"}}))
    status, _, message = await scene.refused([user("Hi"), user("Hi")])
    assert status == 400
    assert "roles must alternate" in message
    assert scene.wire.url not in message


async def test_the_sampled_token_budget_limits_and_then_ends(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."), budgets=Budgets(max_sampled_tokens=7))
    await scene.said([user("Hi")])
    assert scene.wire.bodies[0]["max_tokens"] == 7
    assert (await scene.refused([user("Again")]))[:2] == (400, "insufficient_quota")


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_the_context_budget_ends_a_conversation_that_filled_it(set_scene: SetScene, kind: str) -> None:
    scene = await set_scene(Said("Hello."), kind=kind, budgets=Budgets(max_context_tokens=12))
    await scene.said([user("Hi")])  # 5 + 7 tokens
    status, code, message = await scene.refused([user("Hi"), assistant("Hello."), user("More")])
    assert (status, code) == (400, "insufficient_quota")
    assert "12 of 12 context tokens" in message
    assert len(scene.wire.bodies) == 1


async def test_a_prompt_over_the_context_budget_is_refused_when_the_engine_tells_it(
    set_scene: SetScene,
) -> None:
    scene = await set_scene(Said("Hello."), budgets=Budgets(max_context_tokens=5))
    assert (await scene.refused([user("Hi")]))[:2] == (400, "insufficient_quota")


async def test_an_answer_is_cut_where_the_context_budget_is_full(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."), budgets=Budgets(max_context_tokens=8))
    async with scene.ask([user("Hi")], stream=True) as response:
        text = await response.text()
    assert '"finish_reason":"length"' in text
    (completion,) = await scene.captured()
    assert len(completion.prompt_ids) + len(completion.sampled_ids) == 8
    assert completion.finish_reason is FinishReason.LENGTH
    # Only at its end does an engine say how many tokens it sampled, so that one it did not send is missed.
    assert completion.untrainable == "it was cut before the engine had counted its tokens"


async def test_a_retry_gets_the_same_answer_without_a_second_generation(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."), Said("Another."))
    first = await scene.said([user("Hi")], retry="1")
    second = await scene.said([user("Hi")], retry="1")
    assert first == second
    assert len(scene.wire.bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation(set_scene: SetScene, stream: bool) -> None:
    never = asyncio.Event()
    scene = await set_scene([{"choices": [{"delta": {"content": "a"}}]}, never])
    call = asyncio.create_task(scene.said([user("Hi")], stream=stream))
    await scene.wire.arrived.wait()
    call.cancel()
    await asyncio.wait({call})
    await scene.wire.disconnected.wait()
    (completion,) = await scene.captured()
    assert completion.finish_reason is FinishReason.CANCELLED


async def test_sglang_keeps_a_streaming_harness_waiting_with_signs_of_life(set_scene: SetScene) -> None:
    scene = await set_scene(asyncio.Event(), kind="sglang")
    async with scene.ask([user("Hi")], stream=True) as response:
        lines = [await response.content.readline() for _ in range(5)]
    assert b": keep-alive\n" in lines


async def test_tokens_are_counted_by_the_engine(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."))
    assert await count(scene) == (200, {"input_tokens": 5})
    assert scene.wire.bodies == []


async def test_an_engine_that_cannot_count_says_so(set_scene: SetScene) -> None:
    scene = await set_scene(Said("Hello."), kind="openai")
    status, told = await count(scene)
    assert status == 404
    assert "cannot count tokens" in json.dumps(told)


async def count(scene: Scene) -> tuple[int, Any]:
    url = f"http://{scene.gateway.host}:{scene.gateway.port}/v1/messages/count_tokens"
    body = {"model": "small", "messages": [user("Hi")]}
    headers = {"x-api-key": scene.grant.key, "anthropic-version": "2023-06-01"}
    async with scene.http.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


def test_the_template_of_the_fake_is_what_these_tests_count_on() -> None:
    assert prompt_ids({"messages": [user("Hi")]}) == [ROLES["user"], 72, 105, END, ROLES["assistant"]]


async def test_logprobs_are_refused_by_name(set_scene: SetScene) -> None:
    scene = await set_scene()
    status, _code, message = await scene.refused([user("Hi")], logprobs=True)
    assert status == 400
    assert "logprobs" in message


async def test_a_begun_answer_is_refused_by_name(set_scene: SetScene) -> None:
    scene = await set_scene()
    url = f"http://{scene.gateway.host}:{scene.gateway.port}/v1/messages"
    body = {"model": "small", "max_tokens": 9, "messages": [user("Hi"), assistant("{")]}
    async with scene.http.post(url, json=body, headers={"x-api-key": scene.grant.key}) as response:
        assert response.status == 400
        assert "End with a message of the user" in (await response.json())["error"]["message"]


async def test_a_text_without_turns_is_refused_by_name(set_scene: SetScene) -> None:
    scene = await set_scene()
    url = f"http://{scene.gateway.host}:{scene.gateway.port}/v1/completions"
    body = {"model": "small", "prompt": "Hi"}
    async with scene.http.post(url, json=body, headers={"api-key": scene.grant.key}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "prompt"


@pytest.mark.parametrize("kind", CLIENTS)
async def test_recorded_answers_are_given_again(set_scene: SetScene, kind: str) -> None:
    async def talk(scene: Scene, told: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        for content in (f"Took {told}.", "Go on."):
            messages.append((await scene.said(messages))["choices"][0]["message"])
            messages.append({"role": "user", "content": content})
        return messages

    first = await set_scene(Said("One."), Said("Two."), kind=kind)
    said = await talk(first, "0.5 s")
    await first.gateway.close_session("s1")
    tree = parse_capture(first.grant.capture.read_bytes())
    playback = Playback(tree, Origin(session_id="parent", samples_on=False), "branch")
    again = await set_scene(kind=kind, playback=playback)  # whose engine knows no answer
    assert [message["content"] for message in await talk(again, "0.7 s")][1::2] == ["One.", "Two."]
    assert playback.report.is_faithful
    assert playback.report.varied_messages == 1
    given = await again.captured()
    assert [it.id for it in given] == [it.id for it in tree.completions]
    assert [it.prompt_ids.tolist() for it in given] == [it.prompt_ids.tolist() for it in tree.completions]
    assert said[2]["content"] == "Took 0.5 s."


async def test_a_branch_is_sampled_after_the_recorded_words(set_scene: SetScene) -> None:
    async def talk(scene: Scene, told: str) -> None:
        messages = [user("Hi")]
        for content in (f"Took {told}.", "Go on."):
            messages += [(await scene.said(messages))["choices"][0]["message"], user(content)]
        await scene.said(messages)

    first = await set_scene(Said("One."), Said("Two."), Said("Three."))
    await talk(first, "0.5 s")
    await first.gateway.close_session("s1")
    tree = parse_capture(first.grant.capture.read_bytes())
    playback = Playback(tree, Origin(session_id="parent", calls=2), "branch")
    branch = await set_scene(Said("Other."), playback=playback)
    await talk(branch, "0.7 s")
    assert playback.report.is_faithful
    given = await branch.captured()
    assert given[2].response.content == "Other."
    assert given[2].prompt_ids.tolist() == tree.completions[2].prompt_ids.tolist()
    assert given[2].parent == tree.completions[1].id


async def test_requests_that_differ_in_a_name_get_their_own_answers_in_any_order(
    set_scene: SetScene,
) -> None:
    asked = [[user(f"Work in /tmp/tmp{name * 8}.")] for name in "ab"]
    first = await set_scene(Said("One."), Said("Two."))
    for messages in asked:
        await first.said(messages)
    await first.gateway.close_session("s1")
    tree = parse_capture(first.grant.capture.read_bytes())
    playback = Playback(tree, Origin(session_id="parent", samples_on=False), "branch")
    again = await set_scene(playback=playback)
    said = [await again.said(messages) for messages in reversed(asked)]
    assert [answer["choices"][0]["message"]["content"] for answer in said] == ["Two.", "One."]
    assert playback.report.varied_messages == 0
