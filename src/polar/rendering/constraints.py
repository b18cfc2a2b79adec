"""Turns tool choice and output format into a grammar that engines enforce.

A constraint is built only on request: the logprobs of a constrained completion are of the masked
distribution, not the policy's own. A call that the model makes freely is therefore never constrained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polar.errors import InvalidInput
from polar.models.chat import ChatRequest, JsonOutput, ToolDefinition, ToolUse
from polar.rendering.base import TurnForm
from polar.rendering.tool_calls import CLOSE, OPEN

Format = dict[str, Any]
"""A part of an xgrammar structural tag."""

_SCHEMAS = ("items", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The grammar of the sampled text, for vLLM, SGLang and the embedded engine. Exactly one field is set."""

    json_schema: str | None = None
    """A JSON schema as JSON text; `{}` allows any JSON."""
    structural_tag: str | None = None
    """An xgrammar structural tag as JSON text: free text around tags whose insides are constrained."""

    @property
    def kind(self) -> str:
        return "json_schema" if self.json_schema is not None else "structural_tag"


def constraint_of(request: ChatRequest, form: TurnForm) -> Constraint | None:
    """The constraint that a request asks for; InvalidInput if this family's turns cannot be held to it."""
    choice, output = request.tool_choice, request.output
    callable_ = [tool for tool in request.tools if not choice.names or tool.name in choice.names]
    match choice.use:
        case ToolUse.REQUIRED:
            if choice.arguments is not None:
                callable_ = [replace(tool, parameters=dict(choice.arguments)) for tool in callable_]
                form = _thoughtless(form)
            return _tag_turn(_calls(callable_, form, parallel=choice.parallel), form)
        case ToolUse.NONE if output is None:
            # Where calls have no known opening, the parser turns them into text (see tool_calls.limited).
            is_needed = bool(request.tools) and form.writes_calls
            return _tag({"type": "any_text", "excludes": [OPEN]}) if is_needed else None
        case ToolUse.AUTO if output is None:
            is_narrowed = len(callable_) < len(request.tools)
            return _tag(_text_and_calls(callable_, form, parallel=choice.parallel)) if is_narrowed else None
        case ToolUse.AUTO if request.tools:
            calls = _calls(callable_, form, parallel=choice.parallel)
            return _tag_turn({"type": "or", "elements": [calls, _json(output)]}, form)
        case _:
            if form.thinking is None and form.is_plain:
                return Constraint(json_schema=_text(_schema(output)))
            return _tag_turn(_json(output), form)


def _tag_turn(body: Format, form: TurnForm) -> Constraint:
    """A whole turn: the family's optional thoughts, then the body."""
    if not form.is_plain:
        raise InvalidInput(
            "this model's family cannot be held to a format: its turns have marks of their own"
        )
    if form.thinking is None:
        return _tag(body)
    thoughts: Format = {
        "type": "tag",
        "begin": form.thinking.begin,
        "content": {"type": "any_text"},
        "end": form.thinking.end,
    }
    if form.thinking.begin:
        thoughts = {"type": "optional", "content": thoughts}
    return _tag({"type": "sequence", "elements": [thoughts, body]})


def _thoughtless(form: TurnForm) -> TurnForm:
    """The form of turns without thoughts, which a model that makes no calls by itself would hardly end."""
    if form.thinking is not None and not form.thinking.begin:
        raise InvalidInput("no call can be prescribed: this model's turns begin within its thoughts")
    return replace(form, thinking=None)


def _calls(tools: Sequence[ToolDefinition], form: TurnForm, *, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": _call_tags(tools, form),
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _text_and_calls(tools: Sequence[ToolDefinition], form: TurnForm, *, parallel: bool) -> Format:
    return {
        "type": "triggered_tags",
        "triggers": [OPEN],
        "tags": _call_tags(tools, form),
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def _call_tags(tools: Sequence[ToolDefinition], form: TurnForm) -> list[Format]:
    if not form.writes_calls:
        raise InvalidInput("this model's family cannot be held to a choice of tools: use tool_choice auto")
    return [
        {
            "type": "tag",
            "begin": f'{OPEN}\n{{"name": {_text(tool.name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": _arguments(tool)},
            "end": f"}}\n{CLOSE}",
        }
        for tool in tools
    ]


def _json(output: JsonOutput | None) -> Format:
    return {"type": "json_schema", "json_schema": _schema(output)}


def _schema(output: JsonOutput | None) -> dict[str, Any]:
    return closed(output.schema) if output is not None and output.schema is not None else {}


def _arguments(tool: ToolDefinition) -> dict[str, Any]:
    return {"type": "object"} | closed(tool.parameters)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Close a schema's objects to undeclared fields, unless it says otherwise.

    xgrammar reads every schema so, and a model that may keep adding fields rarely stops.
    """
    found: dict[str, Any] = dict(schema)
    if isinstance(found.get("properties"), dict) and not found.keys() & {"allOf", "$ref"}:
        found.setdefault("additionalProperties", False)
    for name in _NAMED_SCHEMAS:
        if isinstance(found.get(name), dict):
            found[name] = {key: _closed_inside(value) for key, value in found[name].items()}
    for name in _SCHEMAS:
        if name in found:
            found[name] = _closed_inside(found[name])
    return found


def _closed_inside(value: Any) -> Any:
    match value:
        case dict():
            return closed(value)
        case list():
            return [_closed_inside(each) for each in value]
        case _:
            return value


def _tag(body: Format) -> Constraint:
    return Constraint(structural_tag=_text({"type": "structural_tag", "format": body}))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
