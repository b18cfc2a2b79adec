"""Tool choice, output format and biases reach the engine, bind the answer and stand in the recording."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.engines.base import Unconstrainable
from polar.models.task import PrescribedCall, SamplingPin
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import SetScene

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
JSON = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


async def test_a_schema_reaches_the_engine_and_is_recorded(set_scene: SetScene) -> None:
    scene = await set_scene(['{"a": "b"}', "hi"])
    async with scene.post(scene.body(response_format=JSON)) as response:
        assert response.status == 200
    async with scene.post(scene.body()) as response:
        assert response.status == 200
    constrained, free = scene.engine.requests
    assert constrained.constraint is not None
    assert json.loads(constrained.constraint.json_schema or "") == SCHEMA | {"additionalProperties": False}
    assert free.constraint is None
    first, second = await scene.captured()
    assert first.extra["constraint"] == "json_schema"
    assert "constraint" not in second.extra


async def test_a_forced_call_reaches_the_engine_with_the_same_prompt(set_scene: SetScene) -> None:
    scene = await set_scene([CALL, CALL, "no"])
    forced = {"type": "function", "function": {"name": "f"}}
    for choice in (forced, "auto", "none"):
        async with scene.post(scene.body(tools=TOOLS, tool_choice=choice)) as response:
            assert response.status == 200
    named, auto, none = scene.engine.requests
    assert named.constraint is not None
    assert auto.constraint is None
    assert none.constraint is not None
    assert [list(request.prompt_ids) for request in (named, none)] == [list(auto.prompt_ids)] * 2
    (tag,) = json.loads(named.constraint.structural_tag or "")["format"]["tags"]
    assert tag["begin"] == '<tool_call>\n{"name": "f", "arguments": '
    assert [completion.extra.get("constraint") for completion in await scene.captured()] == [
        "structural_tag",
        None,
        "structural_tag",
    ]


NAMED = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}


async def test_a_task_prescribes_a_conversation_s_first_calls(set_scene: SetScene) -> None:
    pin = SamplingPin(calls=(PrescribedCall(tool="f", arguments=NAMED),))
    scene = await set_scene([CALL, CALL, "hi", "hi", '{"a": "b"}'], sampling=pin)

    async def ask(**fields: Any) -> dict[str, Any]:
        async with scene.post(scene.body(**fields)) as response:
            assert response.status == 200
            message: dict[str, Any] = (await response.json())["choices"][0]["message"]
            return message

    first = await ask(tools=TOOLS)
    await ask(tools=TOOLS)
    (call,) = first["tool_calls"]
    history = [*scene.body()["messages"], first]  # type: ignore[misc]
    await ask(tools=TOOLS, messages=[*history, {"role": "tool", "tool_call_id": call["id"], "content": "y"}])
    await ask(tools=TOOLS[1:])
    await ask(tools=TOOLS, tool_choice="none")
    held, again, later, without_it, own = scene.engine.requests
    for request in (held, again):
        assert request.constraint is not None
        (tag,) = json.loads(request.constraint.structural_tag or "")["format"]["tags"]
        assert tag["begin"] == '<tool_call>\n{"name": "f", "arguments": '
        assert tag["content"]["json_schema"] == NAMED | {"additionalProperties": False}
    assert later.constraint is None
    assert without_it.constraint is None
    assert own.constraint is not None
    assert "excludes" in (own.constraint.structural_tag or ""), "the harness's own wish comes first"
    assert list(own.prompt_ids) == list(held.prompt_ids), "the tools in the prompt are the harness's"
    recorded = await scene.captured()
    assert [bool(one.extra.get("constraint")) for one in recorded] == [True, True, False, False, True]
    assert recorded[0].tools[0].parameters == SCHEMA


async def test_a_call_that_may_not_be_made_reaches_the_client_as_text(set_scene: SetScene) -> None:
    scene = await set_scene([CALL])
    async with scene.post(scene.body(tools=TOOLS, tool_choice="none")) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_one_call_at_a_time_ends_the_turn_in_the_engine(set_scene: SetScene) -> None:
    scene = await set_scene([f"{CALL}\n{CALL}"])
    async with scene.post(scene.body(tools=TOOLS, parallel_tool_calls=False)) as response:
        (choice,) = (await response.json())["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    (request,) = scene.engine.requests
    assert request.constraint is None, "the policy's own distribution is left as it is"
    assert request.sampling.stop == ("\n</tool_call>",)


async def test_biases_reach_the_engine_and_are_recorded(set_scene: SetScene) -> None:
    scene = await set_scene(["hi"])
    async with scene.post(scene.body(logit_bias={"5": -100})) as response:
        assert response.status == 200
    assert scene.engine.requests[0].sampling.logit_bias == ((5, -100.0),)
    (completion,) = await scene.captured()
    assert completion.used.logit_bias == ((5, -100.0),)


async def test_penalties_reach_the_engine_and_are_recorded(set_scene: SetScene) -> None:
    scene = await set_scene(["hi"])
    async with scene.post(scene.body(presence_penalty=0.5, frequency_penalty=-1)) as response:
        assert response.status == 200
    (request,) = scene.engine.requests
    assert (request.sampling.presence_penalty, request.sampling.frequency_penalty) == (0.5, -1.0)
    (completion,) = await scene.captured()
    assert completion.used.is_reshaped


async def test_what_the_engine_cannot_do_is_the_client_s_to_know(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("", failure=Unconstrainable("the schema is too deep"))])
    async with scene.post(scene.body(response_format=JSON)) as response:
        assert response.status == 400
        assert "too deep" in (await response.json())["error"]["message"]


async def test_an_unknown_response_is_not_found_in_openai_s_words(set_scene: SetScene) -> None:
    scene = await set_scene(["hi"])
    body: dict[str, Any] = {"model": "scripted", "input": "hi", "previous_response_id": "resp_0123"}
    url = scene.url.replace("chat/completions", "responses")
    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    async with scene.http.post(url, json=body, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_is_none_is_a_400_also_for_a_stream(set_scene: SetScene, stream: bool) -> None:
    scene = await set_scene(["hi"])
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}}
    async with scene.post(scene.body(response_format=wrong, stream=stream)) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "response_format.json_schema.schema.type"
    assert await scene.captured() == []
