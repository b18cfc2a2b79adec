"""The requested shape of an answer: JSON schemas, tool choices, and OpenAI's sampling constraints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from polar.dialects.json_fields import Fields, kind, malformed
from polar.models.chat import JsonOutput, ToolChoice, ToolDefinition, ToolUse

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ONE = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"})
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def needed_schema(fields: Fields, name: str) -> dict[str, Any]:
    fields.needed_child(name)
    return check_schema(fields.get(name), fields.at(name))


def check_schema(schema: dict[str, Any], at: str) -> dict[str, Any]:
    """Return the schema unchanged; RequestRefused names the place of the first error in it."""
    _check(schema, at, schema)
    return schema


def _check(schema: Any, at: str, root: dict[str, Any]) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise malformed(at, f"must be a JSON schema, not {kind(schema)}")
    for name, value in schema.items():
        place = f"{at}.{name}"
        if name in _ONE:
            _check(value, place, root)
        elif name in _SEVERAL:
            for index, each in enumerate(_filled_list(value, place)):
                _check(each, f"{place}[{index}]", root)
        elif name in _NAMED:
            if not isinstance(value, dict):
                raise malformed(place, f"must be an object of schemas, not {kind(value)}")
            for key, each in value.items():
                _check(each, f"{place}.{key}", root)
        else:
            _check_word(name, value, place, root)


def _check_word(name: str, value: Any, at: str, root: dict[str, Any]) -> None:
    match name:
        case "type":
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, str) or each not in _TYPES:
                    raise malformed(at, f"{each!r} is not a JSON schema type")
        case "required":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise malformed(at, "must be an array of strings")
        case "enum":
            _filled_list(value, at)
        case "$ref":
            if not isinstance(value, str) or not _resolves(value, root):
                raise malformed(at, f"{value!r} does not exist in this schema")


def _filled_list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise malformed(at, "must be an array with at least one element")
    return value


def _resolves(reference: str, root: dict[str, Any]) -> bool:
    path, _, pointer = reference.partition("#")
    if path:
        return False
    value: Any = root
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


_MODES = {"auto": ToolUse.AUTO, "none": ToolUse.NONE, "required": ToolUse.REQUIRED}
_MAX_BIAS = 100
_MAX_TOKEN_ID = 2**31 - 1


def response_format(fields: Fields) -> JsonOutput | None:
    wanted = fields.child("response_format")
    if wanted is None:
        return None
    # The schema is in an object of its own here; in Responses it is beside the type.
    return output_format(wanted, wanted.child("json_schema"))


def output_format(wanted: Fields, schema: Fields | None) -> JsonOutput | None:
    """Return the output format in `wanted`, whose schema and its name may be in another object."""
    type_ = wanted.needed_string("type")
    match type_:
        case "text":
            return None
        case "json_object":
            return JsonOutput({"type": "object"})
        case "json_schema":
            if schema is None:
                raise malformed(wanted.at("json_schema"), "is required and must be an object")
            return JsonOutput(needed_schema(schema, "schema"), schema.string("name") or "answer")
        case _:
            raise malformed(wanted.at("type"), f"must be text, json_object or json_schema, not {type_!r}")


def logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.child("logit_bias")
    if biases is None:
        return ()
    found: list[tuple[int, float]] = []
    for token, bias in fields.get("logit_bias").items():
        # isdecimal accepts digits of every script.
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= _MAX_TOKEN_ID):
            raise malformed(biases.at(token), "is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise malformed(biases.at(token), f"must be a number, not {kind(bias)}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise malformed(biases.at(token), f"must be between -{_MAX_BIAS} and {_MAX_BIAS}, not {bias}")
        found.append((int(token), float(bias)))
    return tuple(found)


def tool_definition(tool: Fields, schema: str) -> ToolDefinition:
    """Return a tool whose parameters are in the field `schema`."""
    name = tool.name()
    parameters = dict(tool.get(schema)) if tool.child(schema) is not None else {}
    return ToolDefinition(name, tool.string("description") or "", parameters)


def tool_use(mode: str, at: str) -> ToolUse:
    if mode not in _MODES:
        raise malformed(at, f"must be one of {', '.join(_MODES)} or an object, not {mode!r}")
    return _MODES[mode]


def resolve_tool_choice(
    use: ToolUse,
    names: Sequence[str],
    tools: Sequence[ToolDefinition],
    at: str,
    *,
    parallel: bool = True,
    elsewhere: Collection[str] = (),
) -> ToolChoice:
    """Return the tool choice that the body makes at `at`.

    `elsewhere` names declared tools that the provider would run itself. A choice of only such tools lets
    the model answer freely, which clients handle best.
    """
    offered = {tool.name for tool in tools}
    for name in names:
        if name not in offered and name not in elsewhere:
            raise malformed(at, f"{name!r} is not one of the offered tools")
    left = tuple(dict.fromkeys(name for name in names if name in offered))
    if use is ToolUse.REQUIRED and not (left if names else offered):
        if not elsewhere:
            raise malformed(at, "requires tools, but none are offered")
        return ToolChoice(parallel=parallel)
    return ToolChoice(use, () if set(left) == offered else left, parallel)
