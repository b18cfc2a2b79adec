"""One small task as a family makes it: what is asked, how it is checked, how it can be solved."""

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
"""Calls in order, one a turn."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """What is asked; the workspace it starts from; what must hold in the end; ways there."""

    instruction: str
    checks: tuple[str, ...]
    """Shell conditions that all hold once it is solved. They run after the agent is gone."""
    solutions: tuple[Solution, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def check(self) -> str:
        return " && ".join(self.checks)


def as_script(solution: Solution) -> str:
    """What the calls do, for a shell."""
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
    """The file has this content; line ends after the last line do not matter."""
    return f'[ "$(cat {path})" = {shlex.quote(content.rstrip(chr(10)))} ]'


def holds_json(path: str, text: str) -> str:
    """The file has this JSON, whatever blanks stand in it; no value of it has a blank."""
    return f"[ \"$(tr -d ' \\n' < {path})\" = {shlex.quote(text)} ]"


def is_gone(path: str) -> str:
    return f"[ ! -e {path} ]"


def is_directory(path: str) -> str:
    return f"[ -d {path} ]"


def is_script(path: str, says: str) -> str:
    """The file can be run, and prints this."""
    return f'[ -x {path} ] && [ "$(timeout 5 sh {path})" = {shlex.quote(says)} ]'
