"""A model's own chat template, rendered as transformers renders it.

It is the reference: a renderer suits a model if its ids are those that the template gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Renderer

_CALLS = (ToolCall("call_0", "look", '{"at": "a", "deep": true}'), ToolCall("call_1", "look", '{"at": "b"}'))
_LOOK = ToolDefinition(
    "look",
    "Looks at something.",
    {"type": "object", "properties": {"at": {"type": "string"}, "deep": {"type": "boolean"}}},
)
_SYSTEM = Message(Role.SYSTEM, "You are terse.")
_ASKED = Message(Role.USER, "What is there?")
_ANSWERED = Message(Role.ASSISTANT, "Nothing yet.")
_THOUGHT = Message(Role.ASSISTANT, "Nothing yet.", "The room is dark.")
_CALLED = Message(Role.ASSISTANT, "", tool_calls=_CALLS[:1])
_CALLED_TWICE = Message(Role.ASSISTANT, "I will look.", tool_calls=_CALLS)
_THOUGHT_AND_CALLED = Message(Role.ASSISTANT, "", "I should look.", _CALLS[:1])
_SEEN = tuple(Message(Role.TOOL, "a chair", tool_call_id=call.id, name="look") for call in _CALLS)
_AGAIN = Message(Role.USER, "And now?")

Conversation = tuple[tuple[Message, ...], tuple[ToolDefinition, ...]]

PROBES: dict[str, Conversation] = {
    "a question": ((_ASKED,), ()),
    "a system message": ((_SYSTEM, _ASKED), ()),
    "a second question": ((_SYSTEM, _ASKED, _ANSWERED, _AGAIN), ()),
    "tools": ((_ASKED,), (_LOOK,)),
    "tools after a system message": ((_SYSTEM, _ASKED), (_LOOK,)),
    "earlier thoughts": ((_ASKED, _THOUGHT, _AGAIN), ()),
    "thoughts before a call": ((_ASKED, _THOUGHT_AND_CALLED, _SEEN[0]), (_LOOK,)),
    "a call and its result": ((_SYSTEM, _ASKED, _CALLED, _SEEN[0]), (_LOOK,)),
    "parallel calls": ((_ASKED, _CALLED_TWICE, *_SEEN, _ANSWERED, _AGAIN), (_LOOK,)),
}
"""Conversations by what they show."""


class ChatTemplate:
    """The template of a model, and what it makes of the probes."""

    def __init__(self, text: str, directory: Path, tokenizer: Tokenizer) -> None:
        self._template = _compiled(text, directory)
        self._tokens = _named_tokens(directory)
        # Control tokens are spelt out in what a template gives.
        tokenizer.encode_special_tokens = False
        self._expected = {
            what: [tokenizer.encode(text, add_special_tokens=False).ids for text in self._texts(*probe)]
            for what, probe in PROBES.items()
        }

    def text(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()) -> str | None:
        """The prompt; None where the template has no form for the conversation."""
        return next(self._texts(messages, tools), None)

    @property
    def shows_tools(self) -> bool:
        return self._expected["tools"] != self._expected["a question"]

    @property
    def tool_frame(self) -> tuple[str, str] | None:
        """What the template says in its system turn before and after the JSON of a tool; None if it has none.

        Models of one family differ in a brace here.
        """
        tool = json.dumps(tool_fields(_LOOK), ensure_ascii=False)
        before, _, rest = (self.text((_SYSTEM, _ASKED), (_LOOK,)) or "").partition(tool)
        after, ended, _ = rest.partition("<|im_end|>")
        _, gap, before = before.partition(f"{_SYSTEM.content}\n\n")
        return (before, after) if gap and ended else None

    def differences(self, renderer: Renderer) -> list[str]:
        """The probes that the renderer renders in other ids than the template."""
        return [
            what
            for what, expected in self._expected.items()
            if expected and _ids(renderer, what) not in expected
        ]

    def _texts(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Iterator[str]:
        """The prompt from each of the forms that templates take messages in."""
        for form in (message_fields, _unparsed_fields, openai_message):
            try:
                yield self._template.render(
                    messages=[form(message) for message in messages],
                    tools=[tool_fields(tool) for tool in tools] or None,
                    add_generation_prompt=True,
                    **self._tokens,
                )
            except (TemplateError, TypeError, ValueError, LookupError):
                continue


def _ids(renderer: Renderer, probe: str) -> list[int] | None:
    try:
        return renderer.render(*PROBES[probe])
    except InvalidInput:
        return None


def read_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template beside a model's tokenizer; None if there is none."""
    file = directory / "chat_template.jinja"
    text = file.read_text() if file.is_file() else _tokenizer_config(directory).get("chat_template")
    if isinstance(text, list):
        # A few models have several, by name.
        text = next((each["template"] for each in text if each.get("name") == "default"), None)
    return ChatTemplate(text, directory, tokenizer) if isinstance(text, str) else None


def message_fields(message: Message) -> dict[str, Any]:
    """A message in the form that most chat templates read: the arguments of calls are objects."""
    fields = openai_message(message) | {"content": message.content}
    for call in fields.get("tool_calls", ()):
        with suppress(ValueError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return fields


def openai_message(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API has it: arguments are text, and a turn of calls alone has no content."""
    has_calls_alone = message.tool_calls and not message.content
    fields: dict[str, Any] = {
        "role": message.role.value,
        "content": None if has_calls_alone else message.content,
    }
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _unparsed_fields(message: Message) -> dict[str, Any]:
    return openai_message(message) | {"content": message.content}


def tool_fields(tool: ToolDefinition) -> dict[str, Any]:
    """A tool in the form that chat templates read."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _compiled(text: str, directory: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    # Without strftime_now, templates that show the date show the one that they have by default.
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise InvalidInput(f"{directory}: its chat template cannot be read: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _named_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, which templates name."""
    found: dict[str, str] = {}
    for name, token in _tokenizer_config(directory).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return config
