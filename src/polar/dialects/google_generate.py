"""Google's generateContent, streamed as events or as a JSON array, and countTokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

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
    usage_of_all,
    vertex_models,
)
from polar.dialects.google_request import RAW_ARGUMENTS, read_request, signature
from polar.models.chat import ChatRequest, FinishReason, Message, ToolCall, Usage

_ERRORS: dict[Refusal, tuple[int, str]] = {
    Refusal.UNKNOWN_KEY: (401, "UNAUTHENTICATED"),
    Refusal.SESSION_ENDED: (410, "FAILED_PRECONDITION"),
    Refusal.UNKNOWN_ROUTE: (404, "NOT_FOUND"),
    Refusal.UNKNOWN_MODEL: (404, "NOT_FOUND"),
    Refusal.UNKNOWN_RESPONSE: (404, "NOT_FOUND"),
    Refusal.MALFORMED: (400, "INVALID_ARGUMENT"),
    Refusal.TOO_LARGE: (413, "INVALID_ARGUMENT"),
    Refusal.CONTEXT_OVERFLOW: (400, "INVALID_ARGUMENT"),
    # 429 RESOURCE_EXHAUSTED would be retried; a spent budget stays spent, and 400 ends a harness.
    Refusal.BUDGET_SPENT: (400, "FAILED_PRECONDITION"),
    Refusal.OVER_QUOTA: (429, "RESOURCE_EXHAUSTED"),
    Refusal.ENGINE_FAILED: (500, "INTERNAL"),
    Refusal.ENGINE_DOWN: (503, "UNAVAILABLE"),
    Refusal.INTERNAL: (500, "INTERNAL"),
}


def _routes(models: str) -> tuple[Route, ...]:
    # A model's name may contain slashes, and extends to the last colon.
    model = f"{models}/{{model:.+}}"
    return (
        Route("POST", f"{model}:generateContent", RouteAction.COMPLETE, is_stream=False),
        Route("POST", f"{model}:streamGenerateContent", RouteAction.COMPLETE, is_stream=True),
        Route("POST", f"{model}:countTokens", RouteAction.COUNT_TOKENS),
        Route("GET", models, RouteAction.LIST_MODELS),
        Route("GET", model, RouteAction.SHOW_MODEL),
    )


class GoogleGenerate(Dialect):
    name: ClassVar[str] = "google_generate"
    routes: ClassVar[tuple[Route, ...]] = tuple(
        route
        for models in ("/v1beta/models", "/v1/models", *vertex_models("google"))
        for route in _routes(models)
    )
    key_headers: ClassVar[tuple[str, ...]] = ("x-goog-api-key",)

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return query.get("key") or super().key(headers, query)

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "x-goog-api-key" in headers or "x-goog-api-client" in headers

    def parse(self, request: HttpRequest) -> ChatRequest:
        return read_request(
            request.body,
            (request.model or "").removeprefix("models/"),
            stream=bool(request.route.is_stream),
            as_events=request.query.get("alt") == "sse",
            is_count=request.route.action is RouteAction.COUNT_TOKENS,
        )

    def respond(self, identity: CallIdentity, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        usage = usage_of_all([answer.usage for answer in answers])
        candidates = [
            _candidate(_parts(answer.message, request), answer.finish_reason, index)
            for index, answer in enumerate(answers)
        ]
        return orjson.dumps(_body(identity, candidates, _usage(usage)))

    def stream(self, identity: CallIdentity, request: ChatRequest) -> Sequence[StreamEncoder]:
        kind = EventStream if request.wire.get("events") else ArrayStream
        return (kind(identity, with_thoughts=bool(request.wire.get("thoughts"))),)

    def models(self, model: str, max_context: int, created: int) -> bytes:
        return orjson.dumps({"models": [_model(model, max_context)]})

    def model(self, model: str, max_context: int, created: int) -> bytes:
        return orjson.dumps(_model(model, max_context))

    def token_count(self, count: int) -> bytes:
        return orjson.dumps({"totalTokens": count})

    def error(self, error: RequestRefused) -> HttpAnswer:
        return HttpAnswer(_ERRORS[error.refusal][0], orjson.dumps(error_body(error)))


class GenerateStream(StreamEncoder):
    """One streamed answer: every chunk is a whole GenerateContentResponse with what is new."""

    def __init__(self, identity: CallIdentity, *, with_thoughts: bool) -> None:
        self._identity = identity
        self._with_thoughts = with_thoughts
        self._thoughts: list[str] = []
        """Thoughts that no call's signature carries yet."""

    def text(self, text: str) -> bytes:
        return self._part({"text": text})

    def reasoning(self, text: str) -> bytes:
        self._thoughts.append(text)
        return self._part({"text": text, "thought": True}) if self._with_thoughts else b""

    def tool_call(self, call: ToolCall) -> bytes:
        thoughts = "".join(self._thoughts)
        self._thoughts.clear()
        return self._part(_call_part(call, thoughts))

    def finish(self, finish_reason: FinishReason, usage: Usage, stop_sequence: str | None = None) -> bytes:
        # The official clients drop an answer from their history over one chunk without parts.
        last = _candidate([{"text": ""}], finish_reason)
        return self._frame(_body(self._identity, [last], _usage(usage))) + self._end()

    def _part(self, part: dict[str, Any]) -> bytes:
        return self._frame(_body(self._identity, [_candidate([part])]))

    @abstractmethod
    def _frame(self, chunk: dict[str, Any]) -> bytes: ...

    def _end(self) -> bytes:
        return b""


