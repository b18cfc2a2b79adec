"""OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from polar.dialects.base import (
    AZURE,
    AZURE_KEY,
    Answer,
    CallIdentity,
    Dialect,
    HttpAnswer,
    HttpRequest,
    Recall,
    Refusal,
    RequestRefused,
    Route,
    RouteAction,
    StreamEncoder,
    openai_routes,
)
from polar.dialects.json_fields import Fields, document, kind, malformed
from polar.dialects.openai_chat import OpenAIChat, error_object
from polar.dialects.responses_output import (
    ItemId,
    ResponseOptions,
    ResponsesStream,
    item_id,
    message_item,
    place,
    reasoning_item,
    response,
    status_of,
    text_part,
    unseal,
)
from polar.dialects.responses_tools import Toolbox, call_id
from polar.dialects.schemas import output_format, resolve_tool_choice, tool_use
from polar.models.chat import ChatRequest, JsonOutput, Message, Role, Sampling, ToolCall, ToolChoice, ToolUse

_OVER_HTTP = "Responses are available over HTTP only: POST the request."
_NO_WEBSOCKET = HttpAnswer(
    426,
    orjson.dumps({"error": error_object(_OVER_HTTP, code="websocket_not_supported")}),
    {"Content-Type": "application/json"},
)
"""The answer to Codex's WebSocket probe: this status makes it use HTTP at once; it retries others."""

_ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the response repeats, with their defaults."""

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}

_ELSEWHERE = {
    "conversation": "is not supported: send the history, or use previous_response_id",
    "prompt": "is not supported: send instructions and input",
}
"""Fields that refer to objects stored on OpenAI's servers."""

_LOGPROBS = "message.output_text.logprobs"

_INSTRUCTED = "_i"
"""Ends the id of a response whose conversation begins with instructions."""

_FIELDS = {"messages": "input", "response_format": "text.format"}
"""Names here of the Chat Completions fields that the gateway uses in errors."""


