"""OpenAI's Chat Completions API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from polar.dialects.base import (
    AZURE,
    AZURE_DEPLOYMENT,
    AZURE_KEY,
    Answer,
    CallIdentity,
    Dialect,
    HttpAnswer,
    HttpRequest,
    Refusal,
    RequestRefused,
    Route,
    RouteAction,
    StreamEncoder,
    openai_routes,
    usage_of_all,
)
from polar.dialects.json_fields import Fields, document, kind, malformed, memoized
from polar.dialects.schemas import logit_bias, resolve_tool_choice, response_format, tool_definition, tool_use
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    Message,
    Role,
    Sampling,
    TokenLogprob,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolUse,
    Usage,
)

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}

_KINDS = {"image_url": "image", "input_audio": "audio", "video_url": "video"}
"""The names that all dialects share for parts which are not text."""

_ERRORS: dict[Refusal, tuple[int, str, str | None]] = {
    Refusal.UNKNOWN_KEY: (401, "invalid_request_error", "invalid_api_key"),
    Refusal.SESSION_ENDED: (410, "invalid_request_error", "session_ended"),
    Refusal.UNKNOWN_ROUTE: (404, "invalid_request_error", "unknown_url"),
    Refusal.UNKNOWN_MODEL: (404, "invalid_request_error", "model_not_found"),
    Refusal.UNKNOWN_RESPONSE: (400, "invalid_request_error", "previous_response_not_found"),
    Refusal.MALFORMED: (400, "invalid_request_error", None),
    Refusal.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Refusal.CONTEXT_OVERFLOW: (400, "invalid_request_error", "context_length_exceeded"),
    # Most harnesses would retry OpenAI's own 429, but a spent budget stays spent: 400 ends them.
    Refusal.BUDGET_SPENT: (400, "insufficient_quota", "insufficient_quota"),
    Refusal.OVER_QUOTA: (429, "requests", "rate_limit_exceeded"),
    Refusal.ENGINE_FAILED: (502, "server_error", "engine_failed"),
    Refusal.ENGINE_DOWN: (503, "server_error", "engine_unavailable"),
    Refusal.INTERNAL: (500, "server_error", "internal_error"),
}
_MOST_CHOICES = 128
"""The largest `n` that OpenAI allows."""


class OpenAIChat(Dialect):
    name: ClassVar[str] = "openai_chat"
    routes: ClassVar[tuple[Route, ...]] = (
        *openai_routes("POST", "/chat/completions", RouteAction.COMPLETE, AZURE_DEPLOYMENT),
        *openai_routes("GET", "/models", RouteAction.LIST_MODELS, AZURE),
        *openai_routes("GET", "/models/{model:.+}", RouteAction.SHOW_MODEL, AZURE),
    )
    key_headers: ClassVar[tuple[str, ...]] = AZURE_KEY

    def parse(self, request: HttpRequest) -> ChatRequest:
        fields = document(request.body, Fields)
        model = request.model or fields.needed_string("model")
        messages = tuple(_message(message) for message in fields.children("messages"))
        if not messages:
            raise malformed("messages", "is required and must hold at least one message")
        options = fields.child("stream_options")
        tools = read_tools(fields)
        is_legacy = bool(tools) and not fields.get("tools")
        return ChatRequest(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice=_tool_choice(fields, tools, parallel=not is_legacy),
            output=response_format(fields),
            sampling=read_sampling(fields),
            choices=choice_count(fields),
            omitted=fields.omitted,
            logprobs=_wants_logprobs(fields),
            stream=fields.boolean("stream"),
            stream_usage=options is not None and options.boolean("include_usage"),
            wire={"legacy": True} if is_legacy else {},
        )

    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        usage = usage_of_all([answer.usage for answer in answers])
        choices = [_choice(index, request, answer) for index, answer in enumerate(answers)]
        return orjson.dumps(
            _envelope(identity, "chat.completion") | {"choices": choices, "usage": usage_body(usage)}
        )

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        finished: list[Usage] = []
        return [ChatStream(identity, request, index, finished) for index in range(request.choices)]

    def models(self, model: str, max_context: int, created: int) -> bytes:
        return orjson.dumps({"object": "list", "data": [_model(model, max_context, created)]})

    def model(self, model: str, max_context: int, created: int) -> bytes:
        return orjson.dumps(_model(model, max_context, created))

    def error(self, error: RequestRefused) -> HttpAnswer:
        return HttpAnswer(_ERRORS[error.refusal][0], orjson.dumps({"error": error_body(error)}))


class ChatStream(StreamEncoder):
    """Writes the chunks of one choice of a streamed chat completion."""

    def __init__(
        self, identity: CallIdentity, request: ChatRequest, index: int, finished: list[Usage]
    ) -> None:
        """Share `finished`, the usage of the choices that have ended, among all choices of a request."""
        self._request = request
        self._index = index
        self._finished = finished
        self._envelope = _envelope(identity, "chat.completion.chunk")
        self._calls = 0

    def start(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        return self._delta({"content": text})

    def reasoning(self, text: str) -> bytes:
        return self._delta({"reasoning_content": text})

    def tool_call(self, call: ToolCall) -> bytes:
        index, self._calls = self._calls, self._calls + 1
        if _is_legacy(self._request):
            return self._delta({"function_call": _function_body(call)}) if index == 0 else b""
        return self._delta({"tool_calls": [{"index": index} | _call_body(call)]})

    def logprobs(self, sampled: tuple[TokenLogprob, ...]) -> bytes:
        return self._delta({}, logprobs=_logprobs(sampled))

    def finish(self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None) -> bytes:
        chunks = self._final_chunk(finish_reason)
        self._finished.append(usage)
        if len(self._finished) < self._request.choices:
            return chunks
        if self._request.stream_usage:
            chunks += self._chunk([], usage_body(usage_of_all(self._finished)))
        return chunks + b"data: [DONE]\n\n"

    def error(self, error: RequestRefused) -> bytes:
        return event({"error": error_body(error)})

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def _final_chunk(self, finish_reason: FinishReason) -> bytes:
        return self._delta({}, _finish(finish_reason, self._request))

    def _delta(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = self._envelope | {"choices": choices}
        # Clients that asked for usage expect the field on every chunk, null until the last.
        return event(body | {"usage": usage} if self._request.stream_usage else body)


def error_body(error: RequestRefused) -> dict[str, Any]:
    _, type_, code = _ERRORS[error.refusal]
    return error_object(error.message, type_, error.field, code)


def error_object(
    message: str, type_: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"message": message, "type": type_, "param": param, "code": code}


def _is_legacy(request: ChatRequest) -> bool:
    """Whether tools were offered as legacy `functions`, which allow one call per turn."""
    return bool(request.wire.get("legacy"))


def _choice(index: int, request: ChatRequest, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.message.content or None if answer.message.tool_calls else answer.message.content,
        "refusal": None,
    }
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls and _is_legacy(request):
        message["function_call"] = _function_body(answer.message.tool_calls[0])
    elif answer.message.tool_calls:
        message["tool_calls"] = [_call_body(call) for call in answer.message.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer.logprobs) if request.logprobs else None,
        "finish_reason": _finish(answer.finish_reason, request),
    }


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _envelope(identity: CallIdentity, object_: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{identity.id}",
        "object": object_,
        "created": identity.created,
        "model": identity.model,
    }


def _model(model: str, max_context: int, created: int) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "polar",
        "max_model_len": max_context,
    }


def _call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _function_body(call)}


def _function_body(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _finish(reason: FinishReason, request: ChatRequest) -> str:
    match reason:
        case FinishReason.STOP | FinishReason.CANCELLED | FinishReason.ERROR:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.TOOL_CALLS:
            return "function_call" if _is_legacy(request) else "tool_calls"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _wants_logprobs(fields: Fields) -> bool:
    if fields.integer("top_logprobs", 0):
        raise malformed("top_logprobs", "is not supported: only the logprobs of sampled tokens are returned")
    return fields.boolean("logprobs")


def _logprobs(sampled: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """Return the logprobs of every sampled token, including thoughts, calls and the end of the turn."""
    content = [
        {
            "token": one.token.decode(errors="replace"),
            "logprob": one.logprob,
            "bytes": list(one.token),
            "top_logprobs": [],
        }
        for one in sampled
    ]
    return {"content": content, "refusal": None}


def choice_count(fields: Fields) -> int:
    choices = fields.integer("n", 1) or 1
    if choices > _MOST_CHOICES:
        raise malformed("n", f"must be at most {_MOST_CHOICES}")
    return choices


def read_sampling(fields: Fields) -> Sampling:
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    return Sampling(
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", -1),
        seed=fields.integer("seed", -(2**63)),
        max_tokens=fields.integer(limit, 1),
        stop=read_stop(fields),
        logit_bias=logit_bias(fields),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
    )


def read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [value] if isinstance(value, str) else fields.strings("stop", "a string or an array of strings")
    return tuple(filter(None, stops))


@memoized(Fields, "tools", "functions")
def read_tools(fields: Fields) -> tuple[ToolDefinition, ...]:
    functions = [_function(tool) for tool in fields.children("tools")] or fields.children("functions")
    return tuple(tool_definition(function, "parameters") for function in functions)


def _function(tool: Fields) -> Fields:
    type_ = tool.string("type")
    if type_ not in (None, "function"):
        raise malformed(tool.at("type"), f"only 'function' tools are supported, not {type_!r}")
    return tool.needed_child("function")


def _tool_choice(fields: Fields, tools: tuple[ToolDefinition, ...], *, parallel: bool) -> ToolChoice:
    parallel = fields.boolean("parallel_tool_calls", default=True) and parallel
    # `function_call` is the legacy name of the field.
    at = "tool_choice" if fields.get("tool_choice") is not None else "function_call"
    value = fields.get(at)
    if value is None:
        return ToolChoice(parallel=parallel)
    if isinstance(value, str):
        return resolve_tool_choice(tool_use(value, at), (), tools, at, parallel=parallel)
    choice = fields.needed_child(at)
    type_ = choice.string("type") or "function"
    match type_:
        case "function":
            function = choice.needed_child("function") if at == "tool_choice" else choice
            names = [function.needed_string("name")]
            return resolve_tool_choice(ToolUse.REQUIRED, names, tools, function.at("name"), parallel=parallel)
        case "allowed_tools":
            allowed = choice.needed_child("allowed_tools")
            use = tool_use(allowed.needed_string("mode"), allowed.at("mode"))
            names = [
                tool.needed_child("function").needed_string("name") for tool in allowed.children("tools")
            ]
            return resolve_tool_choice(use, names, tools, allowed.at("tools"), parallel=parallel)
        case _:
            raise malformed(choice.at("type"), f"must be 'function' or 'allowed_tools', not {type_!r}")


def _message(message: Fields) -> Message:
    role = message.one_of("role", _ROLES)
    calls = _tool_calls(message) if role is Role.ASSISTANT else ()
    content = _content(message)
    if content is None and role is not Role.ASSISTANT:
        raise malformed(message.at("content"), "is required and must be a string or an array of text parts")
    call_id = message.string("tool_call_id")
    if message.get("role") == "tool" and call_id is None:
        raise malformed(message.at("tool_call_id"), "is required on tool messages")
    return Message(
        role=role,
        content=content or "",
        reasoning=_reasoning(message) if role is Role.ASSISTANT else None,
        tool_calls=calls,
        tool_call_id=call_id if role is Role.TOOL else None,
        name=message.string("name"),
    )


def _reasoning(message: Fields) -> str | None:
    """Return echoed reasoning, under either of its names; some harnesses put objects there."""
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def _content(message: Fields) -> str | None:
    value = message.get("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(
            message.at("content"), f"must be a string or an array of text parts, not {kind(value)}"
        )
    return "".join(_part(part) for part in message.children("content"))


def _part(part: Fields) -> str:
    match part.needed_string("type"):
        case "text":
            return part.needed_string("text")
        case "refusal":
            return part.needed_string("refusal")
        case other:
            return part.placeholder(_KINDS.get(other, other))


def _tool_calls(message: Fields) -> tuple[ToolCall, ...]:
    calls = [
        _tool_call(call.needed_child("function"), call.string("id") or "")
        for call in message.children("tool_calls")
    ]
    legacy = message.child("function_call")
    if legacy is not None:
        calls.append(_tool_call(legacy, ""))
    return tuple(calls)


def _tool_call(function: Fields, id: str) -> ToolCall:
    return ToolCall(
        id=id, name=function.needed_string("name"), arguments=function.string("arguments") or "{}"
    )
