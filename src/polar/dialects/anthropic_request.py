"""Reads requests of Anthropic's Messages API: blocks of many kinds become plain chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import orjson

from polar.dialects.base import HttpRequest, RouteAction
from polar.dialects.json_fields import Fields, document, kind, malformed, memoized
from polar.dialects.schemas import needed_schema, resolve_tool_choice, tool_definition
from polar.models.chat import (
    ChatRequest,
    JsonOutput,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolUse,
)

UNPARSED = "_unparsed_arguments"
"""The only key of a tool_use input that carries sampled arguments which are not a JSON object."""

Deferred = Mapping[str, str]
"""Definitions, as JSON, of tools that the model sees only once a tool_reference names them."""

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_BILLING = "x-anthropic-billing-header:"
"""Starts a system block meant for the provider's billing; it changes from call to call."""
_TOOL_CHOICES = {
    "auto": ToolUse.AUTO,
    "any": ToolUse.REQUIRED,
    "tool": ToolUse.REQUIRED,
    "none": ToolUse.NONE,
}
_SAYS_ERROR = ("error", "<tool_use_error>")


def read_request(request: HttpRequest) -> ChatRequest:
    """Read a request; one that counts tokens needs no `max_tokens`."""
    is_count = request.route.action is RouteAction.COUNT_TOKENS
    fields = document(request.body, Fields)
    model = request.model or fields.needed_string("model")
    wire_messages = list(fields.children("messages"))
    if not wire_messages:
        raise malformed("messages", "is required and must hold at least one message")
    if not is_count and fields.get("max_tokens") is None:
        raise malformed("max_tokens", "is required and must be an integer")
    tools, deferred = _tools(fields)
    spoken = [message for wire in wire_messages for message in _messages(wire, deferred)]
    messages = tuple(_turns([*_system(fields), *spoken]))
    return ChatRequest(
        model=model,
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(fields, tools),
        output=_output(fields),
        sampling=_sampling(fields),
        omitted=fields.omitted,
        is_begun=_is_prefilled(messages[-1], is_count=is_count),
        stream=fields.boolean("stream") if request.route.is_stream is None else request.route.is_stream,
        stream_usage=True,
    )


def _is_prefilled(last: Message, *, is_count: bool) -> bool:
    """Whether the request ends with the beginning of the answer; a token count may end with any turn."""
    is_text = not last.tool_calls and not last.reasoning
    return last.role is Role.ASSISTANT and (is_text or not is_count)


def _turns(messages: Iterable[Message]) -> Iterator[Message]:
    """Merge neighbouring messages of one role: the provider treats them as one turn."""
    for role, group in groupby(messages, key=lambda message: message.role):
        if role is Role.TOOL:
            yield from group
        else:
            yield _join_turn(list(group))


