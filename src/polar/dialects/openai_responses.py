"""OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from polar.dialects.base import (
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
)
from polar.dialects.json_fields import Fields, document, malformed
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.responses_input import input_messages
from polar.dialects.responses_output import (
    Asked,
    ResponsesStream,
    message_item,
    place,
    reasoning_item,
    response,
    status_of,
    text_part,
)
from polar.dialects.responses_tools import Toolbox, encoded
from polar.dialects.schemas import MODES, output_format, settled
from polar.models.chat import ChatRequest, JsonOutput, Message, Role, Sampling, ToolChoice, ToolUse

_CHAT = OpenAIChat()
"""The same provider: keys, models and errors are worded alike."""

_NO_WEBSOCKET = HttpAnswer(
    426,
    orjson.dumps(
        {
            "error": {
                "message": "Responses are served over HTTP only: POST the request.",
                "type": "invalid_request_error",
                "param": None,
                "code": "websocket_not_supported",
            }
        }
    ),
    {"Content-Type": "application/json"},
)
"""To Codex's WebSocket probe: with this status it turns to HTTP at once, with others it tries again."""

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
"""Fields of the request that the response repeats, and what they are when not given."""

_ELSEWHERE = {
    "conversation": "conversations are not kept here: send the history, or use previous_response_id",
    "prompt": "prompt templates are not kept here: send instructions and input",
}
"""Fields that name what only OpenAI's servers hold."""

_LOGPROBS = "message.output_text.logprobs"

_INSTRUCTED = "_i"
"""Ends the id of a response whose conversation begins with instructions."""

_FIELDS = {"messages": "input", "response_format": "text.format"}
"""What fields of Chat Completions, in whose terms the gateway complains, are called here."""


class OpenAIResponses(Dialect):
    name: ClassVar[str] = "openai_responses"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/v1/responses", RouteAction.COMPLETE),
        Route("GET", "/v1/responses", RouteAction.FIXED, _NO_WEBSOCKET),
        Route("POST", "/v1/responses/input_tokens", RouteAction.COUNT_TOKENS),
    )
    # Codex compacts, or says that it is out of room, only when the stream itself fails with this code.
    told_in_stream: ClassVar[frozenset[Refusal]] = frozenset({Refusal.CONTEXT_OVERFLOW})

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return _CHAT.key(headers, query)

    def parse(self, request: HttpRequest) -> ChatRequest:
        fields = document(request.body)
        model = fields.needed_string("model")
        _refuse_what_is_not_here(fields)
        toolbox = Toolbox(fields)
        before = _continued(fields, request.recall)
        messages = before + input_messages(fields, toolbox, request.recall)
        if not messages:
            raise malformed("input", "is required and must hold at least one message")
        return ChatRequest(
            model=model,
            messages=_instructions(fields) + messages,
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
            wire={"asked": _asked(fields, toolbox)},
        )

    def respond(self, identity: CallIdentity, request: ChatRequest, answer: Answer) -> bytes:
        asked: Asked = request.wire["asked"]
        message, status = answer.message, status_of(answer.finish_reason)
        output: list[dict[str, Any]] = []
        if message.reasoning:
            output.append(reasoning_item(place(identity, 0), message.reasoning, asked))
        if message.content.strip() or not message.tool_calls:
            # What a call follows was said to its end.
            said = "completed" if message.tool_calls else status
            text = text_part(message.content)
            output.append(message_item(place(identity, len(output)), [text], said))
        for ordinal, call in enumerate(message.tool_calls):
            output.append(asked.toolbox.item_of(call, place(identity, ordinal)))
        return orjson.dumps(response(identity, asked, status, output, answer.usage))

    def stream(self, identity: CallIdentity, request: ChatRequest) -> StreamEncoder:
        return ResponsesStream(identity, request.wire["asked"])

    def models(self, model: str, max_context: int, created: int) -> bytes:
        return _CHAT.models(model, max_context, created)

    def error(self, error: RequestRefused) -> HttpAnswer:
        if error.field in _FIELDS:
            error = RequestRefused(error.refusal, error.message, field=_FIELDS[error.field])
        return _CHAT.error(error)

    def token_count(self, count: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": count})


def _refuse_what_is_not_here(fields: Fields) -> None:
    for name, advice in _ELSEWHERE.items():
        if fields.get(name) is not None:
            raise malformed(name, advice)
    include = fields.get("include")
    asks = isinstance(include, list) and _LOGPROBS in include
    if asks or fields.integer("top_logprobs", 0):
        at = "include" if asks else "top_logprobs"
        raise malformed(at, "logprobs are not served here: Chat Completions serves those of sampled tokens")
    if fields.boolean("background"):
        raise malformed("background", "is not supported: wait for the response, or stream it")


def _continued(fields: Fields, recall: Recall) -> tuple[Message, ...]:
    """What `previous_response_id` names, without its instructions: each request has its own."""
    previous = fields.string("previous_response_id")
    if previous is None:
        return ()
    completion, _, mark = previous.removeprefix("resp_").partition("_")
    before = recall(completion)
    if before is None:
        raise RequestRefused(
            Refusal.UNKNOWN_RESPONSE,
            "The response to continue is not one of this session.",
            field="previous_response_id",
        )
    return before[1:] if mark else before


def _tool_choice(fields: Fields, toolbox: Toolbox) -> ToolChoice:
    parallel = fields.boolean_or("parallel_tool_calls", True)
    at, value = "tool_choice", fields.get("tool_choice")
    names: list[str] = []
    if value is None or isinstance(value, str):
        use = _mode(value or "auto", at)
    else:
        choice = fields.needed_child(at)
        if choice.needed_string("type") == "allowed_tools":
            use, at = _mode(choice.needed_string("mode"), choice.at("mode")), choice.at("tools")
            names = [toolbox.name_of(tool) for tool in choice.children("tools")]
        else:
            use, names = ToolUse.REQUIRED, [toolbox.name_of(choice)]
    return settled(use, names, toolbox.definitions, at, parallel=parallel, elsewhere=toolbox.hosted)


def _mode(value: str, at: str) -> ToolUse:
    if value not in MODES:
        raise malformed(at, f"must be one of {', '.join(MODES)} or an object, not {value!r}")
    return MODES[value]


def _output(fields: Fields) -> JsonOutput | None:
    text = fields.child("text")
    wanted = text.child("format") if text is not None else None
    return output_format(wanted, wanted) if wanted is not None else None


def _instructions(fields: Fields) -> tuple[Message, ...]:
    instructions = fields.string("instructions")
    return (Message(Role.SYSTEM, instructions),) if instructions else ()


def _asked(fields: Fields, toolbox: Toolbox) -> Asked:
    include, reasoning = fields.get("include"), fields.child("reasoning")
    summary = reasoning.get("summary") if reasoning is not None else None
    return Asked(
        toolbox=toolbox,
        echo={name: orjson.Fragment(encoded(fields, name, default)) for name, default in _ECHOED.items()},
        response_suffix=_INSTRUCTED if fields.string("instructions") else "",
        sealed=isinstance(include, list) and "reasoning.encrypted_content" in include,
        summarised=summary not in (None, "none"),
    )
