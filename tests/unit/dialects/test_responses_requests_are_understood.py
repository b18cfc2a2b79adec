"""Requests are read as OpenAI's Responses reads them, and every complaint names the field at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.base import (
    CallIdentity,
    HttpRequest,
    Recall,
    Refusal,
    RequestRefused,
    recall_nothing,
)
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.responses_output import seal
from polar.models.chat import ChatRequest, Message, Role, Sampling, ToolCall, ToolDefinition

DIALECT = OpenAIResponses()
ROUTE = DIALECT.routes[0]
FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def parse(recall: Recall = recall_nothing, /, **fields: Any) -> ChatRequest:
    body = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    return DIALECT.parse(HttpRequest(ROUTE, body, recall=recall))


def messages(*items: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return parse(input=list(items), **fields).messages


def test_a_codex_like_request_is_understood() -> None:
    request = parse(
        instructions="Be good.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                ],
            },
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": seal("hm")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {"type": "function_call", "name": "f", "arguments": '{"a":  1}', "call_id": "c1"},
            {"type": "custom_tool_call", "name": "patch", "input": 'x"\n', "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "done"}],
            },
        ],
        tools=[
            {"type": "function", "name": "f", "description": "d", "strict": False, "parameters": {"x": 1}},
            {
                "type": "custom",
                "name": "patch",
                "description": "Patches.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
            },
            {"type": "web_search"},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=1,
        max_output_tokens=20,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        text={"verbosity": "low"},
        some_future_field={"x": 1},
    )
    assert request.messages == (
        Message(Role.SYSTEM, "Be good."),
        Message(Role.SYSTEM, "Rules"),
        Message(Role.USER, "ab[image omitted: this model reads only text]"),
        Message(
            Role.ASSISTANT,
            "I look",
            "hm",
            (ToolCall("c1", "f", '{"a":  1}'), ToolCall("c2", "patch", '{"input": "x\\"\\n"}')),
        ),
        Message(Role.TOOL, "ok", tool_call_id="c1"),
        Message(Role.TOOL, "done", tool_call_id="c2"),
    )
    assert request.tools == (
        ToolDefinition("f", "d", {"x": 1}),
        ToolDefinition("patch", "Patches.\n\nThe input must follow this lark grammar:\nstart: X", FREEFORM),
    )
    assert request.sampling == Sampling(temperature=0.5, top_p=1.0, max_tokens=20)
    assert request.stream


def test_plain_text_and_easy_messages_are_input() -> None:
    assert parse(input="hello").messages == (Message(Role.USER, "hello"),)
    assert messages({"role": "system", "content": "s"}, {"role": "user", "content": "u"}) == (
        Message(Role.SYSTEM, "s"),
        Message(Role.USER, "u"),
    )


def test_what_the_assistant_said_between_others_is_one_message() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    other = {"type": "web_search_call", "id": "ws", "status": "completed"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    user = {"role": "user", "content": "u"}
    assert messages(thought, said, call, other, said, user, said) == (
        Message(Role.ASSISTANT, "AA", "hm", (ToolCall("c", "f", "{}"),)),
        Message(Role.USER, "u"),
        Message(Role.ASSISTANT, "A"),
    )


def test_ids_keep_turns_apart_that_nobody_stands_between() -> None:
    def said(id: str, text: str) -> dict[str, Any]:
        return {"type": "message", "id": id, "role": "assistant", "content": text}

    apart = messages(said("msg_aa_0", "A"), said("msg_aa_1", "B"), said("msg_bb_0", "C"))
    assert [message.content for message in apart] == ["AB", "C"]
    assert [message.content for message in messages(said("msg_68ab", "A"), said("msg_68cd", "B"))] == ["AB"]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"encrypted_content": seal("ours"), "summary": [{"text": "short"}]}, "ours"),
        ({"encrypted_content": "gAAAAB", "summary": [{"text": "a"}, {"text": "b"}]}, "a\n\nb"),
        ({"encrypted_content": "polar.reasoning.1.%%%", "content": [{"text": "shown"}]}, "shown"),
        ({"encrypted_content": "polar.reasoning.1./w==", "content": [{"text": "shown"}]}, "shown"),
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "raw"}]}, "raw"),
    ],
)
def test_reasoning_is_restored_from_what_is_echoed(item: dict[str, Any], text: str) -> None:
    assert messages({"type": "reasoning"} | item, {"role": "user", "content": "u"})[0].reasoning == text


def test_local_shell_calls_keep_their_arguments() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5, "user": None}
    call = {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c",
        "status": "completed",
        "action": action,
    }
    output = {"type": "local_shell_call_output", "id": "c", "output": "a"}
    request = parse(input=[call, output], tools=[{"type": "local_shell"}])
    assert request.messages[0].tool_calls == (
        ToolCall("c", "local_shell", '{"command": ["ls"], "timeout_ms": 5}'),
    )
    assert request.messages[1] == Message(Role.TOOL, "a", tool_call_id="c")
    assert request.tools[0].parameters["properties"]["command"]["type"] == "array"


def test_namespaces_are_flattened_and_qualified_only_where_names_collide() -> None:
    def group(name: str, *functions: str) -> dict[str, Any]:
        tools = [{"type": "function", "name": function} for function in functions]
        return {"type": "namespace", "name": name, "description": "", "tools": tools}

    def echo(name: str, namespace: str | None) -> dict[str, Any]:
        return {
            "type": "function_call",
            "name": name,
            "namespace": namespace,
            "arguments": "{}",
            "call_id": "c",
        }

    tools = [group("crm", "find", "open"), group("mcp__git__", "find"), {"type": "function", "name": "run"}]
    request = parse(tools=tools, input=[echo("find", "mcp__git__"), echo("open", "crm"), echo("run", None)])
    assert [tool.name for tool in request.tools] == ["crm__find", "open", "mcp__git__find", "run"]
    assert [call.name for call in request.messages[0].tool_calls] == ["mcp__git__find", "open", "run"]
    items = [request.wire["options"].toolbox.item_of(call, "1") for call in request.messages[0].tool_calls]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        ("mcp__git__", "find"), ("crm", "open"), (None, "run"),
    ]  # fmt: skip


def test_tools_may_come_as_an_input_item() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]}
    request = parse(input=[item, {"role": "user", "content": "u"}])
    assert request.tools == (ToolDefinition("exec", "", FREEFORM),)
    assert request.messages == (Message(Role.USER, "u"),)


def test_instructions_of_a_continuation_stand_in_the_place_of_those_before() -> None:
    first = parse(instructions="Be good.")
    before = (*first.messages, Message(Role.ASSISTANT, "ok"))
    (encoder,) = DIALECT.stream(CallIdentity("abc123", "m", 5), first)
    created = json.loads(encoder.start().split(b"\n")[1].removeprefix(b"data: "))
    id = created["response"]["id"]
    for instructions in ("Be good.", "Be bad.", None):
        request = parse({"abc123": before}.get, instructions=instructions, previous_response_id=id)
        place = (Message(Role.SYSTEM, instructions),) if instructions else ()
        assert request.messages == (*place, *before[1:], Message(Role.USER, "hi"))
    said = {"abc123": before[1:]}
    request = parse(said.get, instructions="Be good.", previous_response_id="resp_abc123")
    assert request.messages == (*before, Message(Role.USER, "hi"))


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"id": "x"}]}, "input[0].id"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [CALL | {"name": None}]}, "input[0].name"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].action"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"instructions": 5}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
         "tools[0].format.definition"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": True}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"reasoning": "high"}, "reasoning"),
        ({"text": "json"}, "text"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"background": True}, "background"),
    ],
)  # fmt: skip
def test_a_complaint_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**fields)
    assert caught.value.refusal is Refusal.MALFORMED
    assert caught.value.field == field


def test_json_too_deep_to_be_written_again_is_refused() -> None:
    deep = json.loads("[" * 400 + "]" * 400)
    for fields in (
        {"metadata": deep},
        {"tools": [{"type": "function", "name": "f", "parameters": {"x": deep}}]},
        {"input": [{"type": "additional_tools",
                    "tools": [{"type": "function", "name": "f", "parameters": {"x": deep}}]}]},
    ):  # fmt: skip
        with pytest.raises(RequestRefused, match="nested too deeply"):
            parse(**fields)


@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_refusal_has_openais_shape(refusal: Refusal) -> None:
    answer = DIALECT.error(RequestRefused(refusal, "why", field="messages"))
    assert 400 <= answer.status < 600
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == "input"
