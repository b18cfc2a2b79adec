"""Tools for models whose template knows none: calls and results as text, tools described and demonstrated.

Calls are `<tool_call>` blocks in the assistant's turn, results are `<tool_response>` blocks in a user turn: a
role of its own for results would be a header that the model never saw in training.

The section and the demonstration of our own were written for SmolLM2 with 135M parameters, and chosen by
what they make likely: under a coding agent's system prompt, on two or three short asks each, the
log-probability of a right call to a shell tool was between -15 and -11 for every wording of the section
alone, and -2.4 with two shown turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.tool_calls import assistant_text, write_call

_EXAMPLE_VALUES = {
    "command": "ls -la",
    "cmd": "ls -la",
    "path": "notes.txt",
    "file": "notes.txt",
    "file_path": "notes.txt",
    "filename": "notes.txt",
    "content": "hello",
    "text": "hello",
    "query": "hello",
    "pattern": "hello",
    "url": "http://example.com",
}
_EXAMPLE_OF_TYPE: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class ToolsInText:
    """Rewrites conversations for a template that shows neither tools nor calls."""

    describes: bool
    """Whether to describe tools in a prompt of ours."""
    default_system: str = ""
    """The template's default system message."""

    def rewritten(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[Message]:
        if not tools or not self.describes:
            return [*_without_tools(messages)]
        has_system = bool(messages) and messages[0].role is Role.SYSTEM
        system = messages[0].content if has_system else self.default_system
        section = _section(tools)
        said = Message(Role.SYSTEM, f"{system}\n\n{section}" if system else section)
        return [said, *_without_tools((*_demonstration(tools), *messages[has_system:]))]


def _without_tools(messages: Iterable[Message]) -> Iterator[Message]:
    """Replace calls by text, and join adjacent results to one user message."""
    for is_result, group in groupby(messages, key=lambda message: message.role is Role.TOOL):
        if is_result:
            results = (f"<tool_response>\n{message.content}\n</tool_response>" for message in group)
            yield Message(Role.USER, "\n".join(results))
        else:
            for message in group:
                is_shown = not message.tool_calls
                yield (
                    message if is_shown else replace(message, content=assistant_text(message), tool_calls=())
                )


def _section(tools: Sequence[ToolDefinition]) -> str:
    """The section after the system message if tools are offered."""
    tool = _shown_tool(tools)
    lines = [
        "You can use these tools:",
        *(_signature(tool) for tool in tools),
        "To use a tool, write only this:",
        write_call(tool.name, _example_arguments(tool)),
    ]
    return "\n".join(lines)


def _demonstration(tools: Sequence[ToolDefinition]) -> tuple[Message, ...]:
    """Turns between the system prompt and the conversation, in which the assistant calls tools.

    No results and no final answers: after those a small model answers in prose instead of calling.
    """
    tool = _shown_tool(tools)
    if _takes_command(tool):
        return (
            Message(Role.USER, "Show the files."),
            _calling(tool, _example_arguments(tool, command="ls -la")),
            Message(Role.USER, "Run this command: echo hi > a.txt"),
            _calling(tool, _example_arguments(tool, command="echo hi > a.txt")),
        )
    return (
        Message(Role.USER, f"Use {tool.name}."),
        _calling(tool, _example_arguments(tool)),
    )


def _shown_tool(tools: Sequence[ToolDefinition]) -> ToolDefinition:
    """Choose the tool to demonstrate: a shell command is the easiest to imitate."""
    return next((tool for tool in tools if _takes_command(tool)), tools[0])


def _takes_command(tool: ToolDefinition) -> bool:
    schema = _properties(tool.parameters).get("command")
    return isinstance(schema, dict) and schema.get("type") == "string"


def _calling(tool: ToolDefinition, arguments: str) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", tool.name, arguments),))


def _example_arguments(tool: ToolDefinition, **known: str) -> str:
    properties = _properties(tool.parameters)
    required = [name for name in _required(tool.parameters) if name in properties]
    values = {name: known.get(name, _example_value(name, properties[name])) for name in required}
    return json.dumps(values | known, ensure_ascii=False)


def _example_value(name: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and kind in _EXAMPLE_OF_TYPE:
        return _EXAMPLE_OF_TYPE[kind]
    return _EXAMPLE_VALUES.get(name, "text")


def _signature(tool: ToolDefinition) -> str:
    properties, required = _properties(tool.parameters), set(_required(tool.parameters))
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type(schema)}" for name, schema in properties.items()
    )
    description = _first_sentence(" ".join(tool.description.split()))
    return f"- {tool.name}({arguments})" + (f": {description}" if description else "")


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def _type(schema: Any) -> str:
    """Describe a JSON schema by its shortest type."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("enum"), list):
        return "|".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    for alternatives in ("anyOf", "oneOf"):
        if isinstance(schema.get(alternatives), list):
            return "|".join(dict.fromkeys(_type(option) for option in schema[alternatives]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return "|".join(map(str, kind))
    if kind == "array":
        return f"{_type(schema.get('items'))}[]"
    if kind == "object" and _properties(schema):
        inner = ", ".join(f"{name}: {_type(value)}" for name, value in _properties(schema).items())
        return "{" + inner + "}"
    return kind if isinstance(kind, str) else "any"


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
