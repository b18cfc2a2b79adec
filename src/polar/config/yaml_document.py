"""YAML as people write it: strict, and a mistake is named by its line and column."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from polar.errors import InvalidInput

STDIN = Path("-")


def read_yaml(path: Path) -> Any:
    """The document in a file, or in standard input; InvalidInput names the file and the line."""
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 text (byte {error.start})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """The document in `text`, which `source` names."""
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


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe subset; a key given twice is an error, since one of the two would be lost."""

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