def _join_turn(parts: list[Message]) -> Message:
    # An assistant's text was sampled in one piece; blocks that others wrote are separate lines.
    joint = "" if parts[0].role is Role.ASSISTANT else "\n"
    return replace(
        parts[0],
        content=joint.join(part.content for part in parts),
        reasoning="".join(part.reasoning or "" for part in parts) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _system(fields: Fields) -> Iterator[Message]:
    for text in _texts(fields, "system"):
        if not text.startswith(_BILLING):
            yield Message(Role.SYSTEM, text)


def _messages(wire: Fields, deferred: Deferred) -> Iterator[Message]:
    role = wire.one_of("role", _ROLES)
    if role is Role.ASSISTANT:
        yield _assistant(wire)
        return
    blocks = _blocks(wire, "content")
    if blocks is None:
        raise malformed(wire.at("content"), "is required and must be a string or an array of blocks")
    if not blocks:
        yield Message(role)
    for block in blocks:
        if block.get("type") == "tool_result":
            yield _tool_result(block, deferred)
        else:
            yield Message(role, _text(block))


def _assistant(wire: Fields) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in _blocks(wire, "content") or ():
        match block.needed_string("type"):
            case "text":
                texts.append(block.needed_string("text"))
            case "thinking":
                thoughts.append(block.string("thinking") or "")
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                # redacted_thinking has no text, and calls to a provider's own tools are not rendered.
                pass
    return Message(Role.ASSISTANT, "".join(texts), "".join(thoughts) or None, tuple(calls))


def _tool_call(block: Fields) -> ToolCall:
    name = block.name()
    return ToolCall(block.needed_string("id"), name, arguments_of(block, "input"))


def arguments_of(call: Fields, name: str) -> str:
    """Return the arguments in a field, as the model sampled them."""
    value: dict[str, Any] = {} if call.child(name) is None else call.get(name)
    unparsed = value.get(UNPARSED)
    return unparsed if len(value) == 1 and isinstance(unparsed, str) else _json(value)


def _tool_result(block: Fields, deferred: Deferred) -> Message:
    parts = _blocks(block, "content") or []
    found = [part.needed_string("tool_name") for part in parts if part.get("type") == "tool_reference"]
    texts = [_text(part) for part in parts if part.get("type") != "tool_reference"]
    text = "\n".join([*texts, *_functions(found, deferred)])
    if block.boolean("is_error") and not text.lstrip().lower().startswith(_SAYS_ERROR):
        text = f"Error: {text}"
    return Message(Role.TOOL, text, tool_call_id=block.needed_string("tool_use_id"))


def _functions(names: list[str], deferred: Deferred) -> list[str]:
    """Render the definitions that a tool search found, as Claude Code announces them to the model."""
    if not names:
        return []
    lines = [f"<function>{deferred.get(name) or _json({'name': name})}</function>" for name in names]
    return ["<functions>", *lines, "</functions>"]


def _texts(fields: Fields, name: str) -> list[str]:
    return [_text(block) for block in _blocks(fields, name) or ()]


def _blocks(fields: Fields, name: str) -> list[Fields] | None:
    """Return content as a list of blocks; a string counts as one text block."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields, name)]
    if not isinstance(value, list):
        raise malformed(fields.at(name), f"must be a string or an array of blocks, not {kind(value)}")
    return fields.children(name)


def _text(block: Fields) -> str:
    match block.needed_string("type"):
        case "text":
            return block.needed_string("text")
        case "document":
            return _document(block)
        case "search_result":
            title = block.string("title") or ""
            return "\n".join([title, *_texts(block, "content")])
        case "tool_use" | "tool_result" as misplaced:
            raise malformed(block.at("type"), f"{misplaced!r} is not allowed here")
        case other:
            return block.placeholder(other)


def _document(block: Fields) -> str:
    source = block.needed_child("source")
    title = block.string("title")
    match source.get("type"):
        case "text":
            text = source.needed_string("data")
        case "content":
            text = "\n".join(_texts(source, "content"))
        case _:
            text = block.placeholder("document")
    return f"{title}\n{text}" if title else text


@memoized(Fields, "tools")
def _tools(fields: Fields) -> tuple[tuple[ToolDefinition, ...], Deferred]:
    """Return the tools in the prompt's head, and those that appear when the conversation refers to them."""
    tools: list[ToolDefinition] = []
    deferred: dict[str, str] = {}
    for tool in fields.children("tools"):
        if _runs_at_the_provider(tool):
            continue
        tool.needed_child("input_schema")
        defined = tool_definition(tool, "input_schema")
        if tool.boolean("defer_loading"):
            shown = {
                "description": defined.description,
                "name": defined.name,
                "parameters": defined.parameters,
            }
            deferred[defined.name] = _json(shown)
        else:
            tools.append(defined)
    return tuple(tools), deferred


def _runs_at_the_provider(tool: Fields) -> bool:
    return tool.string("type") not in (None, "custom")


def _tool_choice(fields: Fields, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    choice = fields.child("tool_choice")
    if choice is None:
        return ToolChoice()
    use = choice.one_of("type", _TOOL_CHOICES)
    names_one = choice.get("type") == "tool"
    return resolve_tool_choice(
        use,
        [choice.needed_string("name")] if names_one else (),
        tools,
        choice.at("name" if names_one else "type"),
        parallel=not choice.boolean("disable_parallel_tool_use"),
        elsewhere=[
            tool.string("name") or "" for tool in fields.children("tools") if _runs_at_the_provider(tool)
        ],
    )


def _output(fields: Fields) -> JsonOutput | None:
    """Read `output_config.format`, or `output_format`, its earlier name."""
    config = fields.child("output_config")
    wanted = config.child("format") if config is not None else None
    wanted = wanted or fields.child("output_format")
    if wanted is None:
        return None
    type_ = wanted.needed_string("type")
    if type_ != "json_schema":
        raise malformed(wanted.at("type"), f"must be json_schema, not {type_!r}")
    return JsonOutput(needed_schema(wanted, "schema"))


def _sampling(fields: Fields) -> Sampling:
    return Sampling(
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", -1),
        max_tokens=fields.integer("max_tokens", 1),
        stop=tuple(filter(None, fields.strings("stop_sequences"))),
    )


def _json(value: dict[str, Any]) -> str:
    return orjson.dumps(value).decode()