class OpenAIResponses(Dialect):
    name: ClassVar[str] = "openai_responses"
    routes: ClassVar[tuple[Route, ...]] = (
        *openai_routes("POST", "/responses", RouteAction.COMPLETE, AZURE),
        *openai_routes("GET", "/responses", RouteAction.FIXED, AZURE, _NO_WEBSOCKET),
        *openai_routes("POST", "/responses/input_tokens", RouteAction.COUNT_TOKENS, AZURE),
    )
    key_headers: ClassVar[tuple[str, ...]] = AZURE_KEY
    # Codex compacts, or reports a full context, only if the stream itself fails with this code.
    told_in_stream: ClassVar[frozenset[Refusal]] = frozenset({Refusal.CONTEXT_OVERFLOW})

    def parse(self, request: HttpRequest) -> ChatRequest:
        fields = document(request.body, Fields)
        model = fields.needed_string("model")
        _refuse_unsupported(fields)
        toolbox = Toolbox(fields)
        before = _previous_messages(fields, request.recall)
        messages = before + _input(fields, toolbox, request.recall)
        if not messages:
            raise malformed("input", "is required and must hold at least one message")
        instructions = fields.string("instructions")
        system = (Message(Role.SYSTEM, instructions),) if instructions else ()
        return ChatRequest(
            model=model,
            messages=system + messages,
            tools=toolbox.definitions,
            tool_choice=_tool_choice(fields, toolbox),
            output=_output(fields),
            sampling=Sampling(
                temperature=fields.number("temperature", 0, 2),
                top_p=fields.number("top_p", 0, 1),
                max_tokens=fields.integer("max_output_tokens", 1),
            ),
            omitted=fields.omitted,
            stream=fields.boolean("stream"),
            stream_usage=True,
            wire={"options": _response_options(fields, toolbox)},
        )

    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        options: ResponseOptions = request.wire["options"]
        message, status = answer.message, status_of(answer.finish_reason)
        output: list[dict[str, Any]] = []
        if message.reasoning:
            output.append(reasoning_item(place(identity, 0), message.reasoning, options))
        if message.content.strip() or not message.tool_calls:
            # Text before a call is complete.
            text_status = "completed" if message.tool_calls else status
            text = text_part(message.content)
            output.append(message_item(place(identity, len(output)), [text], text_status))
        for ordinal, call in enumerate(message.tool_calls):
            output.append(options.toolbox.item_of(call, place(identity, ordinal)))
        return orjson.dumps(response(identity, options, status, output, answer.usage))

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        return (ResponsesStream(identity, request.wire["options"]),)

    def error(self, error: RequestRefused) -> HttpAnswer:
        if error.field in _FIELDS:
            error = RequestRefused(error.refusal, error.message, field=_FIELDS[error.field])
        return OpenAIChat().error(error)

    def token_count(self, count: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": count})


def _refuse_unsupported(fields: Fields) -> None:
    for name, advice in _ELSEWHERE.items():
        if fields.get(name) is not None:
            raise malformed(name, advice)
    include = fields.get("include")
    asks = isinstance(include, list) and _LOGPROBS in include
    if asks or fields.integer("top_logprobs", 0):
        at = "include" if asks else "top_logprobs"
        raise malformed(at, "logprobs are not supported here: use Chat Completions")
    if fields.boolean("background"):
        raise malformed("background", "is not supported: wait for the response, or stream it")


def _previous_messages(fields: Fields, recall: Recall) -> tuple[Message, ...]:
    """Return the conversation of `previous_response_id` without instructions: each request has its own."""
    previous = fields.string("previous_response_id")
    if previous is None:
        return ()
    completion, _, mark = previous.removeprefix("resp_").partition("_")
    before = recall(completion)
    if before is None:
        raise RequestRefused(
            Refusal.UNKNOWN_RESPONSE,
            "previous_response_id is not a response of this session.",
            field="previous_response_id",
        )
    return before[1:] if mark else before


def _tool_choice(fields: Fields, toolbox: Toolbox) -> ToolChoice:
    parallel = fields.boolean("parallel_tool_calls", default=True)
    at, value = "tool_choice", fields.get("tool_choice")
    names: list[str] = []
    if value is None or isinstance(value, str):
        use = tool_use(value or "auto", at)
    else:
        choice = fields.needed_child(at)
        if choice.needed_string("type") == "allowed_tools":
            use, at = tool_use(choice.needed_string("mode"), choice.at("mode")), choice.at("tools")
            names = [toolbox.name_of(tool) for tool in choice.children("tools")]
        else:
            use, names = ToolUse.REQUIRED, [toolbox.name_of(choice)]
    return resolve_tool_choice(
        use, names, toolbox.definitions, at, parallel=parallel, elsewhere=toolbox.hosted
    )


def _output(fields: Fields) -> JsonOutput | None:
    text = fields.child("text")
    wanted = text.child("format") if text is not None else None
    return output_format(wanted, wanted) if wanted is not None else None


def _response_options(fields: Fields, toolbox: Toolbox) -> ResponseOptions:
    given = {name: fields.get(name) for name in _ECHOED}
    echoed = {name: _ECHOED[name] if value is None else value for name, value in given.items()}
    include, reasoning = fields.get("include"), fields.child("reasoning")
    summary = reasoning.get("summary") if reasoning is not None else None
    return ResponseOptions(
        toolbox=toolbox,
        echo={name: orjson.Fragment(orjson.dumps(value)) for name, value in echoed.items()},
        response_suffix=_INSTRUCTED if fields.string("instructions") else "",
        sealed=isinstance(include, list) and "reasoning.encrypted_content" in include,
        summarised=summary not in (None, "none"),
    )


def _input(fields: Fields, toolbox: Toolbox, recall: Recall) -> tuple[Message, ...]:
    value = fields.get("input")
    if isinstance(value, str):
        return (Message(Role.USER, value),)
    if value is not None and not isinstance(value, list):
        raise malformed("input", f"must be a string or an array of items, not {kind(value)}")
    history = _History()
    for item in fields.children("input"):
        _read(item, toolbox, history, recall)
    return history.messages()


class _History:
    """Collects messages; consecutive output of the assistant is one turn, unless echoed ids show
    otherwise."""

    def __init__(self) -> None:
        self._completion: str | None = None
        self._messages: list[Message] = []
        self._is_open = False
        self._content = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []

    def add_output(
        self, item: Fields, content: str = "", *, reasoning: str = "", calls: tuple[ToolCall, ...] = ()
    ) -> None:
        self._begin(item)
        self._content += content
        self._reasoning += reasoning
        self._calls.extend(calls)

    def add_recalled(self, item: Fields, content: str = "", *, reasoning: str = "") -> None:
        """Add a turn's whole text or reasoning; it counts once even if several items stand for it."""
        self._begin(item)
        self._content = self._content or content
        self._reasoning = self._reasoning or reasoning

    def add(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def messages(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def _begin(self, item: Fields) -> None:
        id = item_id(item.string("id"))
        if id is not None and self._completion not in (None, id.completion):
            self._close()
        self._completion = id.completion if id is not None else self._completion
        self._is_open = True

    def _close(self) -> None:
        if not self._is_open:
            return
        message = Message(Role.ASSISTANT, self._content, self._reasoning or None, tuple(self._calls))
        self._messages.append(message)
        self._is_open, self._completion = False, None
        self._content, self._reasoning, self._calls = "", "", []


def _read(item: Fields, toolbox: Toolbox, history: _History, recall: Recall) -> None:
    match item.string("type"):
        case "message":
            _read_message(item, history)
        case "function_call" | "custom_tool_call" | "local_shell_call":
            history.add_output(item, calls=(toolbox.call_of(item),))
        case "function_call_output" | "custom_tool_call_output":
            answered = call_id(item.needed_string("call_id"))
            history.add(Message(Role.TOOL, _text(item, "output"), tool_call_id=answered))
        case "local_shell_call_output":
            answered = item.string("call_id") or item.needed_string("id")
            history.add(Message(Role.TOOL, _text(item, "output"), tool_call_id=answered))
        case "reasoning":
            if reasoning := _reasoning(item):
                history.add_output(item, reasoning=reasoning)
        case "item_reference":
            _read_reference(item, history, recall)
        case None if item.get("role") is not None:
            _read_message(item, history)
        case None if item.get("id") is not None:
            _read_reference(item, history, recall)
        case None:
            raise malformed(
                item.at("type"), "is required: an item is a message, a call, an output or reasoning"
            )
        case _:
            # Items of hosted tools (searches, listings, compaction) are not shown to the model.
            pass


def _read_reference(item: Fields, history: _History, recall: Recall) -> None:
    text = item.needed_string("id")
    id = item_id(text)
    conversation = recall(id.completion) if id is not None else None
    message = conversation[-1] if conversation is not None else Message(Role.ASSISTANT)
    match id:
        case ItemId("msg") if conversation is not None:
            history.add_recalled(item, message.content)
        case ItemId("rs") if message.reasoning:
            history.add_recalled(item, reasoning=message.reasoning)
        case ItemId("fc" | "ctc" | "lsh", index=index) if index < len(message.tool_calls):
            history.add_output(item, calls=(message.tool_calls[index],))
        case _:
            raise malformed(item.at("id"), f"no response of this session has an item {text!r}: send it whole")


def _read_message(item: Fields, history: _History) -> None:
    role = item.one_of("role", _ROLES)
    content = _text(item, "content")
    if role is Role.ASSISTANT:
        history.add_output(item, content)
    else:
        history.add(Message(role, content))


def _reasoning(item: Fields) -> str:
    """Return the sealed reasoning if it is ours, else the text that the item shows."""
    sealed = item.string("encrypted_content")
    text = unseal(sealed) if sealed is not None else None
    if text is not None:
        return text
    content = "".join(part.string("text") or "" for part in item.children("content"))
    return content or "\n\n".join(part.string("text") or "" for part in item.children("summary"))


def _text(item: Fields, name: str) -> str:
    value = item.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(item.at(name), f"must be a string or an array of parts, not {kind(value)}")
    return "".join(_part(part) for part in item.children(name))


def _part(part: Fields) -> str:
    type_ = part.needed_string("type")
    match type_:
        case "input_text" | "output_text" | "text":
            return part.needed_string("text")
        case "refusal":
            return part.needed_string("refusal")
        case _:
            return part.string("text") or part.placeholder(type_.removeprefix("input_"))
