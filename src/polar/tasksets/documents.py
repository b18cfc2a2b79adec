"""Task files as plain documents: YAML, JSON and JSON Lines, read strictly and with line numbers."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from polar.config.yaml_document import parse_yaml
from polar.errors import InvalidInput


class Format(StrEnum):
    YAML = "yaml"
    """Also reads JSON, of which YAML is a superset."""
    JSON = "json"
    JSONL = "jsonl"


FORMATS = {".yaml": Format.YAML, ".yml": Format.YAML, ".json": Format.JSON, ".jsonl": Format.JSONL}
"""By the suffix of a file's name."""


def parse(text: str, format: Format, source: str) -> Any:
    """The document in `text`; JSON Lines become a list. InvalidInput names the source and the line."""
    match format:
        case Format.YAML:
            return parse_yaml(text, source)
        case Format.JSON:
            return _parse_json(text, source, first_line=1)
        case Format.JSONL:
            return [
                _parse_json(line, source, first_line=number)
                for number, line in enumerate(text.split("\n"), start=1)
                if line.strip()
            ]


def parse_line(line: bytes) -> Any:
    """One line of a JSON Lines file; ValueError says what is wrong with it."""
    try:
        text = line.decode().strip()
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"column {error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def guess_format(text: str) -> Format:
    """The format of text that came without a name: JSON Lines if every line is a JSON object."""
    lines = [line for line in text.split("\n") if line.strip()]
    return Format.JSONL if len(lines) > 1 and all(map(_is_json_object, lines)) else Format.YAML


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parse_json(text: str, source: str, first_line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InvalidInput(f"{source}:{line}:{error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise InvalidInput(f"{source}:{first_line}: not JSON: {error}") from None
    except RecursionError:
        raise InvalidInput(f"{source}: nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
