"""One small task: its instruction, checks and solutions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a coding agent."""

    tool: str
    arguments: Mapping[str, Any]


Solution = tuple[Call, ...]
"""Calls in order, one per turn."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """An instruction with its initial files, the checks of the result, and solutions."""

    instruction: str
    checks: tuple[str, ...]
    """Shell conditions that all hold once it is solved; they run after the agent has ended."""
    solutions: tuple[Solution, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def check(self) -> str:
        return " && ".join(self.checks)


def as_script(solution: Solution) -> str:
    """Return the calls as a shell script."""
    return "\n".join(_as_shell(call.tool, call.arguments) for call in solution)


def _as_shell(tool: str, arguments: Mapping[str, Any]) -> str:
    path = arguments.get("path", "")
    match tool:
        case "bash":
            return str(arguments["command"])
        case "write":
            text = shlex.quote(arguments["content"])
            return f'mkdir -p "$(dirname {path})" && printf %s {text} > {path}'
        case "edit":
            edits = [(one["oldText"], one["newText"]) for one in arguments["edits"]]
            return f"python3 -c {shlex.quote(_EDIT)} {path} {shlex.quote(json.dumps(edits))}"
        case _:
            return f"cat {path}"


_EDIT = """
import json, sys
text = open(sys.argv[1]).read()
for old, new in json.loads(sys.argv[2]):
    text = text.replace(old, new, 1)
open(sys.argv[1], "w").write(text)
"""


def bash(command: str) -> Solution:
    return (Call("bash", {"command": command}),)


def write(path: str, content: str) -> Solution:
    return (Call("write", {"path": path, "content": content}),)


def read(path: str) -> Solution:
    return (Call("read", {"path": path}),)


def edit(path: str, old: str, new: str) -> Solution:
    return (Call("edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}),)


def holds(path: str, content: str) -> str:
    """Check that a file has this content, ignoring line ends after the last line."""
    return f'[ "$(cat {path})" = {shlex.quote(content.rstrip(chr(10)))} ]'


def holds_json(path: str, text: str) -> str:
    """Check that a file has this JSON, ignoring white space; its values contain none."""
    return f"[ \"$(tr -d ' \\n' < {path})\" = {shlex.quote(text)} ]"


def is_gone(path: str) -> str:
    return f"[ ! -e {path} ]"


def is_directory(path: str) -> str:
    return f"[ -d {path} ]"


def is_script(path: str, says: str) -> str:
    """Check that a file is executable and prints this."""
    return f'[ -x {path} ] && [ "$(timeout 5 sh {path})" = {shlex.quote(says)} ]'
