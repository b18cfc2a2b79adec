"""What is said in the benchmark: one harness's requests and the engine's answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.engines.embedded.weights import ensure_tokenizer
from polar.models.chat import Message, Role, ToolDefinition
from polar.rendering.families import renderer_for

MODEL = "smollm2-135m-instruct"
SAMPLED = 64
COUNTER = "000000000000"
"""Stands in every body; replaced by a number of the same length, so that no two requests are the same."""

_RULES = (
    "Work in small steps and look at a file before you change it.",
    "Prefer the tools over guessing; quote paths exactly as they were printed.",
    "When a command fails, read its last lines first and say what they mean.",
    "Keep edits minimal, keep the style of the file, and run the tests after each of them.",
    "Never remove a test to make the suite pass; explain what you could not do.",
)
_TOOLS = (
    ("read_file", "Read a file of the working directory", ("path", "offset", "limit")),
    ("write_file", "Write a whole file, making its directories", ("path", "content")),
    ("edit_file", "Replace one exact piece of text in a file by another", ("path", "old", "new")),
    (
        "bash",
        "Run a shell command and return its exit code and the end of its output",
        ("command", "timeout"),
    ),
    ("search", "Find lines that match a regular expression", ("pattern", "directory", "glob")),
    ("list_files", "List the files below a directory, the newest first", ("directory", "depth")),
)
_LISTING = "\n".join(
    f"src/module_{number}.py:{number * 7}: def handle_{number}(request): return respond(request)"
    for number in range(35)
)
_ANSWER = (
    "Certainly. The handler in module seven drops the last line because its loop ends one step early. "
    "I will change the bound of the loop, add a test that reads a file without a final newline, and run "
    "the whole suite again to see that nothing else depended on the old behaviour of that function. "
    "Then I will show the difference before the change is kept for good."
)


@dataclass(frozen=True, slots=True)
class Wire:
    """Everything that is said, computed once."""

    first: str
    """A request that begins a conversation, as JSON text with COUNTER in it."""
    second: str
    """The request that follows the answer to `first`."""
    prompt_ids: list[int]
    sampled_ids: list[int]
    pieces: list[str]
    """The text of each sampled token."""

    @property
    def marker(self) -> bytes:
        """Bytes that a stream holds once the first token has come through, and not before."""
        return self.pieces[0].encode()


def build() -> Wire:
    """Requests of 2,000 prompt tokens and an answer of 64, in the quickstart model's own tokens."""
    directory = ensure_tokenizer(MODEL)
    renderer = renderer_for(MODEL, directory, tool_prompt=True)
    messages = _messages()
    tools = [
        ToolDefinition(
            tool["function"]["name"], tool["function"]["description"], tool["function"]["parameters"]
        )
        for tool in _tools()
    ]
    prompt_ids = renderer.render([Message(Role(m["role"]), m["content"]) for m in messages], tools)
    sampled_ids, pieces = _answer(directory / "tokenizer.json")
    reply = {"role": "assistant", "content": "".join(pieces)}
    more = {"role": "user", "content": "Good. Do that, then tell me which tests you ran and how they ended."}
    return Wire(_body(messages), _body([*messages, reply, more]), prompt_ids, sampled_ids, pieces)


def other_harness(body: str) -> str:
    """The same request with another system prompt, to warm a gateway up without giving it this one."""
    return body.replace("You are a coding agent", "You are a travel agent")


def _answer(tokenizer_file: Path) -> tuple[list[int], list[str]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ids: list[int] = tokenizer.encode(_ANSWER, add_special_tokens=False).ids[:SAMPLED]
    pieces = [tokenizer.decode([id]) for id in ids]
    assert len(ids) == SAMPLED
    assert tokenizer.decode(ids) == "".join(pieces)
    return ids, pieces


def _body(messages: list[dict[str, Any]]) -> str:
    body = {
        "model": MODEL,
        "messages": messages,
        "tools": _tools(),
        "temperature": 1.0,
        "max_tokens": SAMPLED,
    }
    return json.dumps(body)


def _messages() -> list[dict[str, Any]]:
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_RULES * 7, start=1))
    return [
        {"role": "system", "content": f"You are a coding agent in a sandbox.\n\n{rules}"},
        {
            "role": "user",
            "content": f"Task {COUNTER}: a reader of log files loses its last line. Find out why.",
        },
        {"role": "assistant", "content": "I will look for the function that reads the file first."},
        {"role": "user", "content": f"The search printed this:\n{_LISTING}\n\nGo on."},
    ]


def _tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{description}. Paths are relative to the working directory.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        field: {"type": "string", "description": f"The {field} to use with {name}."}
                        for field in fields
                    },
                    "required": list(fields[:1]),
                },
            },
        }
        for name, description, fields in _TOOLS
    ]
