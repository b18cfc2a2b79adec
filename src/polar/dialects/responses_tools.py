"""Tools of OpenAI's Responses API: what the model is offered, and how calls are translated both ways."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from polar.dialects.json_fields import Fields, malformed
from polar.dialects.schemas import tool_definition
from polar.models.chat import ToolCall, ToolDefinition

LOCAL_SHELL = "local_shell"
"""The model's name for the shell tool, which has none on the wire."""

_AS_SAMPLED = "_raw"
"""Ends the call id of a custom call whose input is the sampled arguments themselves.

The model is asked to write a custom tool's input as `{"input": text}`. If it writes anything else, the
client gets that verbatim, and the echoed id shows that nothing was unwrapped.
"""
_FREEFORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_SHELL = ToolDefinition(
    name=LOCAL_SHELL,
    description="Runs a command and returns its output.",
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Program and arguments.",
            },
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
)
_SERVED = frozenset({"function", "custom", LOCAL_SHELL, "namespace"})
_SHELL_FIELDS = ("command", "env", "timeout_ms", "user", "working_directory")


class ToolKind(Enum):
    FUNCTION = auto()
    CUSTOM = auto()
    """Takes free text instead of JSON arguments."""
    LOCAL_SHELL = auto()


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool, with the name the model uses and the one the client uses."""

    kind: ToolKind
    definition: ToolDefinition
    name: str
    namespace: str | None = None


class Toolbox:
    """The tools of one request, with namespaces flattened and without hosted tools."""

    def __init__(self, fields: Fields) -> None:
        declared = list(_offered_tools(fields))
        self.hosted = frozenset(_hosted_types(fields))
        """The types of the hosted tools that were left out."""
        uses = Counter(tool.name for _, tool in declared)
        self._tools: dict[str, Tool] = {}
        for at, tool in declared:
            if tool.namespace is not None and uses[tool.name] > 1:
                qualified = f"{tool.namespace.removesuffix('__')}__{tool.name}"
                tool = replace(tool, definition=replace(tool.definition, name=qualified))
            if tool.definition.name in self._tools:
                raise malformed(at, f"{tool.definition.name!r} is already the name of another tool")
            self._tools[tool.definition.name] = tool
        self._offered = {(tool.namespace, tool.name): name for name, tool in self._tools.items()}

    @property
    def definitions(self) -> tuple[ToolDefinition, ...]:
        return tuple(tool.definition for tool in self._tools.values())

    def item_of(self, call: ToolCall, id: str) -> dict[str, Any]:
        """Return a sampled call as the item that clients expect for its tool; `id` becomes part of its id."""
        tool = self._tools.get(call.name)
        kind = tool.kind if tool is not None else ToolKind.FUNCTION
        if kind is ToolKind.LOCAL_SHELL and (action := _action(call.arguments)) is not None:
            return _item("lsh", id, "local_shell_call", call.id) | {"action": action}
        name: dict[str, Any] = {"name": tool.name if tool is not None else call.name}
        if tool is not None and tool.namespace is not None:
            name["namespace"] = tool.namespace
        if kind is ToolKind.CUSTOM:
            text = _unwrap(call.arguments)
            call_id = call.id if text is not None else call.id + _AS_SAMPLED
            item = _item("ctc", id, "custom_tool_call", call_id)
            return item | name | {"input": call.arguments if text is None else text}
        return _item("fc", id, "function_call", call.id) | name | {"arguments": call.arguments}

    def call_of(self, item: Fields) -> ToolCall:
        """Return an echoed call as the model sampled it."""
        id = item.string("call_id") or item.string("id") or ""
        match item.string("type"):
            case "local_shell_call":
                action = item.needed_child("action")
                given = {name: action.get(name) for name in _SHELL_FIELDS}
                return ToolCall(id, LOCAL_SHELL, _json({key: value for key, value in given.items() if value}))
            case "custom_tool_call":
                text = item.needed_string("input")
                sampled = text if id.endswith(_AS_SAMPLED) else _json({"input": text})
                return ToolCall(call_id(id), self._name_of(item), sampled)
            case _:
                arguments = item.string("arguments")
                return ToolCall(id, self._name_of(item), "{}" if arguments is None else arguments)

    def name_of(self, choice: Fields) -> str:
        """Return the model's name for the tool of a choice; a hosted tool is chosen by its type."""
        match choice.needed_string("type"):
            case "function" | "custom":
                return self._name_of(choice)
            case hosted:
                return hosted

    def _name_of(self, item: Fields) -> str:
        name = item.needed_string("name")
        return self._offered.get((item.string("namespace"), name), name)


