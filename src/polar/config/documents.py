"""YAML and JSON as people write them: parsed strictly, with errors that name the line and column."""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from polar.errors import InvalidInput

STDIN = Path("-")


def read_yaml(path: Path) -> Any:
    """Parse a file, or standard input; InvalidInput names the file and the line."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a file, or standard input; raise InvalidInput if it cannot be read."""
    try:
        return sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 text (byte {error.start})") from None


def parse_yaml(text: str, source: str) -> Any:
    """Parse `text`; `source` names it in errors."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise InvalidInput(f"{source}{where}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InvalidInput(f"{source}: nested too deeply") from None


def parse_json(text: str, source: str, first_line: int = 1) -> Any:
    """Parse `text`, which begins at `first_line` of `source`."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InvalidInput(f"{source}:{line}:{error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise InvalidInput(f"{source}:{first_line}: not JSON: {error}") from None
    except RecursionError:
        raise InvalidInput(f"{source}:{first_line}: nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe subset, which refuses a key given twice, since one of the two would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping
