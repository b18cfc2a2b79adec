"""Faults that systems of this kind have had with conversations; each trains tokens in a wrong context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from polar.config.settings import GatewaySettings
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from tests.captures import read_capture
from tests.fakes.scripted_engine import ScriptedEngine
from tests.tokenizers_of_families import QWEN3

SetScene = Callable[..., Awaitable[Any]]
TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


async def asked(scene: Any, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    async with scene.post({"model": "scripted", "messages": messages} | fields) as response:
        assert response.status == 200, await response.text()
        message: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assert_extends(second: Completion, first: Completion) -> None:
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert (second.parent, second.follows) == (first.id, first.id)
    assert second.prompt_ids.tolist()[: len(before)] == before


async def test_a_retry_with_an_identical_prompt_ends_nothing(set_scene: SetScene) -> None:
    scene = await set_scene(["One.", "One.", "Two.", "Three."])
    for _ in range(2):
        await asked(scene, user("a"))
    history = [user("a"), {"role": "assistant", "content": "One."}, user("b")]
    await asked(scene, *history)
    await asked(scene, *history, {"role": "assistant", "content": "Two."}, user("c"))
    first, again, second, third = await scene.captured()
    assert first.prompt_ids.tolist() == again.prompt_ids.tolist()
    assert_extends(second, again)
    assert_extends(third, second)


async def test_text_and_call_replayed_as_two_messages_stay_one_sampled_turn(set_scene: SetScene) -> None:
    scene = await set_scene([f"I look.\n{CALL}", "Done."])
    said = await asked(scene, user("a"), tools=[TOOL])
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "x"}
    split = [
        {"role": "assistant", "content": said["content"]},
        {"role": "assistant", "content": None, "tool_calls": said["tool_calls"]},
    ]
    await asked(scene, user("a"), *split, result, tools=[TOOL])
    first, second = await scene.captured()
    assert_extends(second, first)
    assert [message.role.value for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[1] == first.response


async def test_what_a_stop_string_cut_off_stays_in_the_context_and_is_closed_once(
    set_scene: SetScene, tokenizer: Tokenizer
) -> None:
    scene = await set_scene(["Count: 1 2 STOP 3", "Ok."])
    said = await asked(scene, user("a"), stop=["STOP"])
    assert said["content"] == "Count: 1 2 "
    await asked(scene, user("a"), {"role": "assistant", "content": "Count: 1 2"}, user("b"))
    first, second = await scene.captured()
    assert_extends(second, first)
    before = len(first.prompt_ids) + len(first.sampled_ids)
    added = tokenizer.decode(second.prompt_ids[before:].tolist(), skip_special_tokens=False)
    assert added == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


async def test_counting_tokens_is_no_turn_and_counts_the_conversation_itself(set_scene: SetScene) -> None:
    scene = await set_scene(["One.", "Two."])
    url = f"http://{scene.gateway.host}:{scene.gateway.port}/v1/messages"
    headers = {"x-api-key": scene.grant.key, "x-stainless-retry-count": "0"}
    body: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": [user("a")]}
    async with scene.http.post(url, json=body, headers=headers) as response:
        said = (await response.json())["content"]
    body["messages"] += [{"role": "assistant", "content": said}, user("b")]
    async with scene.http.post(f"{url}/count_tokens", json=body, headers=headers) as response:
        counted = (await response.json())["input_tokens"]
    async with scene.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
    first, second = await scene.captured()
    assert_extends(second, first)
    assert counted == len(second.prompt_ids)


async def test_a_clients_own_headers_are_hints_and_never_identity(
    set_scene: SetScene, tmp_path: Path
) -> None:
    scene = await set_scene(["One.", "Two."])
    other = SessionGrant("s2", new_key(), tmp_path / "other.capture", SamplingPin(), Budgets())
    scene.gateway.open_session(other)
    url = f"http://{scene.gateway.host}:{scene.gateway.port}/v1/messages"
    body = {"model": "scripted", "max_tokens": 9, "messages": [user("a")]}
    for key, agent in ((scene.grant.key, "explorer"), (other.key, "explorer\u200b")):
        headers = {
            "x-api-key": key,
            "X-Claude-Code-Session-Id": "s2",
            "x-session-id": "s1",
            "X-Claude-Code-Agent-Id": agent,
            "X-Claude-Code-Parent-Agent-Id": "m" * 500,
        }
        async with scene.http.post(url, json=body, headers=headers) as response:
            assert response.status == 200
    (ours,) = await scene.captured()
    await scene.gateway.close_session("s2")
    (theirs,) = read_capture(other.capture)
    assert ours.response.content == "One."
    assert theirs.response.content == "Two."
    assert ours.extra["agent_id"] == "explorer"
    assert ours.extra["parent_agent_id"] == "m" * 200
    assert "agent_id" not in theirs.extra


@pytest.fixture
async def thinking_scene(tmp_path: Path) -> Any:
    """A gateway over the real Qwen3 family: its template shows thoughts of the last cycle of tools only."""
    directory = QWEN3.directory()
    think = "<think>\nWhich files?\n</think>\n\n"
    script = [f"{think}I look.\n{CALL}", f"{think}One file.", f"{think}Bye."]
    engine = ScriptedEngine(Tokenizer.from_file(str(directory / "tokenizer.json")), script)
    async with Gateway(
        GatewaySettings(), engine, renderer_for(QWEN3.name, directory), engine.info
    ) as gateway:
        grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
        gateway.open_session(grant)
        async with aiohttp.ClientSession() as http:
            yield gateway, grant, http


async def test_thoughts_absent_from_replayed_history_break_no_turn_and_a_new_question_forks(
    thinking_scene: Any,
) -> None:
    gateway, grant, http = thinking_scene
    url = f"http://{gateway.host}:{gateway.port}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {grant.key}", "x-stainless-retry-count": "0"}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, user("a")]
    for heard in ([{"role": "tool", "content": "x"}], [user("b")], []):
        body = {"model": "scripted", "messages": messages, "tools": [TOOL]}
        async with http.post(url, json=body, headers=headers) as response:
            said = (await response.json())["choices"][0]["message"]
        messages.append({"role": "assistant", "content": said["content"]})
        if said.get("tool_calls"):
            messages[-1]["tool_calls"] = said["tool_calls"]
            heard[0]["tool_call_id"] = said["tool_calls"][0]["id"]
        messages += heard
    await gateway.close_session("s1")
    first, second, third = read_capture(grant.capture)
    assert [turn.response.reasoning for turn in (first, second, third)] == ["Which files?"] * 3
    assert_extends(second, first)
    assert (third.parent, third.follows) == (None, second.id)