def call_id(echoed: str) -> str:
    """Return the gateway's id of a call from the one its client uses."""
    return echoed.removesuffix(_AS_SAMPLED)


def _offered_tools(fields: Fields) -> Iterator[tuple[str, Tool]]:
    """Yield every tool the model is offered, with the place of its name in the body."""
    yield from _read_tools(fields, None)
    if isinstance(fields.get("input"), list):
        for item in fields.children("input"):
            if item.get("type") == "additional_tools":
                yield from _read_tools(item, None)


def _hosted_types(fields: Fields) -> Iterator[str]:
    for tool in fields.children("tools"):
        type_ = tool.needed_string("type")
        if type_ not in _SERVED:
            yield type_


def _read_tools(fields: Fields, namespace: str | None) -> Iterator[tuple[str, Tool]]:
    for tool in fields.children("tools"):
        match tool.needed_string("type"):
            case "function":
                function = tool.child("function") or tool
                definition = tool_definition(function, "parameters")
                yield function.at("name"), Tool(ToolKind.FUNCTION, definition, definition.name, namespace)
            case "custom":
                yield tool.at("name"), _custom(tool, namespace)
            case "local_shell" if namespace is None:
                yield tool.at("type"), Tool(ToolKind.LOCAL_SHELL, _SHELL, LOCAL_SHELL)
            case "namespace" if namespace is None:
                yield from _read_tools(tool, tool.needed_string("name"))
            case _:
                pass


def _custom(tool: Fields, namespace: str | None) -> Tool:
    name = tool.name()
    description = tool.string("description") or ""
    format_ = tool.child("format")
    if format_ is not None and format_.string("type") == "grammar":
        syntax, grammar = format_.string("syntax") or "lark", format_.needed_string("definition")
        description = f"{description}\n\nThe input must follow this {syntax} grammar:\n{grammar}".lstrip()
    return Tool(ToolKind.CUSTOM, ToolDefinition(name, description, _FREEFORM), name, namespace)


def _item(prefix: str, id: str, type_: str, call_id: str) -> dict[str, Any]:
    return {"id": f"{prefix}_{id}", "type": type_, "status": "completed", "call_id": call_id}


def _unwrap(arguments: str) -> str | None:
    """Return the text of a custom call; None if wrapping it again would not give the same arguments."""
    value = _object(arguments)
    text = value.get("input")
    return text if len(value) == 1 and isinstance(text, str) and _is_text(text) else None


def _action(arguments: str) -> dict[str, Any] | None:
    """Return the action of a shell call; None if it could not be converted back to the same arguments."""
    value = _object(arguments)
    command, env, timeout = value.get("command"), value.get("env", {}), value.get("timeout_ms", 1)
    places = [value.get(name, "-") for name in ("user", "working_directory")]
    is_action = (
        isinstance(command, list)
        and isinstance(env, dict)
        and type(timeout) is int  # excludes booleans
        and timeout > 0
        and all(value.get(name, True) for name in _SHELL_FIELDS)
        and not value.keys() - set(_SHELL_FIELDS)
        and all(isinstance(text, str) and _is_text(text) for text in [*command, *env, *env.values(), *places])
    )
    return {"type": "exec", "env": {}} | value if is_action and command else None


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_text(text: str) -> bool:
    """Whether a text can be encoded; JSON's escapes allow halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
