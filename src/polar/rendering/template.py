"""A model's own chat template, rendered as transformers renders it.

It is the reference: a renderer suits a model if its ids are those that the template gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Renderer, Unrenderable
from polar.rendering.tool_calls import argument_value

CALLS = (ToolCall("call_0", "look", '{"at": "a", "deep": true}'), ToolCall("call_1", "look", '{"at": "b"}'))
LOOK = ToolDefinition(
    "look",
    "Looks at something.",
    {"type": "object", "properties": {"at": {"type": "string"}, "deep": {"type": "boolean"}}},
)
SYSTEM = Message(Role.SYSTEM, "You are terse.")
ASKED = Message(Role.USER, "What is there?")
ANSWERED = Message(Role.ASSISTANT, "Nothing yet.")
THOUGHT = Message(Role.ASSISTANT, "Nothing yet.", "The room is dark.")
CALLED = Message(Role.ASSISTANT, "", tool_calls=CALLS[:1])
CALLED_TWICE = Message(Role.ASSISTANT, "I will look.", tool_calls=CALLS)
THOUGHT_AND_CALLED = Message(Role.ASSISTANT, "", "I should look.", CALLS[:1])
SEEN = tuple(Message(Role.TOOL, "a chair", tool_call_id=call.id, name="look") for call in CALLS)
AGAIN = Message(Role.USER, "And now?")

Conversation = tuple[tuple[Message, ...], tuple[ToolDefinition, ...]]

PROBES: dict[str, Conversation] = {
    "a question": ((ASKED,), ()),
    "a system message": ((SYSTEM, ASKED), ()),
    "a second question": ((SYSTEM, ASKED, ANSWERED, AGAIN), ()),
    "tools": ((ASKED,), (LOOK,)),
    "tools after a system message": ((SYSTEM, ASKED), (LOOK,)),
    "earlier thoughts": ((ASKED, THOUGHT, AGAIN), ()),
    "thoughts before a call": ((ASKED, THOUGHT_AND_CALLED, SEEN[0]), (LOOK,)),
    "a call and its result": ((SYSTEM, ASKED, CALLED, SEEN[0]), (LOOK,)),
    "parallel calls": ((ASKED, CALLED_TWICE, *SEEN, ANSWERED, AGAIN), (LOOK,)),
}
"""Probe conversations by what they show."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a template takes messages, for which there is no standard."""

    parses_arguments: bool = True
    """Whether the arguments of calls are objects, not JSON text."""
    empty: str | None = ""
    """Content of a turn of calls only."""
    thoughts: str = "reasoning_content"
    ids: str = ""
    """Form of call ids: nine letters for Mistral (`short`), `functions.NAME:0` for Kimi, counted through the
    conversation (`named`) or each turn (`indexed`)."""
    hides_text: bool = False
    """Whether a turn with calls shows thoughts or text, but not both."""
    in_parts: bool = False
    """Whether content is a list of parts, as for models with images."""

    def fields(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        calls = [call for message in messages for call in message.tool_calls]
        names = {call.id: call.name for call in calls}
        turns = [message.tool_calls for message in messages] if self.ids == "indexed" else [calls]
        numbered = [each for turn in turns for each in enumerate(turn)] if self.ids else []
        ids = {call.id: self._id(call, number) for number, call in numbered}
        return [self._fields(message, names, ids) for message in messages]

    def _fields(self, message: Message, names: dict[str, str], ids: dict[str, str]) -> dict[str, Any]:
        fields = message_fields(message) if self.parses_arguments else openai_message(message)
        is_hidden = self.hides_text and message.tool_calls and message.reasoning
        if not message.content or is_hidden:
            fields["content"] = self.empty if message.tool_calls else ""
        if message.reasoning and self.thoughts != "reasoning_content":
            fields[self.thoughts] = fields.pop("reasoning_content")
        if message.tool_call_id is not None:
            answered = message.tool_call_id
            fields["tool_call_id"] = ids.get(answered, answered)
            if answered in names:
                fields.setdefault("name", names[answered])
        if self.in_parts and isinstance(fields["content"], str):
            fields["content"] = [{"type": "text", "text": fields["content"]}]
        for call in fields.get("tool_calls", ()):
            call["id"] = ids.get(call["id"], call["id"])
        return fields

    def _id(self, call: ToolCall, number: int) -> str:
        if self.ids != "short":
            return call.id if _NAMED_ID.fullmatch(call.id) else f"functions.{call.name}:{number}"
        is_short = len(call.id) == 9 and call.id.isalnum()
        return call.id if is_short else sha256(call.id.encode()).hexdigest()[:9]


_NAMED_ID = re.compile(r"functions\..+:\d+")
USUAL_FORMS = (MessageForm(), MessageForm(parses_arguments=False), MessageForm(False, empty=None))
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""Errors of templates for messages that they cannot render."""


class ChatTemplate:
    """A model's template, with the probes it rendered."""

    def __init__(
        self, text: str, directory: Path, tokenizer: Tokenizer, *, with_tools: str | None = None
    ) -> None:
        self.source = text + (with_tools or "")
        self.directory = directory
        self._template = _compile(text, directory)
        self._with_tools = self._template if with_tools is None else _compile(with_tools, directory)
        self._tokens = _named_tokens(directory)
        # Control tokens are spelt out in what a template gives.
        tokenizer.encode_special_tokens = False
        self._expected = {
            what: [tokenizer.encode(text, add_special_tokens=False).ids for text in self._texts(*probe)]
            for what, probe in PROBES.items()
        }

    @property
    def shows_tools(self) -> bool:
        return self._expected["tools"] != self._expected["a question"]

    def differences(self, renderer: Renderer) -> list[str]:
        """The probes whose ids differ between renderer and template."""
        return [
            what
            for what, expected in self._expected.items()
            if (expected or what == "a question") and _ids(renderer, what) not in expected
        ]

    @property
    def forms(self) -> Iterator[MessageForm]:
        """Possible forms of messages, the likeliest first."""
        fields = (name for name in _THOUGHTS if re.search(rf"""[."']{name}\b""", self.source))
        thoughts = next(fields, _THOUGHTS[0])
        for ids in ("", "short", "named", "indexed"):
            for form in USUAL_FORMS:
                yield MessageForm(form.parses_arguments, form.empty, thoughts, ids)
        yield MessageForm(thoughts=thoughts, in_parts=True)

    def rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Render the prompt as text; raise Unrenderable if impossible."""
        template = self._with_tools if tools else self._template
        try:
            return template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except _FAILURES as error:
            raise Unrenderable(f"this model's template cannot show the conversation: {error}") from None

    def _texts(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Iterator[str]:
        """The prompt in each form that templates accept."""
        for form in USUAL_FORMS:
            with suppress(Unrenderable):
                yield self.rendered(form.fields(messages), [tool_fields(tool) for tool in tools])


def _ids(renderer: Renderer, probe: str) -> list[int] | None:
    try:
        return renderer.render(*PROBES[probe])
    except InvalidInput:
        return None


def read_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template beside a model's tokenizer; None if there is none."""
    named = _templates(directory)
    if "default" not in named:
        return None
    return ChatTemplate(named["default"], directory, tokenizer, with_tools=named.get("tool_use"))


def _templates(directory: Path) -> dict[str, str]:
    """The model's templates by name. A few models have several: transformers takes `tool_use` if a request
    offers tools, and `default` if it does not. Those in files go before those of the tokenizer's settings."""
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    if (file := directory / "chat_template.jinja").is_file():
        files = {"default": file} | files
    text = tokenizer_config(directory).get("chat_template")
    if files or text is None:
        return {name: path.read_text() for name, path in files.items()}
    return {"default": text} if isinstance(text, str) else {it["name"]: it["template"] for it in text}


def message_fields(message: Message) -> dict[str, Any]:
    """Convert to the common form of chat templates, with calls' arguments as objects."""
    fields = openai_message(message) | {"content": message.content}
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = argument_value(call["function"]["arguments"])
    return fields


def openai_message(message: Message) -> dict[str, Any]:
    """Convert to OpenAI's form: arguments are text, and a turn of calls alone has no content."""
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


def tool_fields(tool: ToolDefinition) -> dict[str, Any]:
    """Convert to the form that chat templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _compile(text: str, directory: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    if "strftime_now is defined" not in text:
        # Those that can do without show a date of their own: the same prompt on every day.
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise InvalidInput(f"{directory}: its chat template cannot be read: {error}") from None
    # Copied into every context: of a dictionary that takes a tenth of the time that it takes of a ChainMap.
    template.globals = dict(template.globals)
    return template


class _GenerationTag(Extension):
    """The tag by which templates for training mark what the model writes; it shows what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, **options)
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


_ESCAPED = re.compile(r"[^\x00-\x7e\ufdd0-\ufdef]+")
"""All but ASCII, and but the characters that no text has: they hide control tokens and go out again."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _named_tokens(directory: Path) -> dict[str, str]:
    """Tokens that templates name, such as bos_token."""
    found: dict[str, str] = {}
    for name, token in tokenizer_config(directory).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """The tokenizer's settings, with the tokens that older checkpoints name in a file of their own."""
    config, apart = (
        _document(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    return config if "added_tokens_decoder" in config else config | apart


def _document(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return document
