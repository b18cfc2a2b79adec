"""Google's dialect of JSON schema, in which functions declare their parameters, as JSON schema."""

from __future__ import annotations

from typing import Any

_SCHEMAS = frozenset({"items", "prefixItems", "anyOf", "allOf", "oneOf", "not", "additionalProperties"})
_NAMED_SCHEMAS = frozenset({"properties", "$defs"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""64-bit integers, which Google writes as strings."""
_RENAMED = {"defs": "$defs", "ref": "$ref"}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Types in lower case, `nullable` as a type, names in JSON schema's spelling."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        name = _camel(key)
        name = _RENAMED.get(name, name)
        if name == "type" and isinstance(value, str):
            if value != "TYPE_UNSPECIFIED":
                found["type"] = value.lower()
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {property: _inner(each) for property, each in value.items()}
        elif name in _SCHEMAS:
            found[name] = _inner(value)
        elif name in _COUNTS:
            found[name] = _count(value)
        elif name not in ("propertyOrdering", "nullable"):
            found[key if key.startswith("_") else name] = value
    if schema.get("nullable") is True and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def _inner(value: Any) -> Any:
    match value:
        case dict():
            return json_schema(value)
        case list():
            return [_inner(each) for each in value]
        case _:
            return value


def _count(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else value


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)
