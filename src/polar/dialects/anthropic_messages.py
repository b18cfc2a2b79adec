"""Anthropic's Messages API."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import orjson

from polar.dialects.anthropic_request import UNPARSED, read_request
from polar.dialects.base import (
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
    vertex_models,
)
from polar.models.chat import ChatRequest, FinishReason, ToolCall, Usage

_HELLO = HttpAnswer(200, b'{"message":"hello"}', {"Content-Type": "application/json"})

_ERRORS: dict[Refusal, tuple[int, str]] = {
    Refusal.UNKNOWN_KEY: (401, "authentication_error"),
    Refusal.SESSION_ENDED: (410, "permission_error"),
    Refusal.UNKNOWN_ROUTE: (404, "not_found_error"),
    Refusal.UNKNOWN_MODEL: (404, "not_found_error"),
    Refusal.UNKNOWN_RESPONSE: (404, "not_found_error"),
    Refusal.MALFORMED: (400, "invalid_request_error"),
    Refusal.TOO_LARGE: (413, "request_too_large"),
    Refusal.CONTEXT_OVERFLOW: (400, "invalid_request_error"),
    Refusal.BUDGET_SPENT: (402, "billing_error"),
    Refusal.OVER_QUOTA: (429, "rate_limit_error"),
    Refusal.ENGINE_FAILED: (500, "api_error"),
    Refusal.ENGINE_DOWN: (529, "overloaded_error"),
    Refusal.INTERNAL: (500, "api_error"),
}
WORTH_RETRYING = frozenset({Refusal.OVER_QUOTA, Refusal.ENGINE_FAILED, Refusal.ENGINE_DOWN, Refusal.INTERNAL})


def _vertex_routes(models: str) -> tuple[Route, ...]:
    return (
        Route("POST", f"{models}/count-tokens:rawPredict", RouteAction.COUNT_TOKENS),
        Route("POST", f"{models}/{{model:.+}}:rawPredict", RouteAction.COMPLETE),
        Route("POST", f"{models}/{{model:.+}}:streamRawPredict", RouteAction.COMPLETE, is_stream=True),
    )


class AnthropicMessages(Dialect):
    name: ClassVar[str] = "anthropic_messages"
    routes: ClassVar[tuple[Route, ...]] = (
        Route("POST", "/v1/messages", RouteAction.COMPLETE),
        Route("POST", "/v1/messages/count_tokens", RouteAction.COUNT_TOKENS),
        # Vercel's provider reads the same variable as Anthropic's own clients, and takes it to end in /v1.
        Route("POST", "/messages", RouteAction.COMPLETE),
        Route("POST", "/messages/count_tokens", RouteAction.COUNT_TOKENS),
        Route("GET", "/v1/models", RouteAction.LIST_MODELS),
        Route("GET", "/v1/models/{model:.+}", RouteAction.SHOW_MODEL),
        Route("GET", "/api/hello", RouteAction.FIXED, _HELLO),
        Route("HEAD", "/api/hello", RouteAction.FIXED, _HELLO),
        *(route for models in vertex_models("anthropic") for route in _vertex_routes(models)),
    )
    key_headers: ClassVar[tuple[str, ...]] = ("x-api-key",)

    hint_headers: ClassVar[Mapping[str, str]] = {
        "x-claude-code-agent-id": "agent_id",
        "x-claude-code-parent-agent-id": "parent_agent_id",
    }

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or "x-api-key" in headers

    def parse(self, request: HttpRequest) -> ChatRequest:
        return read_request(request)

    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        message = answer.message
        content: list[dict[str, Any]] = []
        if message.reasoning:
            signature = _signature(hashlib.sha256(message.reasoning.encode()))
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
        if message.content:
            content.append({"type": "text", "text": message.content})
        content += [_tool_use(call, orjson.Fragment(object_of(call))) for call in message.tool_calls]
        stop = _stop(answer.finish_reason, answer.stop_sequence)
        return orjson.dumps(
            _envelope(identity) | {"content": content} | stop | {"usage": _usage(answer.usage)}
        )

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        return (MessageStream(identity),)

    def models(self, model: str, max_context: int, created: int) -> bytes:
        listed = [_model(model, max_context, created)]
        return orjson.dumps({"data": listed, "has_more": False, "first_id": model, "last_id": model})

    def model(self, model: str, max_context: int, created: int) -> bytes:
        return orjson.dumps(_model(model, max_context, created))

    def error(self, error: RequestRefused) -> HttpAnswer:
        request_id = f"req_{secrets.token_hex(12)}"
        # Without this header Claude Code retries most errors for minutes.
        retry = "true" if error.refusal in WORTH_RETRYING else "false"
        headers = {"request-id": request_id, "x-should-retry": retry}
        body = orjson.dumps(_error_body(error, request_id))
        return HttpAnswer(_ERRORS[error.refusal][0], body, headers)

    def token_count(self, count: int) -> bytes:
        return orjson.dumps({"input_tokens": count})


class MessageStream(StreamEncoder):
    """Writes the events of one streamed message; at most one block is open at a time."""

    def __init__(self, identity: CallIdentity) -> None:
        self._identity = identity
        self._blocks = 0
        self._open: str | None = None
        self._thought = hashlib.sha256()

    def start(self) -> bytes:
        # The length of the prompt is not known yet, and is sent with the last event.
        empty = {"content": []} | _stop(None, None) | {"usage": _usage(Usage(0, 0))}
        return self._event("message_start", {"message": _envelope(self._identity) | empty})

    def text(self, text: str) -> bytes:
        opening = self._into({"type": "text", "text": ""})
        return opening + self._delta({"type": "text_delta", "text": text})

    def reasoning(self, text: str) -> bytes:
        opening = self._into({"type": "thinking", "thinking": "", "signature": ""})
        self._thought.update(text.encode())
        return opening + self._delta({"type": "thinking_delta", "thinking": text})

    def tool_call(self, call: ToolCall) -> bytes:
        closing = self._close()
        opening = self._begin(_tool_use(call, {}))
        given = self._delta({"type": "input_json_delta", "partial_json": object_of(call).decode()})
        return closing + opening + given + self._end()

    def finish(self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None) -> bytes:
        body = {"delta": _stop(finish_reason, stop_sequence), "usage": _usage(usage)}
        return self._close() + self._event("message_delta", body) + self._event("message_stop", {})

    def error(self, error: RequestRefused) -> bytes:
        return self._event("error", _error_body(error, f"req_{self._identity.id}"))

    def keep_alive(self) -> bytes:
        return self._event("ping", {})

    def _into(self, block: dict[str, Any]) -> bytes:
        """Open a block unless one of its type is open."""
        if self._open == block["type"]:
            return b""
        closing = self._close()
        self._open = block["type"]
        return closing + self._begin(block)

    def _close(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        if block == "text":
            return self._end()
        signature, self._thought = _signature(self._thought), hashlib.sha256()
        return self._delta({"type": "signature_delta", "signature": signature}) + self._end()

    def _begin(self, content_block: dict[str, Any]) -> bytes:
        return self._event("content_block_start", {"index": self._blocks, "content_block": content_block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _end(self) -> bytes:
        index, self._blocks = self._blocks, self._blocks + 1
        return self._event("content_block_stop", {"index": index})

    def _event(self, type_: str, body: dict[str, Any]) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (type_.encode(), orjson.dumps({"type": type_} | body))


def _envelope(identity: CallIdentity) -> dict[str, Any]:
    return {"id": f"msg_{identity.id}", "type": "message", "role": "assistant", "model": identity.model}


def _model(model: str, max_context: int, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model,
        "display_name": model,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_context,
        "max_tokens": max_context,
    }


def _tool_use(call: ToolCall, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def object_of(call: ToolCall) -> bytes:
    """Return the sampled arguments as a JSON object; what is not one is sent as text under `UNPARSED`."""
    try:
        value = json.loads(call.arguments)
        if isinstance(value, dict) and value.keys() != {UNPARSED}:
            return _utf8(value)
    except (ValueError, RecursionError):
        pass
    return _utf8({UNPARSED: call.arguments})


def _utf8(value: dict[str, Any]) -> bytes:
    """Encode as JSON; orjson refuses integers beyond 64 bits and halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def _signature(thought: hashlib._Hash) -> str:
    """Return an opaque signature, which clients require and send back unread."""
    return base64.b64encode(thought.digest()).decode()


def _stop(reason: FinishReason | None, stop_sequence: str | None) -> dict[str, Any]:
    match reason:
        case None:
            name = None
        case FinishReason.STOP if stop_sequence is not None:
            name = "stop_sequence"
        case FinishReason.STOP | FinishReason.CANCELLED | FinishReason.ERROR:
            name = "end_turn"
        case FinishReason.LENGTH:
            name = "max_tokens"
        case FinishReason.TOOL_CALLS:
            name = "tool_use"
    return {"stop_reason": name, "stop_sequence": stop_sequence if name == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.sampled_tokens,
    }


def _error_body(error: RequestRefused, request_id: str) -> dict[str, Any]:
    said = {"type": _ERRORS[error.refusal][1], "message": sentence(error)}
    return {"type": "error", "error": said, "request_id": request_id}


def sentence(error: RequestRefused) -> str:
    if error.refusal is not Refusal.CONTEXT_OVERFLOW or error.limit is None:
        return error.message
    # Claude Code reads from this sentence that it has to compact, and by how much.
    tokens = error.tokens if error.tokens is not None else error.limit + 1
    return f"prompt is too long: {tokens} tokens > {error.limit} maximum"