class EventStream(GenerateStream):
    """Server-sent events, for `?alt=sse`."""

    _has_begun = False
    """Whether a keep-alive has already begun the next event."""

    def keep_alive(self) -> bytes:
        """Send the beginning of the next event, then white space before its JSON.

        Nothing else is safe: @google/genai up to 1.20 stops reading at a blank line between events, Gemini
        CLI discards a stream with a comment in it, and the official clients drop an answer from their history
        over a chunk without parts.
        """
        begun, self._has_begun = self._has_begun, True
        return b" " if begun else b"data: "

    def error(self, error: RequestRefused) -> bytes:
        # The official clients recognise an error in a stream only if it is not an event.
        return orjson.dumps(error_body(error)) + b"\n\n"

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        begun, self._has_begun = self._has_begun, False
        return (b"" if begun else b"data: ") + _one_line(chunk) + b"\n\n"


class ArrayStream(GenerateStream):
    """A JSON array whose elements are sent as they are produced."""

    content_type: ClassVar[str] = "application/json"
    _separator = b""

    def start(self) -> bytes:
        return b"["

    def keep_alive(self) -> bytes:
        return b"\n"

    def error(self, error: RequestRefused) -> bytes:
        return self._frame(error_body(error)) + self._end()

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        separator, self._separator = self._separator, b",\n"
        return separator + orjson.dumps(chunk)

    def _end(self) -> bytes:
        return b"]"


def error_body(error: RequestRefused) -> dict[str, Any]:
    code, status = _ERRORS[error.refusal]
    body: dict[str, Any] = {"code": code, "message": _message(error), "status": status}
    match error:
        case RequestRefused(refusal=Refusal.UNKNOWN_KEY):
            body["details"] = [
                {
                    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                    "reason": "API_KEY_INVALID",
                    "domain": "googleapis.com",
                    "metadata": {"service": "generativelanguage.googleapis.com"},
                }
            ]
        case RequestRefused(refusal=Refusal.MALFORMED, field=str(field)):
            violation = {"field": field, "description": error.message}
            body["details"] = [
                {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}
            ]
    return {"error": body}


def _message(error: RequestRefused) -> str:
    """Return the message, in Google's own words for context overflow: harnesses look for them to compact."""
    if error.refusal is not Refusal.CONTEXT_OVERFLOW or error.limit is None:
        return error.message
    count = "" if error.tokens is None else f" ({error.tokens})"
    return f"The input token count{count} exceeds the maximum number of tokens allowed ({error.limit})."


def _body(
    identity: CallIdentity, candidates: list[dict[str, Any]], usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    body: dict[str, Any] = {"candidates": candidates}
    if usage is not None:
        body["usageMetadata"] = usage
    return body | {"modelVersion": identity.model, "responseId": identity.id}


def _candidate(
    parts: list[dict[str, Any]], finish_reason: FinishReason | None = None, index: int = 0
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": index}
    if finish_reason is not None:
        candidate["finishReason"] = _finish(finish_reason)
    return candidate


def _parts(message: Message, request: ChatRequest) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if message.reasoning and request.wire.get("thoughts"):
        parts.append({"text": message.reasoning, "thought": True})
    if message.content:
        parts.append({"text": message.content})
    thoughts = message.reasoning or ""
    parts += [_call_part(call, "" if index else thoughts) for index, call in enumerate(message.tool_calls)]
    return parts or [{"text": ""}]


def _call_part(call: ToolCall, thoughts: str) -> dict[str, Any]:
    return {
        "functionCall": {"id": call.id, "name": call.name, "args": _args(call.arguments)},
        "thoughtSignature": signature(call.id, thoughts),
    }


def _args(arguments: str) -> dict[str, Any] | orjson.Fragment:
    try:
        value = orjson.loads(arguments)
        if isinstance(value, dict) and value.keys() != {RAW_ARGUMENTS}:
            # Encoded separately: inside the answer it would exceed the permitted nesting.
            return orjson.Fragment(orjson.dumps(value))
    except (orjson.JSONDecodeError, TypeError):
        pass  # not JSON, or nested too deeply: sent as it was sampled
    return {RAW_ARGUMENTS: arguments}


def _one_line(chunk: dict[str, Any]) -> bytes:
    """Encode JSON without the characters that JavaScript or Python, but not SSE, treat as line ends."""
    return (
        orjson.dumps(chunk)
        .replace("\u2028".encode(), rb"\u2028")
        .replace("\u2029".encode(), rb"\u2029")
        .replace("\x85".encode(), rb"\u0085")
    )


def _finish(reason: FinishReason) -> str:
    match reason:
        case FinishReason.STOP | FinishReason.TOOL_CALLS:
            return "STOP"
        case FinishReason.LENGTH:
            return "MAX_TOKENS"
        case FinishReason.CANCELLED | FinishReason.ERROR:
            return "OTHER"


def _usage(usage: Usage) -> dict[str, Any]:
    body = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.sampled_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.sampled_tokens,
    }
    if usage.reasoning_tokens:
        body["thoughtsTokenCount"] = usage.reasoning_tokens
    return body | {"cachedContentTokenCount": usage.cached_tokens} if usage.cached_tokens else body


def _model(model: str, max_context: int) -> dict[str, Any]:
    return {
        "name": f"models/{model}",
        "version": "1",
        "displayName": model,
        "inputTokenLimit": max_context,
        "outputTokenLimit": max_context,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
