"""Reads Google's generateContent requests: contents, tools and generation settings.

Google takes every field in camelCase and in snake_case, and a single object where it documents an
array of them; so does this.
"""

from __future__ import annotations

import base64
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson

from polar.dialects.json_fields import Fields, kind, malformed, memoized
from polar.dialects.schemas import checked, settled
from polar.models.chat import (
    JsonOutput,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolUse,
)

RAW_ARGUMENTS = "__raw_arguments"
"""The one argument under which a call's arguments travel when they are no JSON object."""

_SIGNATURE_MARK = "polar:"
_TEXT, _JSON = "text/plain", "application/json"
_MODES = {
    "MODE_UNSPECIFIED": ToolUse.AUTO,
    "AUTO": ToolUse.AUTO,
    "VALIDATED": ToolUse.AUTO,
    "ANY": ToolUse.REQUIRED,
    "NONE": ToolUse.NONE,
}
_MOST_CANDIDATES = 8
"""What Google allows for `candidateCount`."""


def messages(fields: Fields) -> tuple[Message, ...]:
    """The system instruction and the contents; all a model said in one turn is one message."""
    transcript = _Transcript()
    for content in _objects(fields, "contents"):
        transcript.add(content)
    said = transcript.messages()
    if not said:
        raise malformed(fields.at("contents"), "is required and must hold at least one content")
    system = _system(fields)
    return (Message(Role.SYSTEM, system), *said) if system else said


@memoized("tools")
def tools(fields: Fields) -> tuple[ToolDefinition, ...]:
    """The declared functions; tools that Google runs itself (search, code) do not exist here."""
    return tuple(
        _tool(declaration)
        for tool in _objects(fields, "tools")
        for declaration in _objects(tool, "functionDeclarations")
    )


def tool_choice(fields: Fields, offered: tuple[ToolDefinition, ...]) -> ToolChoice:
    config = _child(fields, "toolConfig")
    calling = _child(config, "functionCallingConfig") if config else None
    if calling is None:
        return ToolChoice()
    mode = (calling.string("mode") or "AUTO").upper()
    if mode not in _MODES:
        raise malformed(calling.at("mode"), f"must be one of {', '.join(_MODES)}, not {mode!r}")
    allowed = _spelt(calling, "allowedFunctionNames")
    names = calling.get(allowed) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise malformed(calling.at(allowed), "must be an array of strings")
    return settled(_MODES[mode], names, offered, calling.at(allowed if names else "mode"))


def output(fields: Fields) -> JsonOutput | None:
    config = _child(fields, "generationConfig") or Fields({})
    at = config.at(_spelt(config, "responseMimeType"))
    mime_type = config.string(_spelt(config, "responseMimeType")) or _TEXT
    if mime_type not in (_TEXT, _JSON):
        # Enums as bare text, too: JSON with an enum in its schema says the same.
        raise malformed(at, f"must be {_TEXT} or {_JSON}, not {mime_type!r}")
    schema = _output_schema(config)
    if mime_type == _TEXT:
        if schema is not None:
            raise malformed(at, f"must be {_JSON} where there is a response schema")
        return None
    return JsonOutput(schema)


def _output_schema(config: Fields) -> dict[str, Any] | None:
    for name in ("responseJsonSchema", "_responseJsonSchema"):
        name = _spelt(config, name)
        if config.child(name) is not None:
            return checked(config.get(name), config.at(name))
    name = _spelt(config, "responseSchema")
    return checked(json_schema(config.get(name)), config.at(name)) if config.child(name) else None


def sampling(fields: Fields) -> Sampling:
    config = _child(fields, "generationConfig") or Fields({})
    if config.boolean(_spelt(config, "responseLogprobs")):
        raise malformed(config.at(_spelt(config, "responseLogprobs")), "logprobs are not served here")
    return Sampling(
        temperature=config.number("temperature", 0, 2),
        top_p=config.number(_spelt(config, "topP"), 0, 1),
        top_k=config.integer(_spelt(config, "topK"), 0),
        seed=config.integer("seed", -(2**63)),
        max_tokens=config.integer(_spelt(config, "maxOutputTokens"), 1),
        stop=_stop(config),
        presence_penalty=config.number(_spelt(config, "presencePenalty"), -2, 2) or 0.0,
        frequency_penalty=config.number(_spelt(config, "frequencyPenalty"), -2, 2) or 0.0,
    )


