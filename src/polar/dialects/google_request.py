"""Reads Google's generateContent requests: contents, tools and generation settings."""

from __future__ import annotations

import base64
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, Self

import orjson

from polar.dialects.json_fields import Fields, document, malformed, memoized
from polar.dialects.schemas import check_schema, resolve_tool_choice, tool_definition
from polar.models.chat import (
    ChatRequest,
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
"""The only argument of a call whose sampled arguments are not a JSON object."""

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
"""The largest `candidateCount` that Google allows."""


class GoogleFields(Fields):
    """Fields in camelCase or snake_case, and single objects in place of arrays, as Google accepts them."""

    __slots__ = ()

    def __init__(
        self, value: dict[str, Any], parent: Fields | None = None, name: str = "", index: int | None = None
    ) -> None:
        super().__init__(value, parent, name, index)
        if "_" in "".join(value):
            self._value = {_camel(key): given for key, given in value.items()} | value

    def at(self, name: str) -> str:
        snake = re.sub(r"[A-Z]", lambda letter: "_" + letter[0].lower(), name)
        return super().at(name if name in self._value and snake not in self._value else snake)

    def children(self, name: str) -> list[Self]:
        value = self.get(name)
        return [type(self)(value, self, name)] if isinstance(value, dict) else super().children(name)


def read_request(body: bytes, model: str, *, stream: bool, as_events: bool, is_count: bool) -> ChatRequest:
    fields = document(body, GoogleFields)
    if is_count:
        fields = fields.child("generateContentRequest") or fields
    if not model:
        raise malformed("model", "is required in the path")
    if fields.get("cachedContent"):
        raise malformed(fields.at("cachedContent"), "is not supported: send the contents themselves")
    config = fields.child("generationConfig") or GoogleFields({})
    thinking = config.child("thinkingConfig")
    tools = _tools(fields)
    return ChatRequest(
        model=model,
        messages=_messages(fields),
        tools=tools,
        tool_choice=_tool_choice(fields, tools),
        output=_output(config),
        sampling=_sampling(config),
        omitted=fields.omitted,
        choices=_candidate_count(config, 1 if stream else _MOST_CANDIDATES),
        stream=stream,
        wire={
            "events": as_events,
            # Google returns thoughts only on request.
            "thoughts": thinking is not None and thinking.boolean("includeThoughts"),
        },
    )


def _messages(fields: GoogleFields) -> tuple[Message, ...]:
    said = tuple(_turns(fields.children("contents")))
    if not said:
        raise malformed(fields.at("contents"), "is required and must hold at least one content")
    system = _system(fields)
    return (Message(Role.SYSTEM, system), *said) if system else said


@memoized(GoogleFields, "tools")
def _tools(fields: GoogleFields) -> tuple[ToolDefinition, ...]:
    """Return the declared functions; tools that Google itself runs (search, code) are not available here."""
    return tuple(
        _tool(declaration)
        for tool in fields.children("tools")
        for declaration in tool.children("functionDeclarations")
    )


def _tool_choice(fields: GoogleFields, offered: tuple[ToolDefinition, ...]) -> ToolChoice:
    config = fields.child("toolConfig")
    calling = config.child("functionCallingConfig") if config else None
    if calling is None:
        return ToolChoice()
    mode = (calling.string("mode") or "AUTO").upper()
    if mode not in _MODES:
        raise malformed(calling.at("mode"), f"must be one of {', '.join(_MODES)}, not {mode!r}")
    names = calling.strings("allowedFunctionNames")
    return resolve_tool_choice(
        _MODES[mode], names, offered, calling.at("allowedFunctionNames" if names else "mode")
    )


def _output(config: GoogleFields) -> JsonOutput | None:
    at, mime_type = config.at("responseMimeType"), config.string("responseMimeType") or _TEXT
    if mime_type not in (_TEXT, _JSON):
        # text/x.enum is refused too: JSON with an enum in its schema does the same.
        raise malformed(at, f"must be {_TEXT} or {_JSON}, not {mime_type!r}")
    schema = _output_schema(config)
    if mime_type == _JSON:
        return JsonOutput(schema)
    if schema is not None:
        raise malformed(at, f"must be {_JSON} if there is a response schema")
    return None


def _output_schema(config: GoogleFields) -> dict[str, Any] | None:
    for name in ("responseJsonSchema", "_responseJsonSchema", "responseSchema"):
        if config.child(name) is not None:
            schema = config.get(name)
            return check_schema(json_schema(schema) if name == "responseSchema" else schema, config.at(name))
    return None


def _sampling(config: GoogleFields) -> Sampling:
    if config.boolean("responseLogprobs"):
        raise malformed(config.at("responseLogprobs"), "logprobs are not supported")
    return Sampling(
        temperature=config.number("temperature", 0, 2),
        top_p=config.number("topP", 0, 1),
        top_k=config.integer("topK", 0),
        seed=config.integer("seed", -(2**63)),
        max_tokens=config.integer("maxOutputTokens", 1),
        stop=tuple(filter(None, config.strings("stopSequences"))),
        presence_penalty=config.number("presencePenalty", -2, 2) or 0.0,
        frequency_penalty=config.number("frequencyPenalty", -2, 2) or 0.0,
    )


def _candidate_count(config: GoogleFields, most: int) -> int:
    count = config.integer("candidateCount", 1) or 1
    if count > most:
        where = " in a stream" if most == 1 else ""
        raise malformed(config.at("candidateCount"), f"must be at most {most}{where}")
    return count


def signature(call_id: str, reasoning: str) -> str:
    """Return a thoughtSignature with a call's id and the thoughts before it, which clients must echo."""
    return base64.b64encode(f"{_SIGNATURE_MARK}{call_id}\n{reasoning}".encode("utf-8", "replace")).decode()


class Unanswered:
    """The calls of a turn that have no result yet."""

    def __init__(self, calls: Iterable[ToolCall] = ()) -> None:
        self._by_id: dict[str, ToolCall] = {}
        self._by_name: defaultdict[str, deque[ToolCall]] = defaultdict(deque)
        for call in calls:
            self._by_id.setdefault(call.id, call)
            self._by_name[call.name].append(call)

    def take_first(self) -> ToolCall | None:
        return self._by_id.pop(next(iter(self._by_id), ""), None)

    def take(self, id: str, name: str) -> ToolCall | None:
        """Remove and return the call with this id, or else the first with this name."""
        call = self._by_id.pop(id, None)
        of_name = self._by_name[name]
        while call is None and of_name:
            call = self._by_id.pop(of_name.popleft().id, None)
        return call


def _turns(contents: Iterable[GoogleFields]) -> Iterator[Message]:
    """Merge neighbouring contents of one role, since clients regroup them between requests."""
    unanswered, calls = Unanswered(), 0
    for is_model, turn in groupby(contents, _is_model):
        if not is_model:
            yield from _user_messages(turn, unanswered)
            continue
        reply = _reply([part for content in turn for part in content.children("parts")], calls)
        unanswered = Unanswered(reply.tool_calls)
        calls += len(reply.tool_calls)
        yield reply


def _is_model(content: GoogleFields) -> bool:
    role = content.string("role") or "user"
    if role not in ("user", "model", "function", "tool"):  # the last two are in examples of Google's own
        raise malformed(content.at("role"), f"must be 'user' or 'model', not {role!r}")
    return role == "model"


def _user_messages(contents: Iterable[GoogleFields], unanswered: Unanswered) -> Iterator[Message]:
    texts: list[str] = []
    for content in contents:
        parts = content.children("parts")
        if not parts:
            raise malformed(content.at("parts"), "must not be empty")
        for part in parts:
            response = part.child("functionResponse")
            if response is None and (len(parts) == 1 or part.get("text") != ""):
                texts.append(_text(part))
            if response is not None:
                yield from _text_message(texts)
                texts = []
                yield _result(response, unanswered)
    yield from _text_message(texts)


def _text_message(texts: list[str]) -> list[Message]:
    return [Message(Role.USER, "\n".join(texts))] if texts else []


def _reply(parts: Iterable[GoogleFields], calls_before: int) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    signed: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        signed_id, signed_thoughts = _read_signature(part)
        signed.append(signed_thoughts)
        call = part.child("functionCall")
        if call is not None:
            id = call.string("id") or signed_id or f"call_{calls_before + len(calls) + 1}"
            calls.append(ToolCall(id, call.needed_string("name"), _arguments(call)))
        elif part.get("thought") is True:
            thoughts.append(_text(part))
        else:
            texts.append(_text(part))
    reasoning = "".join(thoughts) or "".join(signed) or None
    return Message(Role.ASSISTANT, "".join(texts), reasoning, tuple(calls))


def _result(response: GoogleFields, unanswered: Unanswered) -> Message:
    id, name = response.string("id") or "", response.string("name")
    call = unanswered.take(id, name or "")
    return Message(Role.TOOL, _result_text(response), tool_call_id=call.id if call else id, name=name)


def _text(part: GoogleFields) -> str:
    text = part.string("text")
    if text is not None:
        return text
    data = part.child("inlineData") or part.child("fileData")
    if data is not None:
        media = (data.string("mimeType") or "").partition("/")[0]
        return part.placeholder(media if media in ("image", "audio", "video") else "file")
    code = part.child("executableCode")
    if code is not None:
        return code.string("code") or ""
    result = part.child("codeExecutionResult")
    return (result.string("output") or "") if result is not None else ""


def _result_text(response: GoogleFields) -> str:
    """Return a result as text: a lone `output` or `result` as it is, anything else as JSON."""
    value = response.get("response")
    if isinstance(value, dict) and len(value) == 1 and not value.keys().isdisjoint({"output", "result"}):
        value = next(iter(value.values()))
    shown = value if isinstance(value, str) else _json(value if value is not None else {})
    return "\n".join([shown, *map(_text, response.children("parts"))])


def _arguments(call: GoogleFields) -> str:
    if call.child("args") is None:
        return "{}"
    args = call.get("args")
    raw = args.get(RAW_ARGUMENTS)
    return raw if len(args) == 1 and isinstance(raw, str) else _json(args)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _read_signature(part: GoogleFields) -> tuple[str, str]:
    """Return the call id and thoughts in one of our signatures, in either base64 alphabet."""
    signed = (part.string("thoughtSignature") or "").rstrip("=")
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


def _system(fields: GoogleFields) -> str:
    value = fields.get("systemInstruction")
    if isinstance(value, str):
        return value
    contents = fields.children("systemInstruction")
    parts = [
        part
        for content in contents
        for part in (content.children("parts") if content.get("parts") is not None else (content,))
    ]
    return "\n".join(text for part in parts if (text := _text(part)))


def _tool(declaration: GoogleFields) -> ToolDefinition:
    if declaration.child("parametersJsonSchema") is not None:
        return tool_definition(declaration, "parametersJsonSchema")
    tool = tool_definition(declaration, "parameters")
    return replace(tool, parameters=json_schema(tool.parameters))


_SCHEMAS = frozenset({"items", "prefixItems", "anyOf", "allOf", "oneOf", "not", "additionalProperties"})
_NAMED_SCHEMAS = frozenset({"properties", "$defs"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""Keywords whose 64-bit integers Google writes as strings."""
_RENAMED = {"defs": "$defs", "ref": "$ref"}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert a Google schema to JSON schema: lower-case types, `nullable` as a type, standard names."""
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
    return re.sub(r"(?<=.)_([a-z])", lambda found: found[1].upper(), name)
