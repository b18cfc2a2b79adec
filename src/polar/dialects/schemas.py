"""Finds what is wrong with a JSON schema, so that its sender learns it before any engine is asked."""

from __future__ import annotations

from typing import Any

from polar.dialects.json_fields import Fields, kind, malformed

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ONE = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"})
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def needed_schema(fields: Fields, name: str) -> dict[str, Any]:
    """The schema in a field, as it is."""
    fields.needed_child(name)
    return checked(fields.get(name), fields.at(name))


def checked(schema: dict[str, Any], at: str) -> dict[str, Any]:
    """The schema itself; RequestRefused names the place where it is none."""
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
                    raise malformed(at, f"{each!r} is no type of JSON schema")
        case "required":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise malformed(at, "must be an array of strings")
        case "enum":
            _filled_list(value, at)
        case "$ref":
            if not isinstance(value, str) or not _resolves(value, root):
                raise malformed(at, f"{value!r} refers to nothing in this schema")


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
