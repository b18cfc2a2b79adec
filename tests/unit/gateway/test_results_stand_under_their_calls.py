"""Results of parallel calls may be sent as they come in; the model reads them in the order of its calls.

Few templates show a result's id: out of order, each would be read as the answer to another call.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer

from polar.gateway.canonical import in_call_order
from polar.models.chat import Message, Role, ToolCall
from tests.unit.gateway.conftest import Scene, SetScene

NAMES = ("first", "second", "third")
CALLS = "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>" for name in NAMES
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


class Client(ABC):
    """Asks, and answers the calls with the results the other way round."""

    path: ClassVar[str]

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://{self._scene.gateway.host}:{self._scene.gateway.port}{self.path}"
        headers = {"Authorization": f"Bearer {self._scene.grant.key}"}
        async with self._scene.http.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    @abstractmethod
    async def play(self) -> None: ...


class Chat(Client):
    path = "/v1/chat/completions"

    async def play(self) -> None:
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
        body: dict[str, Any] = self._scene.body(tools=tools)
        said = (await self._post(body))["choices"][0]["message"]
        body["messages"] += [said] + [
            {"role": "tool", "tool_call_id": call["id"], "content": f"of {call['function']['name']}"}
            for call in reversed(said["tool_calls"])
        ]
        await self._post(body)


class Responses(Client):
    path = "/v1/responses"

    async def play(self) -> None:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
        body = {"model": "scripted", "tools": tools, "input": [{"role": "user", "content": "Hi"}]}
        said = await self._post(body)
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"of {call['name']}"}
            for call in reversed(said["output"])
        ]
        await self._post(body | self.continued(body, said, results))

    def continued(self, body: dict[str, Any], said: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        return {"input": [*body["input"], *said["output"], *results]}


class ResponsesById(Responses):
    def continued(self, body: dict[str, Any], said: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        return {"input": results, "previous_response_id": said["id"]}


class Messages(Client):
    path = "/v1/messages"

    async def play(self) -> None:
        tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
        body: dict[str, Any] = self._scene.body(tools=tools, max_tokens=200)
        said = (await self._post(body))["content"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"of {call['name']}"}
            for call in reversed(said)
        ]
        body["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
        await self._post(body)


class Generate(Client):
    path = "/v1beta/models/scripted:generateContent"

    async def play(self) -> None:
        contents: list[Any] = [{"role": "user", "parts": [{"text": "Hi"}]}]
        tools = [{"functionDeclarations": [{"name": name} for name in NAMES]}]
        said = (await self._post({"contents": contents, "tools": tools}))["candidates"][0]["content"]
        results = [
            {"functionResponse": {"name": name, "response": {"output": f"of {name}"}}}  # as most: without id
            for name in reversed(NAMES)
        ]
        contents += [said, {"role": "user", "parts": results}]
        await self._post({"contents": contents, "tools": tools})


@pytest.mark.parametrize("client", [Chat, Responses, ResponsesById, Messages, Generate])
async def test_every_dialect_shows_results_in_the_order_of_the_calls(
    set_scene: SetScene, tokenizer: Tokenizer, client: type[Client]
) -> None:
    scene = await set_scene([CALLS, "Done."])
    await client(scene).play()
    first, second = await scene.captured()
    assert second.parent == first.id
    seen = len(first.prompt_ids) + len(first.sampled_ids)
    shown = tokenizer.decode(second.prompt_ids[seen:].tolist())
    assert [line for line in shown.splitlines() if line.startswith("of ")] == [f"of {name}" for name in NAMES]
    assert [message.tool_call_id for message in second.messages[2:]] == [
        call.id for call in first.response.tool_calls
    ]


def said(*ids: str) -> Message:
    return Message(Role.ASSISTANT, tool_calls=tuple(ToolCall(id, "f", "{}") for id in ids))


def results(*ids: str | None) -> tuple[Message, ...]:
    return tuple(Message(Role.TOOL, f"of {id}", tool_call_id=id) for id in ids)


USER = Message(Role.USER, "Hi")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ((said("a", "b", "c"), *results("stray", "c", "a", "b")),
         (said("a", "b", "c"), *results("a", "b", "c", "stray"))),
        ((said("a"), said("b"), *results("b", "a")), (said("a"), said("b"), *results("a", "b"))),
        ((said("a", "b"), *results("b"), USER, *results("a")),
         (said("a", "b"), *results("b"), USER, *results("a"))),
        ((said("a", "b"), *results("b", "a"), said("c", "d"), *results("d", "c"), USER),
         (said("a", "b"), *results("a", "b"), said("c", "d"), *results("c", "d"), USER)),
        ((said("a", "b", "a"), *results("a", None, "b", "a")),
         (said("a", "b", "a"), *results("a", None, "b", "a"))),
        (results("b", "a"), results("b", "a")),
        ((), ()),
    ],
)  # fmt: skip
def test_only_results_that_stand_together_change_places(
    sent: tuple[Message, ...], read: tuple[Message, ...]
) -> None:
    assert in_call_order(sent) == read