def candidate_count(fields: Fields, *, stream: bool) -> int:
    config = _child(fields, "generationConfig") or Fields({})
    name = _spelt(config, "candidateCount")
    count = config.integer(name, 1) or 1
    most = 1 if stream else _MOST_CANDIDATES
    if count > most:
        raise malformed(config.at(name), f"must be at most {most}{' in a stream' if stream else ''}")
    return count


def wants_thoughts(fields: Fields) -> bool:
    """Google keeps the model's thoughts to itself unless asked."""
    config = _child(fields, "generationConfig")
    thinking = _child(config, "thinkingConfig") if config else None
    return thinking is not None and thinking.boolean(_spelt(thinking, "includeThoughts"))


def refuse_cached_content(fields: Fields) -> None:
    name = _spelt(fields, "cachedContent")
    if fields.get(name):
        raise malformed(fields.at(name), "is not supported: send the contents themselves")


def counted(fields: Fields) -> Fields:
    """The request whose tokens a countTokens body asks about."""
    return _child(fields, "generateContentRequest") or fields


def signature(call_id: str, reasoning: str) -> str:
    """A thoughtSignature that holds a call's id and the thoughts before it.

    Clients must echo it; their own copies of either they often drop.
    """
    return base64.b64encode(f"{_SIGNATURE_MARK}{call_id}\n{reasoning}".encode("utf-8", "replace")).decode()


class _FunctionReply:
    """What a model said in one turn, gathered over however many contents it came back in."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.signed: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def message(self) -> Message:
        return Message(
            role=Role.ASSISTANT,
            content="".join(self.texts),
            reasoning="".join(self.thoughts) or "".join(self.signed) or None,
            tool_calls=tuple(self.calls),
        )


class _Unanswered:
    """A turn's calls that no function has answered yet."""

    def __init__(self) -> None:
        self._by_id: dict[str, ToolCall] = {}
        self._by_name: defaultdict[str, deque[ToolCall]] = defaultdict(deque)

    def add(self, call: ToolCall) -> None:
        self._by_id.setdefault(call.id, call)
        self._by_name[call.name].append(call)

    def take(self, id: str, name: str) -> ToolCall | None:
        """The call with the id, or else the first of the name."""
        call = self._by_id.pop(id, None)
        of_name = self._by_name[name]
        while call is None and of_name:
            call = self._by_id.pop(of_name.popleft().id, None)
        return call


class _Transcript:
    """Contents on their way to messages.

    Texts of adjacent user contents become one message too: clients coalesce contents of one role
    between requests, and that must not change the conversation.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._texts: list[str] = []
        self._reply: _FunctionReply | None = None
        self._unanswered = _Unanswered()
        self._calls = 0

    def add(self, content: Fields) -> None:
        role = content.string("role") or "user"
        match role:
            case "model":
                self._end_user()
                self._add_model(content)
            case "user" | "function" | "tool":  # the last two for results, in examples of Google's own
                self._end_model()
                self._add_user(content)
            case _:
                raise malformed(content.at("role"), f"must be 'user' or 'model', not {role!r}")

    def messages(self) -> tuple[Message, ...]:
        self._end_model()
        self._end_user()
        return tuple(self._messages)

    def _add_user(self, content: Fields) -> None:
        parts = list(_objects(content, "parts"))
        if not parts:
            raise malformed(content.at("parts"), "must not be empty")
        for part in parts:
            response = _child(part, "functionResponse")
            if response is not None:
                self._end_user()
                self._messages.append(self._result(response))
            elif len(parts) == 1 or part.get("text") != "":
                self._texts.append(_text(part))

    def _add_model(self, content: Fields) -> None:
        if self._reply is None:
            self._reply, self._unanswered = _FunctionReply(), _Unanswered()
        reply = self._reply
        for part in _objects(content, "parts"):
            call_id, thoughts = _signed(part)
            reply.signed.append(thoughts)
            call = _child(part, "functionCall")
            if call is not None:
                reply.calls.append(self._call(call, call_id))
                self._unanswered.add(reply.calls[-1])
            elif part.get("thought") is True:
                reply.thoughts.append(_text(part))
            else:
                reply.texts.append(_text(part))

    def _call(self, call: Fields, signed_id: str) -> ToolCall:
        self._calls += 1
        id = call.string("id") or signed_id or f"call_{self._calls}"
        return ToolCall(id=id, name=call.needed_string("name"), arguments=_arguments(call))

    def _result(self, response: Fields) -> Message:
        id, name = response.string("id") or "", response.string("name")
        call = self._unanswered.take(id, name or "")
        return Message(
            role=Role.TOOL, content=_output(response), tool_call_id=call.id if call else id, name=name
        )

    def _end_user(self) -> None:
        if self._texts:
            self._messages.append(Message(Role.USER, "\n".join(self._texts)))
            self._texts = []

    def _end_model(self) -> None:
        if self._reply is not None:
            self._messages.append(self._reply.message)
            self._reply = None


def _text(part: Fields) -> str:
    """A part in words."""
    text = part.string("text")
    if text is not None:
        return text
    for name in ("inlineData", "fileData"):
        data = _child(part, name)
        if data is not None:
            media = (data.string(_spelt(data, "mimeType")) or "").partition("/")[0]
            return part.placeholder(media if media in ("image", "audio", "video") else "file")
    code = _child(part, "executableCode")
    if code is not None:
        return code.string("code") or ""
    result = _child(part, "codeExecutionResult")
    return (result.string("output") or "") if result is not None else ""


def _output(response: Fields) -> str:
    """A lone `output` or `result` is the answer itself; anything else is shown as it is."""
    value = response.get("response")
    if isinstance(value, dict) and len(value) == 1 and not value.keys().isdisjoint({"output", "result"}):
        value = next(iter(value.values()))
    shown = value if isinstance(value, str) else _json(value if value is not None else {})
    media = [_text(part) for part in _objects(response, "parts")]
    return "\n".join([shown, *media])


def _arguments(call: Fields) -> str:
    if call.child("args") is None:
        return "{}"
    args = call.get("args")
    raw = args.get(RAW_ARGUMENTS)
    return raw if len(args) == 1 and isinstance(raw, str) else _json(args)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _signed(part: Fields) -> tuple[str, str]:
    """The call id and thoughts in a signature of ours, in either base64 alphabet; else nothing."""
    signed = (part.string(_spelt(part, "thoughtSignature")) or "").rstrip("=")
    if not signed:
        return "", ""
    padded = signed + "=" * (-len(signed) % 4)
    try:
        text = base64.b64decode(padded.replace("-", "+").replace("_", "/")).decode()
    except ValueError:
        return "", ""
    if not text.startswith(_SIGNATURE_MARK):
        return "", ""
    call_id, _, thoughts = text.removeprefix(_SIGNATURE_MARK).partition("\n")
    return call_id, thoughts


def _system(fields: Fields) -> str:
    name = _spelt(fields, "systemInstruction")
    value = fields.get(name)
    if isinstance(value, str):
        return value
    contents = list(_objects(fields, name))
    parts = [
        part
        for content in contents
        for part in (_objects(content, "parts") if content.get("parts") is not None else (content,))
    ]
    return "\n".join(text for part in parts if (text := _text(part)))


def _stop(config: Fields) -> tuple[str, ...]:
    name = _spelt(config, "stopSequences")
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise malformed(config.at(name), "must be an array of strings")
    return tuple(stop for stop in value if stop)


def _tool(declaration: Fields) -> ToolDefinition:
    name = declaration.needed_string("name")
    if not name:
        raise malformed(declaration.at("name"), "must not be empty")
    return ToolDefinition(name, declaration.string("description") or "", _parameters(declaration))


def _parameters(declaration: Fields) -> dict[str, Any]:
    name = _spelt(declaration, "parametersJsonSchema")
    is_json_schema = declaration.child(name) is not None
    name = name if is_json_schema else "parameters"
    if declaration.child(name) is None:
        return {}
    schema: dict[str, Any] = declaration.get(name)
    return schema if is_json_schema else json_schema(schema)


def _child(fields: Fields, name: str) -> Fields | None:
    return fields.child(_spelt(fields, name))


def _objects(fields: Fields, name: str) -> Iterator[Fields]:
    """The objects of an array, or the one that stands in its place."""
    name = _spelt(fields, name)
    value = fields.get(name)
    if isinstance(value, dict):
        yield Fields(value, fields, name)
    elif value is None or isinstance(value, list):
        yield from fields.children(name)
    else:
        raise malformed(fields.at(name), f"must be an array, not {kind(value)}")


def _spelt(fields: Fields, name: str) -> str:
    """The field's name as this client writes it."""
    return name if fields.get(name) is not None else _snake(name)


@cache
def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: "_" + letter[0].lower(), name)


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
